//! The table of every item of the GRPO guides names keys, commands and rewards that exist.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use super::commands::check_hone;
use super::documents::configuration_keys;
use super::root;

const DOCUMENT: &str = "docs/from-trl.md";
const GUIDES: [&str; 5] = ["000", "001", "002", "003", "004"];

/// What a name in the third column refers to.
fn check(name: &str, keys: &BTreeSet<String>) -> Result<(), String> {
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
            check(name, &keys).unwrap_or_else(|error| panic!("{row:?}: {error}"));
            named += 1;
        }
    }
    assert!(rows.len() > 80 && named > 100, "{} rows, {named} names", rows.len());
    for guide in GUIDES {
        assert!(of_guide.get(guide).is_some_and(|rows| *rows >= 5), "{guide}: {of_guide:?}");
    }
}

#[test]
fn names_that_do_not_exist_are_found() {
    let keys = configuration_keys();
    for (name, error) in [
        ("kind = \"no_such\"", "there is no kind no_such"),
        ("preset = \"no_such\"", "no_such"),
        ("hone no-such", "no-such"),
        ("train.no_such", "train.no_such is not a key"),
    ] {
        let found = check(name, &keys).unwrap_err();
        assert!(found.contains(error), "{name}: {found}");
    }
    check("hone adapters export --best", &keys).unwrap();
}
