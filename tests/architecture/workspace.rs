//! The shape of the workspace: crates, folders, files and tests.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use super::imports::{Crate, cycles};
use super::root;

/// Longest `mod tests { ... }` inside a source file, in lines. Longer ones have a file of their own.
const LONGEST_INLINE_TESTS: usize = 200;

/// Every `.rs` file below `directory`, in order; empty if it does not exist.
fn rust_files(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let Ok(entries) = fs::read_dir(directory) else { return found };
    for path in entries.map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            found.extend(rust_files(&path));
        } else if path.extension().is_some_and(|e| e == "rs") {
            found.push(path);
        }
    }
    found.sort();
    found
}

fn all_rust_files() -> Vec<PathBuf> {
    let folders = ["src", "crates", "tests", "examples", "benches", "migrations"];
    let files: Vec<PathBuf> = folders.iter().flat_map(|f| rust_files(&root().join(f))).collect();
    assert!(files.len() > 300, "{} files", files.len());
    files
}

fn shown(path: &Path) -> String {
    path.strip_prefix(root()).unwrap_or(path).display().to_string()
}

/// The `lib.rs` of every member.
fn libraries() -> Vec<PathBuf> {
    let crates = fs::read_dir(root().join("crates")).unwrap();
    let mut all: Vec<PathBuf> = crates.map(|e| e.unwrap().path().join("src/lib.rs")).collect();
    all.push(root().join("src/lib.rs"));
    all.sort();
    assert!(all.len() > 10, "{all:?}");
    all
}

#[test]
fn files_of_a_crate_do_not_import_each_other_in_a_circle() {
    let rings = libraries().into_iter().flat_map(|library| cycles(&Crate::read(&library).uses()));
    let edges: Vec<String> =
        rings.flatten().map(|(a, b)| format!("{} -> {}", shown(&a), shown(&b))).collect();
    assert!(edges.is_empty(), "{}", edges.join("\n"));
    // The reader does see imports: the store's writer applies operations to the tables.
    let store = Crate::read(&root().join("crates/store/src/lib.rs")).uses();
    let seen: usize = store.values().map(BTreeSet::len).sum();
    assert!(seen > 20, "{seen} imports in crates/store");
}

#[test]
fn a_type_name_has_one_meaning() {
    let mut defined: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for library in libraries() {
        for (name, file) in Crate::read(&library).types() {
            defined.entry(name).or_default().insert(shown(&file));
        }
    }
    assert!(defined.len() > 400, "{} types", defined.len());
    let shared: Vec<_> = defined.iter().filter(|(_, files)| files.len() > 1).collect();
    assert!(shared.is_empty(), "{shared:#?}");
}

/// One layout: `mod tests` at the end of the file, or `tests.rs` or `tests/` beside `mod.rs`.
#[test]
fn unit_tests_have_one_layout() {
    for path in all_rust_files() {
        let name = shown(&path);
        assert!(!name.ends_with("_tests.rs"), "{name}: unit tests belong into a module `tests`");
        let text = fs::read_to_string(&path).unwrap();
        for (_, after) in
            text.match_indices("#[cfg(test)]\nmod ").map(|(i, m)| (i, &text[i + m.len()..]))
        {
            let module: String =
                after.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            assert!(["tests", "testing"].contains(&module.as_str()), "{name}: mod {module}");
            if after[module.len()..].starts_with(" {") {
                let lines = after.lines().count();
                assert!(lines <= LONGEST_INLINE_TESTS, "{name}: {lines} lines of inline tests");
            }
        }
    }
}

fn metadata() -> Value {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--offline", "--no-deps", "--format-version", "1"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn one_crate_depends_on_mistral() {
    let metadata = metadata();
    let packages = metadata["packages"].as_array().unwrap();
    let depends = |package: &&Value| {
        let dependencies = package["dependencies"].as_array().unwrap();
        dependencies.iter().any(|d| d["name"].as_str().unwrap().starts_with("mistralrs"))
    };
    let names: Vec<&str> =
        packages.iter().filter(depends).map(|p| p["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["hone-mistral"]);
    assert!(packages.len() > 10, "{} packages", packages.len());
}

#[test]
fn crates_depend_on_each_other_as_documented() {
    let quoted = |cell: &str| -> BTreeSet<String> {
        cell.split('`').skip(1).step_by(2).map(str::to_owned).collect()
    };
    let document = fs::read_to_string(root().join("docs/architecture.md")).unwrap();
    let rows = document.lines().skip_while(|line| !line.starts_with("| crate | responsibility"));
    let documented: BTreeMap<String, BTreeSet<String>> = rows
        .skip(2)
        .map_while(|line| line.strip_prefix("| `")?.split_once('`'))
        .map(|(name, rest)| (name.to_owned(), quoted(rest.rsplit(" | ").next().unwrap())))
        .collect();
    let short = |name: &Value| name.as_str().unwrap().trim_start_matches("hone-").to_owned();
    let mut found = BTreeMap::new();
    for package in metadata()["packages"].as_array().unwrap() {
        let dependencies = package["dependencies"].as_array().unwrap().iter();
        let own = dependencies.filter(|d| d["kind"].is_null() && d["path"].is_string());
        found.insert(short(&package["name"]), own.map(|d| short(&d["name"])).collect());
    }
    assert_eq!(documented, found);
}

/// Only the configuration's loader, and `skip` of tests; the command line declares variables to clap
/// instead.
#[test]
fn only_the_configuration_reads_the_environment() {
    let reads =
        regex::Regex::new(r"\benv::(?:var|vars|var_os|vars_os|set_var|remove_var)\b").unwrap();
    for path in all_rust_files() {
        let name = shown(&path);
        let tests = name.starts_with("tests/") || name.contains("/tests");
        let exempt = ["crates/config/src/lib.rs", "crates/core/src/testing/mod.rs"];
        if tests || exempt.contains(&name.as_str()) {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        assert!(!reads.is_match(&text), "{name} reads the environment");
    }
}

/// Every dependency with its features, for one kind of build.
fn resolved(edges: &str) -> BTreeSet<String> {
    let output = Command::new(env!("CARGO"))
        .args(["tree", "--offline", "--workspace", "--prefix", "none", "--no-dedupe"])
        .args(["--edges", edges, "--format", "{p} [{f}]"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().map(|l| l.replace(" (*)", "").replace(" (proc-macro)", "")).collect()
}

/// Otherwise `cargo test` after `cargo run` would rebuild dependencies with other features.
#[test]
fn dev_dependencies_change_no_dependency() {
    let (without, with) = (resolved("normal,build"), resolved("normal,build,dev"));
    assert!(without.len() > 300, "{} crates", without.len());
    let changed: Vec<&String> = without.difference(&with).collect();
    assert!(changed.is_empty(), "`cargo test` would rebuild these and their users: {changed:#?}");
}
