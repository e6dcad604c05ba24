//! Rules of the project that Cargo and clippy cannot express; `CONTRIBUTING.md` states them.

#![expect(clippy::unwrap_used, clippy::panic, reason = "tests may fail loudly")]

mod benchmarks;
mod commands;
mod documents;
mod from_trl;
mod imports;
mod prose;
mod references;
mod workspace;

use std::path::PathBuf;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}
