//! STUB.
use super::{Config, ConfigError};
use std::path::Path;
/// Parses TOML.
pub fn parse(text: &str) -> Result<Config, ConfigError> {
    let _ = text;
    Ok(Config::default())
}
/// File < environment.
pub fn load(file: Option<&Path>) -> Result<Config, ConfigError> {
    let _ = file;
    Ok(Config::default())
}
