//! A part of the reward that another service computes: batches of samples are posted to it as
//! JSON, signed, and its numbers taken back.
//!
//! The request is `{id, route, name, samples: [{index, messages, completion, completion_tokens,
//! metadata}]}`; the answer `{rewards: [0.5, null, ...]}`, one for each sample in order, or
//! `{rewards: [{index, value}, ...]}`. Whatever goes wrong makes values missing, each with a
//! counted reason, never zero. Range: the service's; typical weight: what its range asks for.

mod params;
pub mod signature;
mod wire;

use std::sync::Arc;

use async_trait::async_trait;
use reqwest::header::{HeaderMap, HeaderValue};
use tokio::sync::Semaphore;
use uuid::Uuid;

use hone_core::config::Secret;
use hone_core::metrics::Metrics;
use hone_core::types::now_ms;

use super::remote::{CallError, Endpoint, Events};
use super::{RewardFn, ScoreInput};

pub use params::WebhookParams;

/// The header that says which request an attempt belongs to: the same for all its retries.
pub const IDEMPOTENCY_HEADER: &str = "idempotency-key";

/// Why a webhook cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WebhookError {
    /// The configuration was read without its environment.
    #[error("secret_env = `{0}` was not looked up: the configuration was not read by the loader")]
    Unresolved(String),
    /// The HTTP client cannot be made.
    #[error("url: {0}")]
    Call(#[from] CallError),
}

/// Asks a service for rewards.
pub struct Webhook {
    endpoint: Endpoint,
    secret: Option<Secret>,
    max_batch: usize,
    slots: Semaphore,
    events: Events,
}

impl Webhook {
    /// Prepares the part `part` of `route`; asks nothing yet.
    ///
    /// # Errors
    /// If a secret is named but not resolved, or the HTTP client cannot be made.
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
            events: Events::new("webhook", route, part, metrics.reward_webhook.clone()),
        })
    }

    /// The values of one batch, as many as it has samples.
    async fn batch(&self, samples: &[ScoreInput]) -> Vec<Option<f64>> {
        match self.ask(samples).await {
            Ok(answer) => {
                let read = wire::read(&answer, samples.len());
                for (reason, count) in &read.missing {
                    self.events.missing(reason, *count, &read.detail);
                }
                read.values
            }
            Err(error) => {
                self.events.missing(error.reason(), samples.len(), &error.to_string());
                vec![None; samples.len()]
            }
        }
    }

    async fn ask(&self, samples: &[ScoreInput]) -> Result<Vec<u8>, CallError> {
        // Closed never: the semaphore lives as long as this.
        let _slot = self.slots.acquire().await;
        let id = Uuid::now_v7().to_string();
        let body = wire::request(&id, self.events.route(), self.events.part(), samples)
            .map_err(|e| CallError::Broken(e.to_string()))?;
        // Signed anew for each attempt, so that a late retry is not taken for a replay.
        let headers = || self.headers(&id, &body);
        self.endpoint.post(&body, headers, &self.events).await
    }

    fn headers(&self, id: &str, body: &[u8]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        if let Ok(id) = HeaderValue::from_str(id) {
            headers.insert(IDEMPOTENCY_HEADER, id);
        }
        if let Some(secret) = &self.secret
            && let Ok(value) =
                HeaderValue::from_str(&signature::sign(secret, now_ms() / 1000, body))
        {
            headers.insert(signature::HEADER, value);
        }
        headers
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
