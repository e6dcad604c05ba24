//! Log lines on standard error, as text or JSON.

use std::io;
use std::io::IsTerminal as _;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use crate::config::{LogConfig, LogFormat};

/// Targets that say at `info` and below what only their authors need.
const NOISY: [&str; 12] = [
    "candle_core",
    "h2",
    "hf_hub",
    "hyper",
    "hyper_util",
    "mistralrs",
    "mistralrs_core",
    "mistralrs_quant",
    "reqwest",
    "rustls",
    "tokenizers",
    "ureq",
];

/// Sets tracing up for the process. A second call changes nothing.
///
/// A filter that does not parse falls back to `info` (`config` refuses it before).
pub fn init(config: &LogConfig) {
    let filter = EnvFilter::try_new(quietened(&config.level))
        .unwrap_or_else(|_| EnvFilter::new(quietened("info")));
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(io::stderr().is_terminal())
        .with_writer(io::stderr);
    // `try_init` fails when a subscriber is set already: the first one stays.
    let _already_set = match config.format {
        LogFormat::Text => builder.try_init().is_err(),
        LogFormat::Json => builder.json().flatten_event(true).try_init().is_err(),
    };
}

/// The filter with the noisy targets at `warn`, unless it names them or is quieter anyway.
fn quietened(level: &str) -> String {
    let parts: Vec<&str> = level.split(',').map(str::trim).filter(|p| !p.is_empty()).collect();
    let bare = parts.iter().filter_map(|p| p.parse::<LevelFilter>().ok()).next_back();
    if bare.is_none_or(|bare| bare <= LevelFilter::WARN) {
        return parts.join(",");
    }
    let named = |target: &str| {
        parts.iter().any(|p| p.split(['=', '[', ':']).next().is_some_and(|name| name == target))
    };
    let quiet = NOISY.iter().filter(|t| !named(t)).map(|t| format!("{t}=warn"));
    parts.iter().map(|p| (*p).to_owned()).chain(quiet).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_is_kept_down_unless_named() {
        let filter = quietened("info");
        assert!(filter.starts_with("info,candle_core=warn,"), "{filter}");
        assert!(filter.contains("mistralrs_core=warn"));
        let filter = quietened("debug,hyper=trace");
        assert!(filter.contains("hyper=trace") && !filter.contains("hyper=warn"), "{filter}");
        assert!(filter.contains("hyper_util=warn"), "{filter}");
    }

    #[test]
    fn quiet_filters_stay_as_they_are() {
        assert_eq!(quietened("error"), "error");
        assert_eq!(quietened("off"), "off");
        assert_eq!(quietened("hone=debug, warn"), "hone=debug,warn");
        assert_eq!(quietened("hone=debug"), "hone=debug");
    }

    #[test]
    fn every_filter_parses() {
        for level in ["info", "trace", "hone=debug,info", "hone::http=trace,warn", ""] {
            EnvFilter::try_new(quietened(level)).unwrap();
        }
    }

    #[test]
    fn can_be_called_twice() {
        init(&LogConfig::default());
        init(&LogConfig { format: LogFormat::Json, ..LogConfig::default() });
    }
}
