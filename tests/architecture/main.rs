//! Rules of the project that Cargo and clippy cannot express; `CONTRIBUTING.md` states them.

#![expect(clippy::unwrap_used, clippy::panic, reason = "tests may fail loudly")]

mod commands;
mod documents;
mod imports;
mod references;
mod workspace;

use std::path::PathBuf;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}
