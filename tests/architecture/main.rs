//! Holds the rules that `src/lib.rs` and `CONTRIBUTING.md` state, so that they stay true.

#![expect(clippy::unwrap_used, reason = "tests may fail loudly")]

mod readme;
mod source;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Who may import whom, as in `src/lib.rs`. Tests inside modules are free: they put parts together.
const RULE: &[(&str, &[&str])] = &[
    ("types", &[]),
    ("config", &["types"]),
    ("telemetry", &["types", "config"]),
    ("engine", &["types", "config", "telemetry"]),
    ("store", &["types", "config", "telemetry"]),
    ("dataset", &["types", "config"]),
    ("reward", &["types", "config", "telemetry", "store"]),
    ("rollout", &["types", "config", "telemetry", "dataset", "engine", "store", "reward"]),
    ("policy", &["types", "config", "telemetry", "engine", "store"]),
    ("train", &["types", "config", "telemetry", "engine", "store", "reward", "policy"]),
    ("native", &["types", "config", "telemetry", "engine", "train"]),
    (
        "http",
        &[
            "types",
            "config",
            "telemetry",
            "dataset",
            "engine",
            "store",
            "reward",
            "rollout",
            "policy",
            "train",
        ],
    ),
];

/// They put everything together; only cycles are refused them.
const FREE: &[&str] = &["app", "bench", "cli", "demo", "runs"];

/// The only modules that may name mistral.rs.
const KNOWS_MISTRAL: &[&str] = &["src/engine/mistral", "src/engine/exchange"];

/// The only module that may read the environment; `cli` declares variables to clap instead.
const READS_ENVIRONMENT: &[&str] = &["src/config/load"];

/// Longest source file, in lines.
const LONGEST: usize = 500;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

struct Source {
    /// Relative to the repository, with `/`.
    path: String,
    /// `engine` of `src/engine/sampler.rs`; empty for `src/lib.rs` and `src/main.rs`.
    module: String,
    /// How many modules below the crate's root.
    depth: usize,
    words: Vec<String>,
}

/// Every file of the library and the binary, test files excepted.
fn sources() -> Vec<Source> {
    let root = root();
    let all = source::files(&root.join("src")).unwrap_or_default();
    let all: Vec<Source> = all.iter().filter_map(|path| read(&root, path)).collect();
    assert!(all.len() > 20, "only {} source files were found", all.len());
    all
}

fn read(root: &Path, path: &Path) -> Option<Source> {
    let relative = path.strip_prefix(root).ok()?;
    let parts: Vec<String> =
        relative.iter().map(|part| part.to_string_lossy().into_owned()).collect();
    let of_tests = |part: &String| part == "tests" || part.ends_with("tests.rs");
    if parts.iter().any(of_tests) {
        return None;
    }
    let names: Vec<&str> = parts[1..]
        .iter()
        .map(|part| part.trim_end_matches(".rs"))
        .filter(|part| !["mod", "lib", "main"].contains(part))
        .collect();
    Some(Source {
        path: parts.join("/"),
        module: names.first().copied().unwrap_or_default().to_owned(),
        depth: names.len(),
        words: source::words(&fs::read_to_string(path).ok()?),
    })
}

/// Which top-level modules each one names, and in which file first.
fn imports() -> BTreeMap<String, BTreeMap<String, String>> {
    let sources = sources();
    let modules: BTreeSet<String> = sources.iter().map(|s| s.module.clone()).collect();
    let mut all: BTreeMap<String, BTreeMap<String, String>> = BTreeMap::new();
    for source in sources.iter().filter(|s| !s.module.is_empty()) {
        let named = all.entry(source.module.clone()).or_default();
        for name in source::modules(&source.words, source.depth) {
            if name != source.module && modules.contains(&name) {
                named.entry(name).or_insert_with(|| source.path.clone());
            }
        }
    }
    all
}

#[test]
fn modules_import_only_what_the_rule_allows() {
    let rule: BTreeMap<&str, &[&str]> = RULE.iter().copied().collect();
    let imports = imports();
    for (module, named) in &imports {
        if FREE.contains(&module.as_str()) {
            continue;
        }
        let allowed = rule.get(module.as_str());
        let allowed = allowed.unwrap_or_else(|| panic!("src/{module} has no place in the rule"));
        for (name, path) in named {
            assert!(allowed.contains(&name.as_str()), "{path}: {module} may not import {name}");
        }
    }
    // The parser does see imports: these are the ones the loop cannot do without.
    for (from, to) in [("rollout", "engine"), ("policy", "store"), ("reward", "config")] {
        assert!(imports[from].contains_key(to), "{from} was not seen to import {to}");
    }
}

#[test]
fn there_are_no_cycles() {
    let mut left = imports();
    // Take away whoever imports nobody that is left, until nobody is.
    while !left.is_empty() {
        let names: BTreeSet<String> = left.keys().cloned().collect();
        let before = left.len();
        left.retain(|_, named| named.keys().any(|name| names.contains(name)));
        assert!(left.len() < before, "these import each other: {left:#?}");
    }
}

#[test]
fn only_the_engine_knows_mistral() {
    for source in sources() {
        let knows = source.words.iter().any(|w| w.starts_with("mistralrs"));
        let may = KNOWS_MISTRAL.iter().any(|prefix| source.path.starts_with(prefix));
        assert!(!knows || may, "{} names mistral.rs", source.path);
    }
}

#[test]
fn only_the_configuration_reads_the_environment() {
    let reads = ["var", "vars", "var_os", "vars_os", "set_var", "remove_var"];
    for source in sources() {
        let may = READS_ENVIRONMENT.iter().any(|prefix| source.path.starts_with(prefix));
        let found = source.words.windows(4).find(|w| {
            w[0] == "env"
                && w[1] == ":"
                && w[2] == ":"
                && (reads.contains(&w[3].as_str()) || w[3] == "{")
        });
        assert!(found.is_none() || may, "{} uses the environment: {found:?}", source.path);
    }
}

/// Every crate with its features, as one kind of build resolves them.
fn crates(edges: &str) -> BTreeSet<String> {
    let output = Command::new(env!("CARGO"))
        .args(["tree", "--offline", "--prefix", "none", "--no-dedupe"])
        .args(["--edges", edges, "--format", "{p} [{f}]"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().map(|l| l.replace(" (*)", "").replace(" (proc-macro)", "")).collect()
}

#[test]
fn dev_dependencies_change_no_dependency() {
    let (without, with) = (crates("normal,build"), crates("normal,build,dev"));
    assert!(without.len() > 300, "{} crates", without.len());
    let changed: Vec<&String> = without.difference(&with).collect();
    assert!(
        changed.is_empty(),
        "`cargo test` would build these and their users anew: {changed:#?}"
    );
}

#[test]
fn files_are_short_enough_to_read() {
    let root = root();
    for folder in ["src", "tests", "examples", "benches"] {
        for path in source::files(&root.join(folder)).unwrap() {
            let lines = fs::read_to_string(&path).unwrap().lines().count();
            assert!(lines <= LONGEST, "{}: {lines} lines", path.display());
        }
    }
}

#[test]
fn the_parser_reads_what_rust_allows() {
    let words = source::words(
        r##"
        // crate::comment
        /* crate::block /* nested crate::block */ */
        use crate::store;
        use crate::engine::{Codec, Engine};
        use crate::types::X as Y;

        fn f<'a>(c: char) -> &'a str { if c == '"' { "crate::text" } else { r#"crate::"raw"# } }
        impl super::super::policy::P for super::Near { }
        pub(crate) fn g() -> crate::train::T { super::super::super::too_far() }
        #[cfg(test)]
        mod tests { use crate::demo::D; fn t() { { } } }
        fn after() { crate::http::x() }
        "##,
    );
    let expected = ["engine", "store", "types", "policy", "train", "too_far", "http"];
    assert_eq!(source::modules(&words, 2), expected);
}
