use std::time::Duration;

use super::*;

#[test]
fn the_tail_of_standard_error_is_bounded() {
    let outcome = |stderr: &str| RunOutcome {
        status: Status::Error { exit: 1 },
        stdout: String::new(),
        stderr: stderr.into(),
        report: String::new(),
        wall: Duration::ZERO,
        cpu: Duration::ZERO,
        isolation: Isolation::default(),
    };
    assert_eq!(outcome("a\nb\nc\n").stderr_tail(1), "c");
    assert_eq!(outcome("a\nb\nc\n").stderr_tail(2), "b\nc");
    assert_eq!(outcome("a\nb").stderr_tail(9), "a\nb");
    assert_eq!(outcome("").stderr_tail(1), "");
    assert_eq!(outcome(&"é".repeat(900)).stderr_tail(1).chars().count(), 500);
}
