//! The `hone-bench` binary.

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> anyhow::Result<ExitCode> {
    let passed = hone_bench::Bench::parse().run(&mut std::io::stdout())?;
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
