//! Helpers for the tests of every crate: skipping tests on machines that lack something, comparing
//! instruction sets, and records.

#![expect(clippy::unwrap_used, reason = "test helpers fail loudly")]

use std::collections::BTreeMap;
use std::env;
use std::io::{self, Write};
use std::process::{Command, Stdio};
use std::thread;

use crate::types::{Group, GroupId, GroupState, PolicyRecord, PolicyState, PolicyVersion, Sample};

mod instructions;

pub use instructions::{Instructions, assert_same_bits, assert_same_bits_if_fused};

/// Reports that the calling test is skipped, as a line `SKIPPED: TEST: REASON` that `.ci/run` counts.
///
/// # Panics
/// If the environment variable `HONE_CI_STRICT` is 1.
pub fn skip(reason: &str) {
    let line = skipped("SKIPPED", reason);
    let strict = env::var_os("HONE_CI_STRICT").is_some_and(|value| value == "1");
    assert!(!strict, "HONE_CI_STRICT forbids skipped tests: {line}");
    write_line(&line);
}

/// Reports that the calling test is skipped because the processor does not have `instructions`. `.ci/run`
/// counts these lines too, but `HONE_CI_STRICT` allows them, because no installation helps.
pub fn skip_without(instructions: &str) {
    write_line(&skipped("SKIPPED (processor)", &format!("no {instructions}")));
}

fn skipped(kind: &str, reason: &str) -> String {
    let thread = thread::current();
    format!("{kind}: {}: {reason}\n", thread.name().unwrap_or("test"))
}

/// Writes to standard error directly, because libtest captures the output of the printing macros and drops
/// it when the test passes.
fn write_line(line: &str) {
    // One write, so that concurrent tests do not mix their lines.
    io::stderr().write_all(line.as_bytes()).unwrap();
}

/// Whether `program` is on the `PATH`.
///
/// # Panics
/// If it is there, but `program --version` fails.
pub fn has_program(program: &str) -> bool {
    match Command::new(program).arg("--version").stdin(Stdio::null()).output() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => false,
        result => {
            let output = result.unwrap();
            assert!(output.status.success(), "{program} --version: {output:?}");
            true
        }
    }
}

/// A policy version that was served once, without files. Version 0 has no parent.
pub fn policy(version: u64, parent: u64) -> PolicyRecord {
    PolicyRecord {
        version: PolicyVersion(version),
        parent: (version > 0).then_some(PolicyVersion(parent)),
        step: version,
        adapter: None,
        sha256: None,
        metrics: BTreeMap::new(),
        state: PolicyState::Retired,
        reason: None,
        created: 0,
        pinned: false,
        checks: Vec::new(),
    }
}

/// A ready group with one reward part.
///
/// # Panics
/// If there are no members.
pub fn group(route: &str, part: &str, members: &[Sample]) -> Group {
    Group {
        id: GroupId::new(),
        interaction: members[0].interaction,
        route: route.to_owned(),
        members: members.iter().map(|sample| sample.id).collect(),
        parts: vec![part.to_owned()],
        oldest_version: members.iter().map(|sample| sample.version).min().unwrap(),
        created: 9,
        state: GroupState::Ready,
    }
}

#[cfg(test)]
mod tests {
    use std::hint::black_box;
    use std::process::Output;

    use super::*;

    #[test]
    #[ignore = "`a_skipped_test_is_reported_or_fails` runs it in its own process"]
    fn skipped_test() {
        skip("for the report");
    }

    fn run_skipped_test(strict: &str) -> Output {
        Command::new(env::current_exe().unwrap())
            .args(["--exact", "testing::tests::skipped_test", "--ignored"])
            .env("HONE_CI_STRICT", strict)
            .output()
            .unwrap()
    }

    #[test]
    fn a_skipped_test_is_reported_or_fails() {
        let line = "SKIPPED: testing::tests::skipped_test: for the report\n";
        let reported = run_skipped_test("0");
        assert!(reported.status.success(), "{reported:?}");
        assert_eq!(String::from_utf8(reported.stderr).unwrap(), line);
        let failed = run_skipped_test("1");
        assert!(!failed.status.success(), "{failed:?}");
        assert!(String::from_utf8(failed.stdout).unwrap().contains("1 failed"));
    }

    #[test]
    fn a_program_is_searched_on_the_path() {
        assert!(has_program(env!("CARGO")));
        assert!(!has_program("no-such-program"));
    }

    /// `Cargo.toml` enables the checks for each crate of the workspace that is not a hot loop.
    #[test]
    #[should_panic(expected = "attempt to add with overflow")]
    fn overflow_is_checked() {
        black_box(black_box(u8::MAX) + black_box(1));
    }
}
