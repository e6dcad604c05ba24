use super::*;
use crate::format::codec::{LedgerRecord, RECORD_VERSION, decode, encode};
use crate::format::{GROUPS, READY, SAMPLES};
use crate::maintain::{check, compact, export, stats};
use crate::{Ledger, StoreError, file, import};

fn fill(path: &Path) {
    let store = open(path);
    for n in 1..=20 {
        let mut ops = prompt_ops(n, 2);
        ops.push(Op::Group(Box::new(group(n, n, &[10 * n, 10 * n + 1], &["exact"]))));
        ops.push(feedback(thumbs(n, 1.0, n)));
        store.commit_blocking(ops).unwrap();
    }
    store.commit_blocking(vec![Op::Step(Box::new(step(1, &[1, 2])))]).unwrap();
    store.commit_blocking(vec![Op::Policy(Box::new(policy(0, PolicyState::Active)))]).unwrap();
}

#[test]
fn stats_check_compact_and_export_agree() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ledger.redb");
    fill(&path);
    let rows = stats(&path).unwrap();
    assert_eq!((rows.interactions, rows.samples, rows.rewards), (20, 60, 80));
    assert_eq!((rows.feedback, rows.groups, rows.steps, rows.policy_versions), (20, 20, 1, 1));

    let report = check(&path).unwrap();
    assert!(report.is_healthy(), "{report:?}");
    assert_eq!(report.rows, rows);

    let compacted = compact(&path).unwrap();
    assert!(compacted.bytes_after <= compacted.bytes_before);
    assert_eq!(compacted.bytes_after, hone_core::files::tree_bytes(&path).unwrap());
    assert!(check(&path).unwrap().is_healthy());

    let mut text = Vec::new();
    let lines = export(&path, &mut text).unwrap();
    let text = String::from_utf8(text).unwrap();
    assert_eq!(lines, 20 + 60 + 80 + 20 + 20 + 1 + 1);
    let parsed: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(parsed.len() as u64, lines);
    let first: Interaction = serde_json::from_value(parsed[0]["row"].clone()).unwrap();
    assert_eq!((parsed[0]["table"].as_str(), first), (Some("interactions"), interaction(1)));
    let thumbs = parsed.iter().filter(|line| line["table"] == "feedback").count();
    assert_eq!(thumbs, 20);
}

#[test]
fn offline_operations_refuse_missing_files_and_files_in_use() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ledger.redb");
    assert!(matches!(stats(&path), Err(StoreError::Failed(_))));
    assert!(!path.exists(), "a query must not create the file");
    let store = open(&path);
    assert!(matches!(check(&path), Err(StoreError::InUse(_))));
    drop(store);
    assert!(check(&path).unwrap().is_healthy());
}

#[test]
fn check_finds_missing_undecodable_and_wrongly_indexed_records() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ledger.redb");
    fill(&path);
    let database = file::create(&path).unwrap();
    file::write(&database, |tx| {
        let mut samples = tx.open_table(SAMPLES)?;
        samples.remove(sample_id(10).0.as_bytes())?;
        samples.insert(sample_id(20).0.as_bytes(), [9_u8, 9].as_slice())?;
        tx.open_table(READY)?.insert((1, group_id(77).0.as_bytes()), ())?;
        let trained = Group { state: GroupState::Ready, ..group(1, 1, &[10, 11], &["exact"]) };
        let bytes = encode(&trained)?;
        tx.open_table(GROUPS)?.insert(trained.id.0.as_bytes(), bytes.as_slice())?;
        Ok(())
    })
    .unwrap();
    drop(database);
    let report = check(&path).unwrap();
    assert!(report.intact && !report.is_healthy());
    for expected in [
        format!("samples {}: ledger: samples holds a value that cannot be read", sample_id(20)),
        format!("rewards {} exact: its sample is missing", sample_id(10)),
        format!("groups {}: a member is missing", group_id(1)),
        format!("groups {}: the index of ready groups disagrees", group_id(1)),
        format!("samples_by_interaction {}: no such sample", sample_id(10)),
        format!("ready_groups {}: no such group", group_id(77)),
    ] {
        assert!(report.problems.iter().any(|p| p.starts_with(&expected)), "{expected}: {report:?}");
    }
}

#[test]
fn decoding_refuses_truncated_extended_and_newer_values() {
    fn refuses<R: LedgerRecord + std::fmt::Debug>(row: &R) {
        let bytes = encode(row).unwrap();
        assert_eq!(bytes[0], RECORD_VERSION);
        decode::<R>(&bytes).unwrap();
        let cut = decode::<R>(&bytes[..bytes.len() - 1]);
        assert!(matches!(cut, Err(StoreError::Corrupt { .. })));
        let extra = decode::<R>(&[&bytes[..], &[0]].concat());
        assert!(matches!(extra, Err(StoreError::Corrupt { .. })));
        let newer = RECORD_VERSION + 1;
        let later = decode::<R>(&[&[newer], &bytes[1..]].concat());
        let message = later.unwrap_err().to_string();
        let version = format!("version {newer}");
        assert!(message.contains(R::TABLE) && message.contains(&version), "{message}");
        assert!(decode::<R>(&[]).is_err());
    }
    refuses(&interaction(1));
    refuses(&served(1, 1));
    refuses(&graded(1, 1, "exact", None));
    refuses(&group(1, 1, &[1, 2], &["exact"]));
    refuses(&policy(1, PolicyState::Rejected));
    refuses(&step(1, &[1]));
}

#[test]
fn a_reader_finds_every_record_and_changes_no_byte() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ledger.redb");
    assert!(matches!(Ledger::open_read_only(&path), Err(StoreError::Failed(_))));
    fill(&path);
    let before = std::fs::read(&path).unwrap();
    let (reader, second) =
        (Ledger::open_read_only(&path).unwrap(), Ledger::open_read_only(&path).unwrap());
    let groups = reader.groups().unwrap();
    assert_eq!((groups.len(), groups[0].id), (20, group_id(1)));
    assert_eq!(second.policies().unwrap().len(), 1);
    assert!(reader.quarantined().unwrap().is_empty());
    assert!(reader.held_out_prompts().unwrap().is_empty());
    assert_eq!(reader.interaction(interaction_id(1)).unwrap(), Some(interaction(1)));
    let member = groups[0].members[0];
    assert_eq!(reader.sample(member).unwrap().unwrap().id, member);
    assert!(!reader.rewards_of(member).unwrap().is_empty());
    drop((reader, second));
    assert!(std::fs::read(&path).unwrap() == before, "the file has changed");
}

#[test]
fn a_reader_refuses_files_in_use_and_files_that_were_not_closed() {
    let dir = tempfile::tempdir().unwrap();
    let (path, copy) = (dir.path().join("ledger.redb"), dir.path().join("copy.redb"));
    let store = open(&path);
    store.commit_blocking(prompt_ops(1, 2)).unwrap();
    assert!(matches!(Ledger::open_read_only(&path), Err(StoreError::InUse(_))));
    // A crash leaves the same bytes.
    std::fs::copy(&path, &copy).unwrap();
    drop(store);
    let refused = Ledger::open_read_only(&copy).err().unwrap();
    assert!(refused.to_string().contains("was not closed"), "{refused}");
    assert!(check(&copy).is_ok());
    assert!(Ledger::open_read_only(&copy).is_ok());
}

/// The finding was a panic of redb at one of 25 starts.
#[test]
fn damaged_pages_are_errors_and_not_panics() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ledger.redb");
    fill(&path);
    let whole = std::fs::read(&path).unwrap();
    let mut random = 1_u64;
    let mut next = || {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        random >> 33
    };
    let mut found = 0;
    for round in 0..40 {
        let mut bytes = whole.clone();
        // Every other time within the first pages, where redb keeps its own records.
        let end = if round % 2 == 0 { bytes.len() } else { 16 << 10 };
        let start = next() as usize % (end - 8);
        bytes[start..start + 8].fill_with(|| next() as u8);
        std::fs::write(&path, &bytes).unwrap();
        let config = StoreConfig { group_commit_ms: 0, ..StoreConfig::default() };
        let opened = std::panic::catch_unwind(|| Store::open(&path, &config, metrics()).map(drop));
        std::fs::write(&path, &bytes).unwrap();
        let checked = check(&path).map(|report| report.is_healthy());
        std::fs::write(&path, &bytes).unwrap();
        let (counted, exported) = (stats(&path), export(&path, std::io::sink()));
        found += u32::from(opened.expect("a start panics").is_err());
        found += u32::from(!checked.is_ok_and(|healthy| healthy));
        found += u32::from(counted.is_err() || exported.is_err());
    }
    assert!(found > 0, "no damage was found");
}

/// Everything that an export has, and the indexes, are as before.
#[test]
fn an_import_of_an_export_has_the_same_records_and_indexes() {
    let dir = tempfile::tempdir().unwrap();
    let (path, copy) = (dir.path().join("ledger.redb"), dir.path().join("copy.redb"));
    fill(&path);
    let store = open(&path);
    // One that waits for a group, one that came after its group, and an erased prompt with a group.
    store.commit_blocking(prompt_ops(30, 0)).unwrap();
    store.commit_blocking(vec![feedback(thumbs(30, 1.0, 30))]).unwrap();
    store.commit_blocking(vec![Op::Erase(interaction(5).id, 7)]).unwrap();
    let waiting = |ledger: &Ledger| ledger.ungrouped_feedback(u64::MAX, 100).unwrap();
    let (ready, ungrouped) = (store.ready_groups(100).unwrap(), waiting(&store));
    assert!(!ungrouped.is_empty() && !ready.is_empty());
    drop(store);
    let mut lines = Vec::new();
    export(&path, &mut lines).unwrap();
    lines.extend_from_slice(b"\n{\"table\":\"later\",\"row\":{}}\n");

    let report = import(&copy, &lines[..]).unwrap();
    assert_eq!(report.left_out, [("later".to_owned(), 1)].into());
    assert_eq!(report.imported["samples"], stats(&path).unwrap().samples);
    assert_eq!(stats(&copy).unwrap(), stats(&path).unwrap());
    let mut again = Vec::new();
    export(&copy, &mut again).unwrap();
    assert!(lines.starts_with(&again));
    let ledger = Ledger::open_read_only(&copy).unwrap();
    assert_eq!((ledger.ready_groups(100).unwrap(), waiting(&ledger)), (ready, ungrouped));
    drop(ledger);
    assert!(check(&copy).unwrap().is_healthy());

    let refused =
        |lines: &[u8]| import(&dir.path().join("bad.redb"), lines).unwrap_err().to_string();
    assert!(import(&copy, &lines[..]).unwrap_err().to_string().contains("exists already"));
    assert!(refused(b"{}").contains("line 1"), "{}", refused(b"{}"));
    assert!(refused(b"\n{\"table\":\"steps\",\"row\":1}").contains("line 2"));
    let half: Vec<u8> = lines.split_inclusive(|b| *b == b'\n').skip(1).flatten().copied().collect();
    assert!(refused(&half).contains("its sample is missing"), "{}", refused(&half));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2, "nothing is left of them");
}
