//! Services that get traces, metrics and steps. Their addresses and credentials are in the environment variables that
//! their own clients read.

use std::collections::HashMap;

use percent_encoding::percent_decode_str;

use hone_core::config::{Problem, Secret, quoted};

/// An OpenTelemetry collector.
#[derive(Clone, Debug, PartialEq)]
pub struct Collector {
    /// `OTEL_EXPORTER_OTLP_ENDPOINT`.
    pub endpoint: String,
    /// `OTEL_EXPORTER_OTLP_HEADERS`.
    pub headers: Option<Secret>,
}

impl Collector {
    /// Reads a collector with `variable`, the value of a variable; `None` without an endpoint, or if
    /// `OTEL_SDK_DISABLED` is true.
    pub(super) fn from_environment(
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<Self>, String> {
        let disabled = variable("OTEL_SDK_DISABLED").unwrap_or_default();
        let Some(endpoint) = variable("OTEL_EXPORTER_OTLP_ENDPOINT") else { return Ok(None) };
        if disabled.eq_ignore_ascii_case("true") {
            return Ok(None);
        }
        let name = "OTEL_EXPORTER_OTLP_PROTOCOL";
        let protocol = variable(name).unwrap_or_else(|| "http/protobuf".to_owned());
        if protocol != "http/protobuf" {
            let allowed =
                "http/protobuf, or not set, with an endpoint such as http://localhost:4318";
            return Err(Problem::value(name, quoted(&protocol), allowed).sentence());
        }
        let endpoint = address("OTEL_EXPORTER_OTLP_ENDPOINT", &endpoint)?;
        let headers = variable("OTEL_EXPORTER_OTLP_HEADERS").map(Secret::new);
        Ok(Some(Self { endpoint, headers }))
    }

    /// Where a signal, such as `traces`, is sent.
    pub fn url(&self, signal: &str) -> String {
        format!("{}/v1/{signal}", self.endpoint)
    }

    /// The headers of requests, from text such as `authorization=Bearer%20KEY,x-tenant=a`.
    pub fn headers(&self) -> HashMap<String, String> {
        let text = self.headers.as_ref().map_or("", Secret::expose);
        let decoded = |text: &str| percent_decode_str(text.trim()).decode_utf8_lossy().into_owned();
        let pairs = text.split(',').filter_map(|pair| pair.split_once('='));
        pairs.map(|(name, value)| (decoded(name), decoded(value))).collect()
    }
}

/// An MLflow tracking server.
#[derive(Clone, Debug, PartialEq)]
pub struct MlflowServer {
    /// `MLFLOW_TRACKING_URI`.
    pub address: String,
    /// `MLFLOW_EXPERIMENT_NAME`, by default `Default`.
    pub experiment: String,
    /// `MLFLOW_RUN_ID`: an existing run to continue.
    pub run_id: Option<String>,
    /// `MLFLOW_TRACKING_TOKEN`.
    pub token: Option<Secret>,
    /// `MLFLOW_TRACKING_USERNAME` and `MLFLOW_TRACKING_PASSWORD`.
    pub user: Option<(String, Secret)>,
}

impl MlflowServer {
    /// Reads a server with `variable`, the value of a variable.
    pub(super) fn from_environment(
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, String> {
        let name = "MLFLOW_TRACKING_URI";
        let found = variable(name).ok_or_else(|| {
            format!("run.tracker is \"mlflow\": the environment variable {name} must be set to the URL of the server")
        })?;
        let password = Secret::new(variable("MLFLOW_TRACKING_PASSWORD").unwrap_or_default());
        Ok(Self {
            address: address(name, &found)?,
            experiment: variable("MLFLOW_EXPERIMENT_NAME").unwrap_or_else(|| "Default".to_owned()),
            run_id: variable("MLFLOW_RUN_ID"),
            token: variable("MLFLOW_TRACKING_TOKEN").map(Secret::new),
            user: variable("MLFLOW_TRACKING_USERNAME").map(|user| (user, password)),
        })
    }
}

/// A URL over HTTP without a slash at its end.
fn address(name: &str, value: &str) -> Result<String, String> {
    let rest = value.strip_prefix("http://").or_else(|| value.strip_prefix("https://"));
    let rest = rest.filter(|rest| !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_graphic()));
    match rest {
        Some(_) => Ok(value.trim_end_matches('/').to_owned()),
        None => Err(Problem::value(name, quoted(value), "an http:// or https:// URL").sentence()),
    }
}
