//! The `hone-bench` binary.

use clap::Parser as _;

fn main() -> anyhow::Result<()> {
    hone_bench::Bench::parse().run(&mut std::io::stdout())
}
