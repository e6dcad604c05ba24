//! The keys and links in the documents exist.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use hone::config::environment_names;

/// Folders that documents name in backquotes.
pub(super) const FOLDERS: &[&str] = &[
    "src/",
    "crates/",
    "configs/",
    "deploy/",
    "dashboards/",
    "datasets/",
    "tests/",
    "examples/",
    "migrations/",
    "benches/",
    "docs/",
    ".ci/",
];

/// The Markdown files that git tracks, relative to the repository, each with its text.
pub(super) fn documents() -> Vec<(String, String)> {
    let root = super::root();
    let listed = Command::new("git").args(["ls-files", "*.md"]).current_dir(&root).output();
    let names = String::from_utf8(listed.unwrap().stdout).unwrap();
    let read = |name: &str| (name.to_owned(), fs::read_to_string(root.join(name)).unwrap());
    let all: Vec<_> = names.lines().map(read).collect();
    assert!(all.len() > 10, "{} documents", all.len());
    all
}

/// Every key of the configuration by its path, tables included; those of lists of tables without a
/// number.
pub(super) fn configuration_keys() -> BTreeSet<String> {
    fn collect(prefix: &str, value: &toml::Value, found: &mut BTreeSet<String>) {
        match value {
            toml::Value::Table(table) => {
                for (name, inner) in table {
                    let key =
                        if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
                    collect(&key, inner, found);
                    found.insert(key);
                }
            }
            toml::Value::Array(items) => {
                for item in items {
                    collect(prefix, item, found);
                }
            }
            _ => {}
        }
    }
    let text = fs::read_to_string(super::root().join("configs/default.toml")).unwrap();
    let table: toml::Table = text.parse().unwrap();
    let mut found = BTreeSet::new();
    collect("", &toml::Value::Table(table), &mut found);
    // Keys without a default are comments in the file.
    found.extend(environment_names().into_iter().map(|(_, key)| key));
    found
}

/// Texts in backquotes outside of code blocks that look like the path of a key.
fn keys_named(text: &str) -> Vec<String> {
    let mut named = Vec::new();
    let mut inside = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            inside = !inside;
        } else if !inside {
            for quoted in line.split('`').skip(1).step_by(2) {
                // `train.kl.target = 0.1` names its key.
                let path = quoted.split(" = ").next().unwrap();
                let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
                if path.contains('.')
                    && path.split('.').all(|p| !p.is_empty() && p.chars().all(plain))
                {
                    named.push(path.to_owned());
                }
            }
        }
    }
    named
}

#[test]
fn every_key_in_the_documents_is_a_key() {
    let keys = configuration_keys();
    let mut checked = 0;
    for (document, text) in documents() {
        for path in keys_named(&text) {
            let section = path.split('.').next().unwrap();
            // Files, such as `state.json`, are in no section.
            if keys.contains(section) {
                assert!(keys.contains(&path), "{document}: {path} is not in configs/default.toml");
                checked += 1;
            }
        }
    }
    assert!(checked > 100, "{checked} keys");
}

/// `tests/reference/check_trl_options.py` compares the first column with an installed TRL.
#[test]
fn every_option_of_trl_has_a_key_or_a_reason() {
    let text = fs::read_to_string(super::root().join("docs/trl.md")).unwrap();
    let mut rows = 0;
    for row in text.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        assert_eq!(cells.len(), 5, "{row}");
        let (key, why) = (cells[2], cells[3]);
        assert!(!(key.is_empty() && why.is_empty()), "neither a key nor a reason: {row}");
        assert_eq!(key.is_empty(), keys_named(key).is_empty(), "not a key: {row}");
        rows += 1;
    }
    assert!(rows > 60, "{rows} rows");
}

#[test]
fn every_link_in_the_documents_leads_somewhere() {
    let root = super::root();
    let mut checked = 0;
    for (document, text) in documents() {
        let folder = root.join(&document).parent().unwrap().to_owned();
        let links = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        let quoted = text.split('`').skip(1).step_by(2);
        let quoted = quoted.filter(|q| FOLDERS.iter().any(|folder| q.starts_with(folder)));
        let links = links.map(|target| (folder.clone(), target));
        for (base, target) in links.chain(quoted.map(|target| (root.clone(), target))) {
            if target.contains("://") || target.starts_with('#') || target.contains(['*', '{', ' '])
            {
                continue;
            }
            let path = target.split('#').next().unwrap();
            assert!(base.join(path).exists(), "{document}: {target} does not exist");
            checked += 1;
        }
    }
    assert!(checked > 50, "{checked} links");
}
