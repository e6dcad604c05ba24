//! `hone import-trl`: the configuration of a run with TRL as a configuration of Hone.
//!
//! The file is a mapping in JSON or YAML, or a Python script that calls `GRPOConfig`, which is parsed
//! and never run. Every option becomes a key or a note. Where an option is absent and Hone's default
//! differs, TRL's default is written.

mod map;
mod options;
mod python;
mod settings;

use std::path::Path;

use anyhow::anyhow;
use serde_json::Value;

use crate::config::parse;

use options::TrlOptions;

/// A converted configuration.
#[derive(Debug)]
pub struct ImportedConfig {
    /// TOML that Hone loads, with comments.
    pub toml: String,
    /// Options without a counterpart, and what is left to do.
    pub notes: Vec<String>,
}

/// Converts a file. Its extension decides the format: `.json`, `.yaml`, `.yml` or `.py`; without one of
/// these, a text that begins with `{` is JSON, one with `GRPOConfig(` Python, and any other YAML.
///
/// # Errors
/// If the file cannot be read, has no option of TRL, has a value of the wrong type, or has values that
/// Hone refuses.
pub fn import(file: &Path) -> anyhow::Result<ImportedConfig> {
    let place = file.display();
    let bytes = std::fs::read(file).map_err(|e| anyhow!("{place} cannot be read: {e}"))?;
    let extension = file.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    let name = file.file_name().unwrap_or(file.as_os_str()).to_string_lossy();
    convert(&bytes, extension, &name).map_err(|e| anyhow!("{place} cannot be converted: {e}"))
}

fn convert(bytes: &[u8], extension: &str, name: &str) -> Result<ImportedConfig, String> {
    let text = std::str::from_utf8(bytes).map_err(|_| "it is not UTF-8 text")?;
    let text = text.trim_start_matches('\u{feff}').replace("\r\n", "\n");
    let format = match extension.to_lowercase().as_str() {
        "json" => "json",
        "yaml" | "yml" => "yaml",
        "py" => "py",
        _ if text.trim_start().starts_with('{') => "json",
        _ if text.contains("GRPOConfig(") => "py",
        _ => "yaml",
    };
    let options = match format {
        "py" => python::options(&text)?,
        "json" => mapping(serde_json::from_str(&text).map_err(|e| e.to_string())?)?,
        _ => {
            let value = serde_saphyr::from_str(&text);
            mapping(value.map_err(|e| e.without_snippet().to_string())?)?
        }
    };
    let settings = map::convert(options)?;
    let toml = settings.toml(name);
    // A value out of Hone's range is an error here, not when the result is used.
    parse(&toml).map_err(|error| error.to_string())?;
    Ok(ImportedConfig { toml, notes: settings.notes() })
}

fn mapping(value: Value) -> Result<TrlOptions, String> {
    match value {
        Value::Object(mapping) => TrlOptions::from_mapping(mapping),
        _ => Err("it is no mapping of options to values".to_owned()),
    }
}

#[cfg(test)]
mod tests;
