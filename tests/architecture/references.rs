//! Reference files name the pinned packages that made them, and fit the files that they were computed
//! from.

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;

use serde::Deserialize;
use serde_json::Value;

use hone_core::digest::sha256_file;

use super::root;

const MUTANTS: &str = "tests/reference/mutation/results.json";

/// Written by `tests/reference/provenance.py`.
#[derive(Debug, Deserialize)]
struct MadeBy {
    packages: BTreeMap<String, String>,
    sha256: BTreeMap<String, String>,
}

/// The versions in `tests/reference/requirements.txt`.
fn pinned() -> BTreeMap<String, String> {
    let text = fs::read_to_string(root().join("tests/reference/requirements.txt")).unwrap();
    let pins = text.lines().map(|line| line.split_once("==").unwrap());
    pins.map(|(name, version)| (name.to_owned(), version.to_owned())).collect()
}

/// The first reason why a reference cannot be trusted.
fn check(reference: &Value) -> Result<MadeBy, String> {
    let made_by: MadeBy = serde_json::from_value(reference["made_by"].clone())
        .map_err(|e| format!("made_by: {e}"))?;
    let pinned = pinned();
    for (name, version) in made_by.packages.iter().filter(|(name, _)| *name != "python") {
        if pinned.get(name) != Some(version) {
            return Err(format!(
                "made with {name} {version}, but {:?} is pinned",
                pinned.get(name)
            ));
        }
    }
    for (path, digest) in &made_by.sha256 {
        let found = sha256_file(&root().join(path)).map_err(|e| format!("{path}: {e}"))?;
        if found != *digest {
            return Err(format!("{path} has changed since"));
        }
    }
    Ok(made_by)
}

#[test]
fn references_fit_their_inputs_and_the_pinned_packages() {
    let listed = Command::new("git")
        .args(["ls-files", "tests/reference/**.json", "tests/fixtures/families/*/greedy.json"])
        .arg(format!(":!{MUTANTS}"))
        .current_dir(root())
        .output()
        .unwrap();
    let (mut files, mut wrong, mut hashed) = (0, Vec::new(), Vec::new());
    for name in String::from_utf8(listed.stdout).unwrap().lines() {
        let text = fs::read(root().join(name)).unwrap();
        files += 1;
        match check(&serde_json::from_slice(&text).unwrap()) {
            Ok(made_by) => hashed.extend(made_by.sha256.into_keys()),
            Err(error) => wrong.push(format!("{name}: {error}; run its script again")),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(files >= 20, "{files} files");
    let logits = "tests/reference/models/qwen2_tiny_logits.safetensors";
    for input in ["models/embedded/model.safetensors", "models/embedded/tokenizer.json", logits] {
        assert!(hashed.iter().any(|path| path == input), "no reference has the hash of {input}");
    }
}

#[test]
fn tests_kill_nine_tenths_of_the_mutants_and_each_survivor_has_a_reason() {
    let results: Value = serde_json::from_slice(&fs::read(root().join(MUTANTS)).unwrap()).unwrap();
    let of = |outcome: &str| -> Vec<&Value> {
        let mutants = results["mutants"].as_array().unwrap().iter();
        mutants.filter(|mutant| mutant["outcome"] == outcome).collect()
    };
    let (killed, survived) = (of("killed"), of("survived"));
    assert!(killed.len() + survived.len() >= 150);
    assert!(killed.len() >= 9 * survived.len(), "{} survived", survived.len());
    for mutant in survived {
        assert!(mutant["reason"].is_string(), "{mutant}");
    }
}
