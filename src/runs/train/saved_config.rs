//! The configuration that a run was started with, in its folder and in its report.

use std::path::{Path, PathBuf};

use hone_core::files::{FileError, replace_file};

use crate::config;
use crate::config::Config;

/// The effective configuration: file, environment and flags together.
#[derive(Clone, Debug)]
pub(in crate::runs) struct SavedConfig {
    /// The keys that differ from the defaults, and the parts of the dataset's route.
    pub(in crate::runs) keys: Vec<(String, String)>,
    /// All keys as TOML, without secrets.
    pub(in crate::runs) text: String,
}

impl SavedConfig {
    pub(in crate::runs) fn new(config: &Config) -> Result<Self, toml::ser::Error> {
        let mut keys = config::differences(config)?;
        let routes = config.routes.0.iter().filter(|r| r.name == config.rollout.dataset_route);
        for part in routes.flat_map(|route| route.parts()) {
            let value = format!("{} ({}), weight {}", part.name, part.kind.name(), part.weight);
            keys.push(("route.reward".to_owned(), value));
        }
        Ok(Self { keys, text: config::effective(config)? })
    }

    /// Writes `config.toml` in the run's folder, in place of that of an earlier process. `step` is the
    /// last step before this one.
    pub(in crate::runs) fn save(&self, folder: &Path, step: u64) -> Result<PathBuf, FileError> {
        let path = folder.join("config.toml");
        let head = format!("# Configuration of `hone train` from step {} on.", step + 1);
        let note = "# The keys of the server, if any, are replaced by random ones.";
        replace_file(&path, format!("{head}\n{note}\n\n{}", self.text).as_bytes())?;
        Ok(path)
    }
}
