//! `webhook`: a reward that another service computes. Batches of samples are posted to it as signed
//! JSON.
//!
//! The request is `{id, route, name, samples: [{index, messages, completion, completion_tokens,
//! metadata}]}`. The answer is `{rewards: [0.5, null, ...]}`, one value for each sample in order, or
//! `{rewards: [{index, value}, ...]}`. Requests run as futures on the caller's task, at most
//! `max_concurrency` at a time. Every failure makes values missing, never 0, and is counted by
//! reason. Range and typical weight depend on the service.

mod params;
pub mod signature;
mod wire;

use std::sync::Arc;

use async_trait::async_trait;
use reqwest::header::{HeaderMap, HeaderName};
use tokio::sync::Semaphore;
use uuid::Uuid;
use wire::ParsedRewards;

use hone_core::config::Secret;
use hone_core::metrics::Metrics;
use hone_core::types::now_ms;

use crate::remote::{CallError, CallEvents, Endpoint};
use crate::{RewardFn, ScoreInput};

pub use params::WebhookParams;

/// The header that identifies a request: all its attempts have the same value.
pub const IDEMPOTENCY_HEADER: &str = "idempotency-key";

/// Why a webhook cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum WebhookError {
    /// The configuration was read without the environment.
    #[error("secret_env = `{0}` was not looked up: the configuration was not read by the loader")]
    Unresolved(String),
    /// The HTTP client cannot be built.
    #[error("url: {0}")]
    Call(#[from] CallError),
}

/// Asks a service for rewards.
pub struct Webhook {
    endpoint: Endpoint,
    secret: Option<Secret>,
    max_batch: usize,
    slots: Semaphore,
    events: CallEvents,
}

impl Webhook {
    /// Prepares the part `part` of `route`.
    ///
    /// # Errors
    /// If a secret is named but not resolved, or the HTTP client cannot be built.
    pub fn new(
        params: &WebhookParams,
        route: &str,
        part: &str,
        metrics: &Arc<Metrics>,
    ) -> Result<Self, WebhookError> {
        if params.secret.is_none() && !params.secret_env.is_empty() {
            return Err(WebhookError::Unresolved(params.secret_env.clone()));
        }
        Ok(Self {
            endpoint: Endpoint::new(&params.url, params.limits())?,
            secret: params.secret.clone(),
            max_batch: params.max_batch.max(1),
            slots: Semaphore::new(params.max_concurrency.max(1)),
            events: CallEvents::new("webhook", route, part, metrics.reward_webhook.clone()),
        })
    }

    /// The value of each sample of a batch.
    async fn batch(&self, samples: &[ScoreInput]) -> Vec<Option<f64>> {
        let parsed = match self.ask(samples).await {
            Ok(answer) => ParsedRewards::parse(&answer, samples.len()),
            Err(e) => ParsedRewards::all_missing(e.reason(), samples.len(), e.to_string()),
        };
        for (reason, count) in &parsed.missing {
            self.events.missing(reason, *count, &parsed.detail);
        }
        parsed.values
    }

    async fn ask(&self, samples: &[ScoreInput]) -> Result<Vec<u8>, CallError> {
        // Acquiring cannot fail: the semaphore is never closed.
        let _slot = self.slots.acquire().await;
        let id = Uuid::now_v7().to_string();
        let body = wire::request(&id, &self.events.route, &self.events.part, samples);
        // Each attempt has its own signature, so that a late retry does not look like a replay.
        let headers = || self.headers(&id, &body);
        self.endpoint.post(&body, headers, &self.events).await
    }

    fn headers(&self, id: &str, body: &[u8]) -> HeaderMap {
        let sign = |secret| signature::sign(secret, now_ms() / 1000, body);
        let signature = self.secret.as_ref().map(sign);
        [(IDEMPOTENCY_HEADER, Some(id.to_owned())), (signature::HEADER, signature)]
            .into_iter()
            .filter_map(|(name, value)| Some((HeaderName::from_static(name), value?.parse().ok()?)))
            .collect()
    }
}

#[async_trait]
impl RewardFn for Webhook {
    async fn score(&self, samples: &[ScoreInput]) -> Vec<Option<f64>> {
        let batches = samples.chunks(self.max_batch).map(|batch| self.batch(batch));
        futures::future::join_all(batches).await.concat()
    }
}

#[cfg(test)]
mod tests;
