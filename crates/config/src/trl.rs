//! Names of TRL's options, and others that the GRPO guides use, with the keys that replace them.
//!
//! The tables of `docs/trl.md` and of `docs/from-trl.md` are the source, so the documents and the error
//! messages agree.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use hone_core::config::Problem;

const TRL: &str = include_str!("../../../docs/trl.md");
const GUIDES: &str = include_str!("../../../docs/from-trl.md");

/// The heading in `docs/from-trl.md` above the table.
const HEADING: &str = "\n## Options and names\n";

/// What replaces an option: a row of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counterpart {
    /// Hone's keys; empty if there are none.
    pub keys: Vec<&'static str>,
    /// A remark, or the reason why there is no key. In Markdown.
    pub note: &'static str,
    /// Whether TRL's `GRPOConfig` has the option.
    pub is_trl: bool,
}

impl Counterpart {
    /// `note` without Markdown.
    pub fn plain_note(&self) -> String {
        self.note.replace('`', "")
    }
}

static TABLE: LazyLock<BTreeMap<&'static str, Counterpart>> = LazyLock::new(|| {
    let section = GUIDES.split_once(HEADING).map_or("", |(_, rest)| rest);
    let section = section.split("\n## ").next().unwrap_or_default();
    // The first table wins, because an installed TRL is compared with it.
    rows(section, false).into_iter().chain(rows(TRL, true)).collect()
});

/// The names in the first column of a Markdown table, each with its row.
fn rows(text: &'static str, is_trl: bool) -> Vec<(&'static str, Counterpart)> {
    let mut found = Vec::new();
    for line in text.lines().filter(|line| line.starts_with("| `")) {
        let mut cells = line.split('|').skip(1).map(str::trim);
        let names = quoted(cells.next().unwrap_or_default());
        let keys = quoted(cells.next().unwrap_or_default());
        let note = cells.next().unwrap_or_default();
        for name in names {
            found.push((name, Counterpart { keys: keys.clone(), note, is_trl }));
        }
    }
    found
}

/// The texts in backquotes.
fn quoted(text: &'static str) -> Vec<&'static str> {
    text.split('`').skip(1).step_by(2).collect()
}

/// Every name in the tables, in alphabetical order.
pub fn trl_names() -> impl Iterator<Item = &'static str> {
    TABLE.keys().copied()
}

/// The row of an option of TRL, or of another name that the guides use.
pub fn counterpart(name: &str) -> Option<&'static Counterpart> {
    TABLE.get(name)
}

/// A sentence with the keys that replace `name`, or with the reason why there are none.
pub(super) fn answer(name: &str) -> Option<String> {
    let found = counterpart(name)?;
    let name = if found.is_trl { format!("TRL's {name}") } else { name.to_owned() };
    Some(match found.keys.as_slice() {
        [] => format!("Hone has no key for {name}: {}", found.plain_note()),
        [key] if found.note.starts_with("its `") => {
            format!("Hone's key for {name} is {key} ({})", found.plain_note())
        }
        [key] => format!("Hone's key for {name} is {key}"),
        [first @ .., last] => {
            format!("Hone's keys for {name} are {} and {last}", first.join(", "))
        }
    })
}

/// Replaces the hint of a problem with an unknown key if the key is in the tables.
pub(super) fn translated(problem: Problem) -> Problem {
    let sentence = problem.sentence();
    let unknown = sentence.split_once(" is not a key").map(|(key, _)| key);
    // A key has no spaces. Texts before " is not a key" within a value do.
    let Some(key) = unknown.filter(|key| !key.contains(' ')) else { return problem };
    match answer(key.rsplit('.').next().unwrap_or_default()) {
        Some(answer) => Problem::new(key, format!(" is not a key: {answer}")),
        None => problem,
    }
}
