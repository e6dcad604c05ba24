//! The documents quote the speed that `benches/peers/all.py` measured and recorded in `results.json`.

use std::collections::BTreeSet;
use std::fs;

use regex::Regex;
use serde_json::Value;

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
