//! Phrases that this project's texts avoid, because a newcomer has to read them twice.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use regex::Regex;

/// Each phrase as a list of words; any white space and comment markers may separate the words.
const BANNED: &[&str] = &[
    "told",
    "tells",
    "nobody",
    "nobody's",
    "somebody",
    "somebody's",
    "anew",
    "by hand",
    "as it was",
    "besides",
    "none of",
    "behind",
    "gives way",
    "give way",
    "nought",
    "put out",
    "of no meaning",
    "in nothing",
];

/// Files with text that people read: code, documents, configuration, dashboards and scripts.
const ENDINGS: &[&str] =
    &["rs", "md", "toml", "py", "sh", "yml", "yaml", "service", "json", "Dockerfile", "run"];

/// Files without sentences of this project.
const EXCEPT: &[&str] = &["tests/architecture/prose.rs", "Cargo.lock"];

/// Folders of generated or measured data.
const DATA: &[&str] = &["datasets/", "models/", "tests/fixtures/", "tests/reference/"];

fn pattern() -> Regex {
    let phrases = BANNED.iter().map(|phrase| phrase.split(' ').collect::<Vec<_>>());
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
