use redb::{ReadableDatabase, ReadableTableMetadata, TableDefinition, WriteTransaction};

use super::*;
use crate::format::{INTERACTIONS, SAMPLES, VERSION};
use crate::migrate::{MIGRATIONS, Migration, run, to_current};
use crate::{StoreError, file, maintain, migrate};

const TAGS: TableDefinition<&str, u64> = TableDefinition::new("tags");

fn add_tags(tx: &WriteTransaction) -> Result<(), StoreError> {
    tx.open_table(TAGS)?.insert("made", 1)?;
    Ok(())
}

fn add_tags_and_fail(tx: &WriteTransaction) -> Result<(), StoreError> {
    add_tags(tx)?;
    tx.open_table(INTERACTIONS)?.retain(|_, _| false)?;
    Err(StoreError::Failed("planned".to_owned()))
}

/// The schema version of a hypothetical next release.
const NEXT: u32 = VERSION + 1;

fn with_next(run: fn(&WriteTransaction) -> Result<(), StoreError>) -> Vec<Migration> {
    let mut all: Vec<Migration> = MIGRATIONS.iter().map(|m| Migration { ..*m }).collect();
    all.push(Migration { to: NEXT, description: "tags, for this test only", run });
    all
}

fn accept(_: &WriteTransaction) -> Result<(), StoreError> {
    Ok(())
}

fn refuse(_: &WriteTransaction) -> Result<(), StoreError> {
    Err(StoreError::Failed("planned".to_owned()))
}

fn filled(path: &Path) -> redb::Database {
    let store = open(path);
    store.commit_blocking(prompt_ops(1, 1)).unwrap();
    drop(store);
    file::create(path).unwrap()
}

fn version(database: &redb::Database) -> u32 {
    migrate::version(&database.begin_read().unwrap()).unwrap()
}

/// Numbers of prompts and completions.
fn rows(database: &redb::Database) -> [u64; 2] {
    let tx = database.begin_read().unwrap();
    [INTERACTIONS, SAMPLES].map(|table| tx.open_table(table).unwrap().len().unwrap())
}

fn has_tags(database: &redb::Database) -> bool {
    database.begin_read().unwrap().open_table(TAGS).is_ok()
}

#[test]
fn migrations_are_in_order_and_end_at_the_current_version() {
    let versions: Vec<u32> = MIGRATIONS.iter().map(|m| m.to).collect();
    assert_eq!(versions, (1..=VERSION).collect::<Vec<_>>());
    assert!(MIGRATIONS.iter().all(|m| !m.description.is_empty()));
}

#[test]
fn new_and_old_files_are_migrated_to_the_current_version() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ledger.redb");
    let database = file::create(&path).unwrap();
    assert_eq!(version(&database), 0);
    to_current(&database).unwrap();
    assert_eq!(version(&database), VERSION);
    let found = run(&database, MIGRATIONS, refuse).unwrap();
    assert_eq!(found, VERSION, "without a pending migration nothing is verified");
    drop(database);

    let database = filled(&path);
    assert_eq!(run(&database, &with_next(add_tags), accept).unwrap(), VERSION);
    assert_eq!(version(&database), NEXT);
    assert!(has_tags(&database));
    assert_eq!(rows(&database), [1, 2]);
}

#[test]
fn a_failed_migration_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ledger.redb");
    let database = filled(&path);
    let before = rows(&database);
    for (migration, verify) in
        [(add_tags_and_fail as fn(&_) -> _, accept as fn(&_) -> _), (add_tags, refuse)]
    {
        let failed = run(&database, &with_next(migration), verify);
        assert!(matches!(failed, Err(StoreError::Failed(ref e)) if e == "planned"), "{failed:?}");
        assert_eq!(version(&database), VERSION);
        assert!(!has_tags(&database));
        assert_eq!(rows(&database), before);
    }
    drop(database);
    assert!(maintain::check(&path).unwrap().is_healthy());
    assert_eq!(open(&path).interaction(interaction_id(1)).unwrap(), Some(interaction(1)));
}

#[test]
fn a_newer_file_is_refused_and_not_changed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ledger.redb");
    let database = filled(&path);
    run(&database, &with_next(add_tags), accept).unwrap();
    drop(database);
    let text = format!(
        "the ledger has schema version {NEXT}; this hone knows versions up to {VERSION}: use a newer \
         hone, or another data directory"
    );
    let opened = Store::open(&path, &StoreConfig::default(), metrics()).map(drop);
    for refused in [opened, maintain::stats(&path).map(drop)] {
        assert_eq!(refused.unwrap_err(), StoreError::Unusable(text.clone()));
    }
    let database = file::create(&path).unwrap();
    assert!(has_tags(&database) && rows(&database) == [1, 2]);
}
