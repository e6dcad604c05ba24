//! `webhook`: values that another service computes.

use std::sync::Arc;

use hone_core::config::Checked;

use crate::kinds::kind::{BuildContext, Built, Documented, Kind, KindEntry, keyed};
use crate::webhook::Webhook;
pub use crate::webhook::WebhookParams;

impl Documented for WebhookParams {
    fn entry() -> KindEntry {
        KindEntry {
            kind: "webhook",
            formula: "the answer of a service to batches of {messages, completion, metadata}; missing \
                      while it does not answer",
            range: "the service's",
            parameters:
                "url, secret_env = \"\", max_batch = 32, max_concurrency = 4, timeout_ms = \
                         5000, retries = 2, backoff_ms = 200, max_backoff_ms = 10000, \
                         breaker_failures = 5, breaker_cooldown_ms = 10000, max_response_bytes = \
                         1048576, allow_http = false"
                    .to_owned(),
            typical_weight: "1.0",
            example: "url = \"http://127.0.0.1:9/score\"",
            calls_out: true,
            bounds: [f64::NEG_INFINITY, f64::INFINITY],
        }
    }
}

impl Kind for WebhookParams {
    fn check(&self) -> Checked {
        Self::check(self)
    }

    fn build(&self, context: &BuildContext<'_>) -> Built {
        let webhook = Webhook::new(self, context.route, context.part, &context.metrics()?);
        Ok(Some(Arc::new(webhook.map_err(keyed)?)))
    }

    fn resolve(&mut self, lookup: &dyn Fn(&str) -> Option<String>) -> Result<(), String> {
        Self::resolve(self, lookup).map_err(|error| format!("secret_env{error}"))
    }
}
