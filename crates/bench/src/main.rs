//! The `hone-bench` binary.

use std::io::{Write as _, stderr, stdout};
use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    let Err(error) = hone_bench::Bench::parse().run(&mut stdout()) else {
        return ExitCode::SUCCESS;
    };
    // Nothing remains to be done if standard error is closed.
    let _written = writeln!(stderr(), "error: {error:#}");
    ExitCode::from(if error.is::<hone::UsageError>() { 2 } else { 1 })
}
