//! Publication of new weights: write, stage, probe, then activate or reject.

use std::collections::BTreeMap;

use hone_core::types::{PolicyRecord, PolicyState, PolicyVersion, SamplingParams, TokenId, now_ms};
use hone_store::Op;

use super::candidate::{Candidate, PublishOutcome};
use super::error::PolicyError;
use super::registry::{Policies, activation_ops};
use super::{retention, version_dir};

impl Policies {
    /// Writes new weights as the next version and serves it if it passes the parity gate.
    ///
    /// The gate compares the staged engine with the trainer: the engine samples from a fixed prompt,
    /// the candidate scores the sampled tokens, and the mean absolute difference of their
    /// log-probabilities must be at most `policy.parity_tolerance`. A rejected version is recorded
    /// and never served. Nothing is published if `parent` is no longer active, so that an
    /// operator's activation stays in force.
    ///
    /// # Errors
    /// If files, engine or ledger fail. The active version then stays.
    pub async fn publish(
        &self,
        candidate: &dyn Candidate,
        parent: PolicyVersion,
        step: u64,
        metrics: BTreeMap<String, f64>,
    ) -> Result<PublishOutcome, PolicyError> {
        let _exchange = self.exchange.lock().await;
        if parent != self.active() {
            tracing::info!(%parent, active = %self.active(), step, "weights are not published: their parent is no longer active");
            return Ok(PublishOutcome::Superseded);
        }
        let records = self.list()?;
        let version = PolicyVersion(records.last().map_or(1, |r| r.version.0 + 1));
        let relative = version_dir::relative_dir(version);
        let dir = self.data_dir.join(&relative);
        let mut record = PolicyRecord {
            version,
            parent: Some(parent),
            step,
            adapter: Some(relative),
            sha256: None,
            metrics,
            state: PolicyState::Candidate,
            reason: None,
            created: now_ms(),
            pinned: false,
            checks: Vec::new(),
        };
        record.sha256 = Some(version_dir::write(&dir, candidate, &record)?);
        self.store.commit_now(vec![Op::Policy(Box::new(record.clone()))]).await?;
        self.stage(version, Some(&dir)).await?;

        let difference = self.parity_difference(candidate, version).await?;
        record.metrics.insert("parity_logprob_difference".to_owned(), difference);
        self.metrics.policy_parity_difference.set(difference);
        if difference.is_nan() || difference > self.config.parity_tolerance {
            record.state = PolicyState::Rejected;
            record.reason = Some(format!(
                "parity: the mean difference of served and trained log-probabilities is \
                 {difference:.2e}, more than policy.parity_tolerance {:.2e}",
                self.config.parity_tolerance
            ));
            self.metrics.policy_rejected.with_label_values(&["parity"]).inc();
            self.store.commit_now(vec![Op::Policy(Box::new(record.clone()))]).await?;
            tracing::error!(%version, difference, "policy version rejected by the parity gate");
            return Ok(PublishOutcome::Rejected(record));
        }

        let swap = self.activate_staged().await?;
        self.metrics.policy_published.inc();
        self.set_active(version);
        record.state = PolicyState::Active;
        let mut ops = activation_ops(&records, version, "");
        ops.push(Op::Policy(Box::new(record.clone())));
        self.store.commit_now(ops).await?;
        tracing::info!(
            %version, %parent, step, parity = difference,
            swap_us = u64::try_from(swap.as_micros()).unwrap_or(u64::MAX),
            "policy version published"
        );
        self.prune(&records, version);
        Ok(PublishOutcome::Published(record))
    }

    /// Mean absolute difference, in nats, between the staged engine's log-probabilities and the
    /// candidate's on tokens that the engine samples.
    async fn parity_difference(
        &self,
        candidate: &dyn Candidate,
        version: PolicyVersion,
    ) -> Result<f64, PolicyError> {
        let params = SamplingParams {
            seed: version.0,
            max_tokens: self.config.probe_tokens,
            ..SamplingParams::default()
        };
        let mut largest = 0.0_f64;
        for probe in self.publisher.probe(&self.probe_prompt, &params).await? {
            let ids: Vec<TokenId> = probe.tokens.iter().map(|(id, _)| *id).collect();
            let trained = candidate.score(&self.probe_prompt, &ids, params.temperature)?;
            let pairs = probe.tokens.iter().zip(&trained);
            let total: f64 =
                pairs.map(|((_, served), trained)| f64::from((served - trained).abs())).sum();
            #[expect(clippy::cast_precision_loss, reason = "a probe has a few tokens")]
            let count = ids.len().max(1) as f64;
            largest = if largest.is_nan() { largest } else { (total / count).max(largest) };
        }
        Ok(largest)
    }

    /// Deletes the adapter directories that [`retention::is_kept`] does not keep, after `version` was
    /// added to `records`. Lineage and metrics stay in the ledger.
    fn prune(&self, records: &[PolicyRecord], version: PolicyVersion) {
        let lineage = self.store.lineage();
        let chain: Vec<PolicyVersion> = lineage.chain(version).collect();
        let with_files = records.iter().filter_map(|r| Some((r.version, r.adapter.as_ref()?)));
        let existing: Vec<_> = with_files
            .map(|(v, dir)| (v, self.data_dir.join(dir)))
            .filter(|(_, dir)| dir.exists())
            .collect();
        let previous = records.iter().rev().find(|r| r.state == PolicyState::Active);
        let newest = self.config.keep_versions.max(2) - 1;
        let old = existing.len().saturating_sub(newest);
        for (version, dir) in &existing[..old] {
            let is_previous = previous.is_some_and(|previous| previous.version == *version);
            if is_previous || retention::is_kept(&chain, *version) {
                continue;
            }
            if let Err(error) = std::fs::remove_dir_all(dir) {
                tracing::warn!(%version, %error, "old adapter could not be deleted");
            }
        }
    }
}
