//! The keys, links, names and speeds in the documents exist, and no text has a banned phrase.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use regex::Regex;
use serde_json::Value;

use hone::config::environment_names;

use super::commands::check_hone;
use super::root;

/// Folders that documents name in backquotes.
pub(super) const FOLDERS: &str = "src/ crates/ configs/ deploy/ dashboards/ datasets/ tests/ examples/ migrations/ benches/ docs/ .ci/";

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
        let quoted = quoted.filter(|q| FOLDERS.split(' ').any(|folder| q.starts_with(folder)));
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

/// Phrases, divided by `|`; any white space and comment markers may separate the words.
const BANNED: &str = "told|tells|nobody|nobody's|somebody|somebody's|anew|by hand|as it was|besides|none of|\
    behind|gives way|give way|nought|put out|of no meaning|in nothing";

/// Files with text that people read: code, documents, configuration, dashboards and scripts.
const ENDINGS: &[&str] =
    &["rs", "md", "toml", "py", "sh", "yml", "yaml", "service", "json", "Dockerfile", "run"];

/// Files without sentences of this project.
const EXCEPT: &[&str] = &["tests/architecture/documents.rs", "Cargo.lock"];

/// Folders of generated or measured data.
const DATA: &[&str] = &["datasets/", "models/", "tests/fixtures/", "tests/reference/"];

fn pattern() -> Regex {
    let phrases = BANNED.split('|').map(|phrase| phrase.split(' ').collect::<Vec<_>>());
    let joined: Vec<String> =
        phrases.map(|words| words.join(r"\s+(?:(?://[/!]?|#)\s+)?")).collect();
    Regex::new(&format!(r"(?i)\b(?:{})\b", joined.join("|"))).unwrap()
}

/// Every file that git tracks or would track, relative to the repository.
fn files(root: &Path) -> Vec<PathBuf> {
    let listed = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard"])
        .current_dir(root)
        .output()
        .unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    listed.lines().map(PathBuf::from).filter(|file| root.join(file).is_file()).collect()
}

#[test]
fn texts_avoid_the_banned_phrases() {
    let root = super::root();
    let (pattern, mut checked, mut found) = (pattern(), 0, Vec::new());
    for file in files(&root) {
        let name = file.to_string_lossy().replace('\\', "/");
        let data = DATA.iter().any(|folder| name.starts_with(folder)) && !name.ends_with(".py");
        let ends = ENDINGS.iter().any(|e| name.ends_with(&format!(".{e}")) || name.ends_with(e));
        if EXCEPT.contains(&name.as_str()) || data || !ends {
            continue;
        }
        let text = fs::read_to_string(root.join(&file)).unwrap();
        checked += 1;
        for hit in pattern.find_iter(&text) {
            let line = text[..hit.start()].lines().count().max(1);
            found.push(format!("{name}:{line}: {:?}", hit.as_str()));
        }
    }
    assert!(checked > 300, "{checked} files");
    assert!(found.is_empty(), "{} banned phrases:\n{}", found.len(), found.join("\n"));
}

fn read(document: &str) -> String {
    fs::read_to_string(super::root().join(document)).unwrap()
}

/// The text before, between and after the markers of the generated part.
fn parts(text: &str) -> (&str, &str, &str) {
    let (before, rest) = text.split_once("<!-- generated: peers -->\n").unwrap();
    let (generated, after) = rest.split_once("<!-- end -->").unwrap();
    (before, generated.trim(), after)
}

/// Cells with a digit, without those of the first column.
fn values(generated: &str) -> BTreeSet<&str> {
    let rows = generated.lines().filter_map(|line| line.strip_prefix("| "));
    let cells = rows.flat_map(|row| row.trim_end_matches('|').split(" | ").skip(1).map(str::trim));
    cells.filter(|cell| cell.contains(|c: char| c.is_ascii_digit())).collect()
}

/// Speeds and ratios in prose: `39 tokens/s`, `3.8 times`, `6.6×`.
fn speeds(text: &str) -> Vec<&str> {
    let speed = Regex::new(r"\d[\d.,]*\s*(?:tokens/s|tok/s|tokens per second|times\b|x\b|×|-fold)");
    speed.unwrap().find_iter(text).map(|found| found.as_str()).collect()
}

#[test]
fn generated_tables_are_those_of_the_recorded_results() {
    let results: Value = serde_json::from_str(&read("benches/peers/results.json")).unwrap();
    for document in ["README.md", "docs/benchmarks.md"] {
        let lines = results["documents"][document].as_array().unwrap();
        let lines: Vec<&str> = lines.iter().map(|line| line.as_str().unwrap()).collect();
        let text = read(document);
        assert!(lines.len() > 5, "{document}: {lines:?}");
        assert_eq!(parts(&text).1, lines.join("\n"), "{document}: run all.py --tables-only");
    }
}

#[test]
fn the_readme_quotes_speed_only_from_the_benchmarks() {
    let (readme, benchmarks) = (read("README.md"), read("docs/benchmarks.md"));
    let (before, quoted, after) = parts(&readme);
    let (quoted, known) = (values(quoted), values(parts(&benchmarks).1));
    assert!(quoted.len() > 5, "{quoted:?}");
    let unknown: Vec<_> = quoted.difference(&known).collect();
    assert!(unknown.is_empty(), "not in the tables of docs/benchmarks.md: {unknown:?}");
    for speed in [speeds(before), speeds(after)].concat() {
        assert!(known.contains(speed), "{speed:?} is not in the tables of docs/benchmarks.md");
    }
}

#[test]
fn every_fault_has_a_test() {
    let root = super::root();
    let code = files(&root).into_iter().filter(|file| file.extension().is_some_and(|e| e == "rs"));
    let code: String = code.map(|file| fs::read_to_string(root.join(file)).unwrap()).collect();
    let (text, mut checked) = (read("docs/reliability.md"), 0);
    for row in text.lines().filter(|line| line.starts_with("| ")).skip(2) {
        let tests = row.rsplit(" | ").next().unwrap().split('`').skip(1).step_by(2);
        let tests: Vec<_> = tests.collect();
        assert!(!tests.is_empty(), "no test: {row}");
        for test in tests {
            assert!(code.contains(&format!("fn {test}(")), "there is no test {test}");
            checked += 1;
        }
    }
    assert!(checked > 15, "{checked} tests");
}

const DOCUMENT: &str = "docs/from-trl.md";
const GUIDES: [&str; 5] = ["000", "001", "002", "003", "004"];

/// What a name in the third column refers to.
fn check_name(name: &str, keys: &BTreeSet<String>) -> Result<(), String> {
    let quoted = |prefix: &str| name.strip_prefix(prefix).and_then(|rest| rest.strip_suffix('"'));
    if let Some(kind) = quoted("kind = \"") {
        let known = hone_reward::catalogue().iter().any(|entry| entry.kind == kind);
        return known.then_some(()).ok_or_else(|| format!("there is no kind {kind}"));
    }
    if let Some(preset) = quoted("preset = \"") {
        let route = format!("[[route]]\nname = \"r\"\npreset = \"{preset}\"\n");
        return hone::config::parse(&route).map(|_| ()).map_err(|error| error.to_string());
    }
    if let Some(arguments) = name.strip_prefix("hone ") {
        let arguments: Vec<String> = arguments.split(' ').map(str::to_owned).collect();
        return check_hone(DOCUMENT, &arguments, false);
    }
    keys.contains(name).then_some(()).ok_or_else(|| format!("{name} is not a key"))
}

/// The cells of each row of the table, without the names of its sections.
fn rows(text: &str) -> Vec<[&str; 4]> {
    let (_, table) = text.split_once("\n## Every item of the guides\n").unwrap();
    let lines = table.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| **"));
    let cells = lines.skip(2).map(|line| {
        let inner = line.strip_prefix("| ").unwrap().strip_suffix('|').unwrap();
        let cells: Vec<&str> = inner.split(" | ").map(str::trim).collect();
        cells.try_into().unwrap_or_else(|_| panic!("not four columns: {line}"))
    });
    cells.collect()
}

#[test]
fn every_item_of_the_guides_has_a_place_or_a_reason() {
    let text = fs::read_to_string(root().join(DOCUMENT)).unwrap();
    let keys = configuration_keys();
    let (mut of_guide, mut named) = (BTreeMap::<&str, usize>::new(), 0);
    let rows = rows(&text);
    for row in &rows {
        let [guides, item, place, _] = row;
        assert!(!item.is_empty() && !place.is_empty(), "{row:?}");
        for guide in guides.split(", ").filter(|guide| *guide != "all") {
            assert!(GUIDES.contains(&guide), "{row:?}");
            *of_guide.entry(guide).or_default() += 1;
        }
        for name in place.split('`').skip(1).step_by(2) {
            check_name(name, &keys).unwrap_or_else(|error| panic!("{row:?}: {error}"));
            named += 1;
        }
    }
    assert!(rows.len() > 80 && named > 100, "{} rows, {named} names", rows.len());
    for guide in GUIDES {
        assert!(of_guide.get(guide).is_some_and(|rows| *rows >= 5), "{guide}: {of_guide:?}");
    }
}
