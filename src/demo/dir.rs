//! The data directory of a demo.

use std::path::{Path, PathBuf};

use super::config;
use super::error::DemoError;
use crate::config::Config;

/// The configuration file that a demo leaves in its data directory.
pub const SERVE_FILE: &str = "hone.toml";

/// The data directory. A temporary one is removed on drop.
pub(super) struct DemoDir {
    pub(super) path: PathBuf,
    pub(super) is_temporary: bool,
}

impl DemoDir {
    /// Creates the directory. It must be new or empty, because a demo starts from the base model.
    pub(super) fn open(data: Option<&Path>) -> Result<Self, DemoError> {
        let name = format!("hone-demo-{}", uuid::Uuid::now_v7().simple());
        let dir = data.map_or_else(|| std::env::temp_dir().join(name), Path::to_owned);
        let wrong = |reason: String| DemoError::Data { dir: dir.clone(), reason };
        let open = || {
            std::fs::create_dir_all(&dir)?;
            Ok((std::fs::read_dir(&dir)?.next().is_none(), dir.canonicalize()?))
        };
        let (is_empty, path) = open().map_err(|e: std::io::Error| wrong(e.to_string()))?;
        if !is_empty {
            let advice = "`hone serve --data` continues with an existing directory";
            return Err(wrong(format!("is not empty, and a demo needs a new one ({advice})")));
        }
        Ok(Self { path, is_temporary: data.is_none() })
    }

    /// Writes the configuration with which `hone serve` continues.
    pub(super) fn write_config(&self, demo: &Config) -> Result<(), DemoError> {
        let wrong = |reason: String| DemoError::Data { dir: self.path.clone(), reason };
        let text = toml::to_string(&config::to_serve(demo)).map_err(|e| wrong(e.to_string()))?;
        std::fs::write(self.path.join(SERVE_FILE), text).map_err(|e| wrong(e.to_string()))
    }
}

impl Drop for DemoDir {
    fn drop(&mut self) {
        if self.is_temporary {
            // The system cleans its temporary directory.
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_temporary_directory_is_removed_and_a_named_one_is_kept() {
        let home = DemoDir::open(None).unwrap();
        let dir = home.path.clone();
        std::fs::write(dir.join("ledger"), "x").unwrap();
        drop(home);
        assert!(!dir.exists());

        let parent = tempfile::tempdir().unwrap();
        let named = parent.path().join("a/b");
        drop(DemoDir::open(Some(&named)).unwrap());
        assert!(named.is_dir());
        std::fs::write(named.join("ledger"), "x").unwrap();
        let error = DemoDir::open(Some(&named)).err().unwrap().to_string();
        assert!(error.contains("is not empty"), "{error}");
    }
}
