//! What the documents say can be typed and opened.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

/// Lines of the fenced shell blocks, prompt and continuation lines joined.
fn commands(text: &str) -> Vec<String> {
    let mut all = Vec::new();
    let mut inside = false;
    let mut joined = String::new();
    for line in text.lines() {
        if let Some(fence) = line.strip_prefix("```") {
            inside = !inside && matches!(fence, "sh" | "console" | "bash");
        } else if inside {
            let line = line.trim().trim_start_matches("$ ");
            if let Some(part) = line.strip_suffix('\\') {
                joined.push_str(part);
            } else {
                joined.push_str(line);
                all.push(std::mem::take(&mut joined));
            }
        }
    }
    all
}

/// The arguments of a call of `hone`, installed or through cargo.
fn of_hone(command: &str) -> Option<Vec<&str>> {
    let arguments = command
        .strip_prefix("hone ")
        .or_else(|| command.strip_prefix("cargo run --release -- "))?;
    let arguments = arguments.split(" #").next().unwrap_or_default();
    Some(arguments.split_whitespace().take_while(|a| !["|", "&", ">"].contains(a)).collect())
}

fn help(words: &[&str]) -> Result<String, String> {
    let output = Command::new(env!("CARGO_BIN_EXE_hone"))
        .args(words)
        .arg("--help")
        .output()
        .map_err(|e| e.to_string())?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() && !text.is_empty() { Ok(text) } else { Err(format!("{words:?}")) }
}

#[test]
fn every_command_in_the_documents_exists() {
    let mut seen = BTreeSet::new();
    for document in ["README.md", "CONTRIBUTING.md"] {
        let text = fs::read_to_string(super::root().join(document)).unwrap();
        for command in commands(&text) {
            let Some(arguments) = of_hone(&command) else {
                seen.insert(command);
                continue;
            };
            // `db stats`: the words before the first flag or value that clap knows as commands.
            let words: Vec<&str> =
                arguments.iter().copied().take_while(|a| !a.starts_with('-')).collect();
            assert!(!words.is_empty(), "{document}: {command}");
            let help = help(&words).unwrap_or_else(|e| panic!("{document}: {command}: {e}"));
            for flag in arguments.iter().filter(|a| a.starts_with("--")) {
                let flag = flag.split('=').next().unwrap();
                assert!(help.contains(flag), "{document}: {command}: there is no {flag}");
            }
            seen.insert(words.join(" "));
        }
    }
    for promised in ["demo", "serve", "cargo test --release"] {
        assert!(seen.contains(promised), "no document shows {promised}: {seen:?}");
    }
}

#[test]
fn every_link_in_the_documents_leads_somewhere() {
    let root = super::root();
    let mut checked = 0;
    for document in ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"] {
        let text = fs::read_to_string(root.join(document)).unwrap();
        let links = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        let quoted = text.split('`').skip(1).step_by(2).filter(|q| {
            [
                "src/",
                "configs/",
                "deploy/",
                "dashboards/",
                "tests/",
                "examples/",
                "migrations/",
                ".ci/",
            ]
            .iter()
            .any(|folder| q.starts_with(folder))
        });
        for target in links.chain(quoted) {
            if target.contains("://") || target.starts_with('#') || target.contains(['*', '{', ' '])
            {
                continue;
            }
            let path = target.split('#').next().unwrap();
            assert!(root.join(path).exists(), "{document}: {target} does not exist");
            checked += 1;
        }
    }
    assert!(checked > 10, "{checked} links");
}
