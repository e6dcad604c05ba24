//! Logging to standard error, as text or JSON.

use std::io;
use std::io::IsTerminal as _;

use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer as _, fmt};

use hone_core::metrics::SPANS;

use crate::config::{LogConfig, LogFormat};
use crate::telemetry;

/// Dependencies whose messages at `info` and below help only their own developers.
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

/// Installs the log subscriber of the process. A second call has no effect.
///
/// An invalid filter is replaced by `info`; validation of the configuration refuses it earlier.
pub fn init(config: &LogConfig) {
    let filter = EnvFilter::try_new(quiet_dependencies(&config.level))
        .unwrap_or_else(|_| EnvFilter::new(quiet_dependencies("info")));
    let traces = telemetry::layer(config.collector.as_ref());
    let (traces, failed) = match traces {
        Ok(traces) => (traces, None),
        Err(error) => (None, Some(format!("{error:#}"))),
    };
    let lines = fmt::layer().with_ansi(io::stderr().is_terminal()).with_writer(io::stderr);
    let lines = match config.format {
        LogFormat::Text => lines.boxed(),
        LogFormat::Json => lines.json().flatten_event(true).boxed(),
    };
    // `try_init` fails if a subscriber is installed already.
    let lines = lines.with_filter(filter);
    let _already_set = tracing_subscriber::registry().with(traces).with(lines).try_init().is_err();
    if let Some(error) = failed {
        tracing::error!(error, "nothing is sent to the OpenTelemetry collector");
    }
}

/// The filter with the noisy targets at `warn`, except those that it names. A filter at `warn` or
/// above is unchanged.
fn quiet_dependencies(level: &str) -> String {
    // The last directive of a target counts. Spans of traces are not part of a line.
    format!("{},{SPANS}=off", without_noise(level))
}

fn without_noise(level: &str) -> String {
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
    fn noisy_targets_are_at_warn_unless_named() {
        let filter = quiet_dependencies("info");
        assert!(filter.starts_with("info,candle_core=warn,"), "{filter}");
        let filter = quiet_dependencies("debug,hyper=trace");
        assert!(filter.contains("hyper=trace") && !filter.contains("hyper=warn"), "{filter}");
        assert!(filter.contains("hyper_util=warn"), "{filter}");
        for (level, quiet) in [
            ("error", "error"),
            ("off", "off"),
            ("hone=debug, warn", "hone=debug,warn"),
            ("hone=debug", "hone=debug"),
        ] {
            assert_eq!(without_noise(level), quiet);
        }
        for level in ["info", "trace", "hone=debug,info", "hone::http=trace,warn", ""] {
            EnvFilter::try_new(quiet_dependencies(level)).unwrap();
        }
    }
}
