//! Publication of new weights: write, stage, check, then promote or reject.

use std::collections::{BTreeMap, BTreeSet};

use tracing::{Instrument as _, info_span};

use hone_core::metrics::SPANS;
use hone_core::types::{PolicyCheck, PolicyRecord, PolicyState, PolicyVersion, UnixMillis, now_ms};
use hone_store::Op;

use super::PolicyError;
use super::canary::{BegunCanary, VersionRating, alpha_share};
use super::config::Promotion;
use super::gate::{self, Anchor, Examination, Examiner, all_passed, checked};
use super::recall::{RECALL_BEGAN, is_anchor};
use super::registry::{Policies, PolicySetup};
use super::{Candidate, PublishOutcome};
use super::{activation_ops, base_record};

/// The metric of a version that has the time at which its canary began, in Unix milliseconds.
const CANARY_BEGAN: &str = "canary_began";

/// Pieces of feedback that are read at once.
const FEEDBACK_PAGE: usize = 1000;

/// Pieces of feedback among which the gate looks for ratings of the active version.
const NEWEST_RATINGS: usize = 1000;

enum Evaluated {
    Checked,
    Interrupted,
    Suspended,
}

impl Policies {
    /// Writes new weights as the next version and serves it if it passes every check of `policy.promotion`.
    ///
    /// Each check is recorded with the version. Nothing is published if `parent` is no longer active, so that
    /// an operator's activation stays in force; an activation during the checks ends them.
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
        let mut interrupts = self.interrupts.subscribe();
        interrupts.mark_unchanged();
        if parent != self.active() {
            tracing::info!(%parent, active = %self.active(), step, "weights are not published: their parent is no longer active");
            return Ok(PublishOutcome::Superseded);
        }
        let mut record = match self.suspended_canary(parent, step).await? {
            Some(record) => record,
            None => {
                if let Some(outcome) = self.recall_if_due(&mut interrupts).await? {
                    return Ok(outcome);
                }
                let written = self.write_candidate(candidate, parent, step, metrics);
                written.instrument(info_span!(target: SPANS, "write")).await?
            }
        };
        let mut suspended = self.suspended.subscribe();
        let evaluated = tokio::select! {
            biased;
            _ = interrupts.changed() => Ok(Evaluated::Interrupted),
            _ = suspended.wait_for(|suspended| *suspended) => Ok(Evaluated::Suspended),
            result = self.evaluate(candidate, &mut record) => result.map(|()| Evaluated::Checked),
        };
        self.canary.end();
        let outcome = match evaluated {
            Ok(Evaluated::Checked) if all_passed(&record.checks) => {
                self.promote(record, parent).instrument(info_span!(target: SPANS, "activate")).await
            }
            Ok(Evaluated::Checked) => self.reject(record).await.map(PublishOutcome::Rejected),
            Ok(Evaluated::Suspended) if record.state == PolicyState::Canary => {
                Ok(PublishOutcome::Suspended)
            }
            Ok(Evaluated::Suspended) => {
                self.discard(record, "the process ended before it was served").await?;
                Ok(PublishOutcome::Suspended)
            }
            Ok(Evaluated::Interrupted) => self.superseded(record).await,
            Err(error) => {
                self.discard(record, &error.to_string()).await?;
                Err(error)
            }
        };
        self.setup.publisher.end_canary();
        outcome
    }

    /// The suspended canary of the same weights. Any other one can no longer be served.
    async fn suspended_canary(
        &self,
        parent: PolicyVersion,
        step: u64,
    ) -> Result<Option<PolicyRecord>, PolicyError> {
        let mut found = None;
        for record in self.list()?.into_iter().filter(|r| r.state == PolicyState::Canary) {
            let is_same = record.parent == Some(parent) && record.step == step;
            if is_same && self.adapter_dir(&record).is_ok() {
                found = Some(record);
            } else {
                self.discard(record, "another version took its place").await?;
            }
        }
        Ok(found)
    }

    async fn write_candidate(
        &self,
        candidate: &dyn Candidate,
        parent: PolicyVersion,
        step: u64,
        metrics: BTreeMap<String, f64>,
    ) -> Result<PolicyRecord, PolicyError> {
        let version = PolicyVersion(self.list()?.last().map_or(1, |r| r.version.0 + 1));
        let relative = super::relative_dir(version);
        let dir = self.setup.data_dir.join(&relative);
        let mut record = PolicyRecord {
            version,
            parent: Some(parent),
            step,
            adapter: Some(relative),
            metrics,
            state: PolicyState::Candidate,
            ..base_record()
        };
        record.sha256 = Some(super::write_version(&dir, |new| candidate.write(new), &record)?);
        self.save(&mut record).await?;
        Ok(record)
    }

    /// Stages the candidate and runs its checks, until one fails.
    async fn evaluate(
        &self,
        candidate: &dyn Candidate,
        record: &mut PolicyRecord,
    ) -> Result<(), PolicyError> {
        let dir = record.adapter.as_ref().map(|relative| self.setup.data_dir.join(relative));
        let staged = self.stage(record.version, dir.as_deref());
        staged.instrument(info_span!(target: SPANS, "stage")).await?;
        if record.state == PolicyState::Candidate {
            self.examine(candidate, record).instrument(info_span!(target: SPANS, "gate")).await?;
        }
        if self.setup.config.promotion == Promotion::Canary && all_passed(&record.checks) {
            if self.setup.publisher.begin_canary().await? {
                record.state = PolicyState::Canary;
                let (begun, recorded) = self.begin_canary(record, None)?;
                self.save(record).await?;
                let check = self.canary.run(begun, recorded);
                let check = check.instrument(info_span!(target: SPANS, "canary")).await;
                record.checks.push(check);
            } else {
                let detail = "skipped: no engine serves two versions".to_owned();
                record.checks.push(checked("canary", true, None, None, detail));
            }
        }
        Ok(())
    }

    /// The canary of a version, or its recall with this anchor, whose beginning its record keeps, and the ratings since
    /// then that the ledger has.
    #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "times")]
    #[expect(clippy::cast_sign_loss, reason = "times after 1970")]
    pub(super) fn begin_canary(
        &self,
        record: &mut PolicyRecord,
        anchor: Option<PolicyVersion>,
    ) -> Result<(BegunCanary, Vec<VersionRating>), PolicyError> {
        let PolicySetup { store, config, examiner, raters, .. } = &self.setup;
        let name = if anchor.is_some() { RECALL_BEGAN } else { CANARY_BEGAN };
        let is_new = !record.metrics.contains_key(name);
        let began = *record.metrics.entry(name.to_owned()).or_insert(now_ms() as f64) as UnixMillis;
        let records = self.list()?;
        let begins = |record: &PolicyRecord| {
            [CANARY_BEGAN, RECALL_BEGAN].map(|name| record.metrics.get(name).copied())
        };
        let begins = records.iter().flat_map(begins).flatten().map(|begin| begin as UnixMillis);
        let earlier: BTreeSet<_> = begins.filter(|begin| *begin < began).collect();
        let share = alpha_share(earlier.into_iter().chain([began]));
        let mut recorded = Vec::new();
        let mut last = None;
        while let (false, Some(examiner)) = (is_new, examiner) {
            let rows = store.feedback_since(began, last, FEEDBACK_PAGE)?;
            let Some(row) = rows.last() else { break };
            last = Some(row.id);
            for row in &rows {
                recorded.extend(VersionRating::of(store, &examiner.routes, *raters, row)?);
            }
        }
        let (version, control) = (record.version, anchor.unwrap_or(self.active()));
        let alpha = share * config.canary.alpha;
        Ok((
            BegunCanary {
                version,
                control,
                began,
                served: now_ms(),
                alpha,
                is_recall: anchor.is_some(),
            },
            recorded,
        ))
    }

    async fn examine(
        &self,
        candidate: &dyn Candidate,
        record: &mut PolicyRecord,
    ) -> Result<(), PolicyError> {
        let active_adapter = self.active_adapter()?;
        let mut anchor = self.anchor()?;
        let anchor_adapter = anchor.adapter.clone();
        let examination = Examination {
            publisher: self.setup.publisher.as_ref(),
            candidate,
            version: record.version,
            active_adapter: active_adapter.as_deref(),
            anchor_adapter: anchor_adapter.as_deref(),
            gate: &self.setup.config.gate,
        };
        let probe =
            gate::check_parity(&examination, &self.setup.probe_prompt, &mut record.checks).await?;
        *self.probe.lock() = probe.map(|probe| (record.version, probe));
        let differences = record.checks.iter().filter_map(|check| check.value);
        let difference = differences.fold(0.0, |most: f64, value| {
            if most.is_nan() || value.is_nan() { f64::NAN } else { most.max(value) }
        });
        record.metrics.insert("parity_logprob_difference".to_owned(), difference);
        self.setup.metrics.policy_parity_difference.set(difference);
        if let Some(examiner) = &self.setup.examiner
            && self.setup.config.promotion != Promotion::Direct
            && all_passed(&record.checks)
        {
            // The operator chose the initial adapter, which the checks of its successors begin from.
            if record.step == 0 {
                let detail = "skipped: it is the initial adapter".to_owned();
                record.checks.push(checked("drift", true, None, None, detail));
                return Ok(());
            }
            let known = anchor.record.checks.len();
            let ratings = self.newest_ratings(examiner)?;
            gate::compare(&examination, examiner, &ratings, &mut anchor, &mut record.checks)
                .await?;
            self.report_kl(&record.checks);
            if anchor.record.checks.len() > known {
                let _switch = self.switch.lock().await;
                let store = &self.setup.store;
                if let Some(record) = store.policy(anchor.record.version)? {
                    let record = PolicyRecord { checks: anchor.record.checks, ..record };
                    store.commit_now(vec![Op::Policy(Box::new(record))]).await?;
                }
            }
        }
        Ok(())
    }

    /// Ratings of the active version among the newest pages of feedback, one for each session, user or else completion.
    fn newest_ratings(&self, examiner: &Examiner) -> Result<Vec<f64>, PolicyError> {
        let PolicySetup { store, raters, .. } = &self.setup;
        let mut ratings = BTreeMap::new();
        for row in store.newest_feedback(None, NEWEST_RATINGS)? {
            let rating = VersionRating::of(store, &examiner.routes, *raters, &row)?;
            if let Some(rating) = rating.filter(|rating| rating.version == self.active()) {
                ratings.insert(rating.unit, rating.value);
            }
        }
        Ok(ratings.into_values().collect())
    }

    pub(super) fn report_kl(&self, checks: &[PolicyCheck]) {
        let found = checks.iter().find(|check| check.name == gate::KL_TO_ANCHOR);
        if let Some((kl, bound)) = found.and_then(|check| check.value.zip(check.bound)) {
            self.setup.metrics.policy_kl_budget.set(kl / bound);
        }
    }

    fn anchor(&self) -> Result<Anchor, PolicyError> {
        let (store, active) = (&self.setup.store, self.active());
        for version in store.lineage().chain(active) {
            let Some(record) = store.policy(version)? else { continue };
            // Those of step 0 are the base and the initial adapter.
            if (record.pinned || record.step == 0)
                && let Ok(adapter) = self.adapter_dir(&record)
            {
                return Ok(Anchor { record, adapter, is_active: version == active });
            }
        }
        Ok(Anchor { record: base_record(), adapter: None, is_active: false })
    }

    /// Makes the staged version the active one, unless another version was activated meanwhile.
    async fn promote(
        &self,
        mut record: PolicyRecord,
        parent: PolicyVersion,
    ) -> Result<PublishOutcome, PolicyError> {
        let switch = self.switch.lock().await;
        if parent != self.active() {
            drop(switch);
            return self.superseded(record).await;
        }
        let version = record.version;
        let records = self.list()?;
        let swap = self.activate_staged().await?;
        self.set_active(version);
        record.state = PolicyState::Active;
        record.pinned = records.iter().any(|r| r.version == version && r.pinned);
        let mut ops = activation_ops(&records, version, "", PolicyState::Retired);
        ops.push(Op::Policy(Box::new(record.clone())));
        if let Err(error) = self.setup.store.commit_now(ops).await {
            self.serve_recorded(parent).await;
            return Err(error.into());
        }
        drop(switch);
        self.setup.metrics.policy_published.inc();
        tracing::info!(
            %version, %parent, step = record.step, checks = record.checks.len(),
            swap_us = u64::try_from(swap.as_micros()).unwrap_or(u64::MAX),
            "policy version published"
        );
        self.prune(&records, version);
        Ok(PublishOutcome::Published(record))
    }

    async fn reject(&self, record: PolicyRecord) -> Result<PolicyRecord, PolicyError> {
        let failed = record.checks.iter().find(|check| !check.passed);
        let (name, detail) = failed.map_or(("", ""), |check| (&check.name, &check.detail));
        let label = name.split('/').next().unwrap_or(name).to_owned();
        let reason = format!("{name}: {detail}");
        self.setup.metrics.policy_rejected.with_label_values(&[label.as_str()]).inc();
        let record = self.withhold(record, reason).await?;
        let (version, reason) = (record.version, record.reason.as_deref());
        tracing::error!(%version, reason, state = record.state.as_str(), "policy version not promoted");
        Ok(record)
    }

    async fn superseded(&self, record: PolicyRecord) -> Result<PublishOutcome, PolicyError> {
        self.discard(record, "another version was activated before its promotion").await?;
        Ok(PublishOutcome::Superseded)
    }

    /// Records that a candidate or canary is not served, although no check failed.
    async fn discard(&self, record: PolicyRecord, reason: &str) -> Result<(), PolicyError> {
        tracing::info!(version = %record.version, reason, "policy version not promoted");
        self.withhold(record, reason.to_owned()).await.map(drop)
    }

    async fn withhold(
        &self,
        mut record: PolicyRecord,
        reason: String,
    ) -> Result<PolicyRecord, PolicyError> {
        record.state = match record.state {
            PolicyState::Canary => PolicyState::RolledBack,
            _ => PolicyState::Rejected,
        };
        record.reason = Some(reason);
        self.save(&mut record).await?;
        Ok(record)
    }

    /// Writes a record. An operator may have pinned the version meanwhile.
    async fn save(&self, record: &mut PolicyRecord) -> Result<(), PolicyError> {
        let _switch = self.switch.lock().await;
        record.pinned = self.setup.store.policy(record.version)?.is_some_and(|r| r.pinned);
        self.setup.store.commit_now(vec![Op::Policy(Box::new(record.clone()))]).await?;
        Ok(())
    }

    /// Deletes the adapter directories that [`is_kept`] does not keep, after `version` was promoted.
    /// `records` are those before.
    pub(super) fn prune(&self, records: &[PolicyRecord], version: PolicyVersion) {
        let lineage = self.setup.store.lineage();
        let chain: Vec<PolicyVersion> = lineage.chain(version).collect();
        let with_files = records.iter().filter_map(|r| Some((r, r.adapter.as_ref()?)));
        let existing: Vec<_> = with_files
            .map(|(record, dir)| (record, self.setup.data_dir.join(dir)))
            .filter(|(record, dir)| record.version != version && dir.exists())
            .collect();
        // The versions that follow are compared with it.
        let anchors =
            records.iter().filter(|record| is_anchor(record)).map(|record| record.version);
        let anchors: BTreeSet<_> = anchors.collect();
        let anchor = chain.iter().find(|version| anchors.contains(version));
        let newest = self.setup.config.keep_versions.max(2) - 1;
        let old = existing.len().saturating_sub(newest);
        for (record, dir) in &existing[..old] {
            let is_previous = record.state == PolicyState::Active;
            let is_needed = record.pinned || record.step == 0 || Some(&record.version) == anchor;
            if is_needed || is_previous || is_kept(&chain, record.version) {
                continue;
            }
            if let Err(error) = std::fs::remove_dir_all(dir) {
                tracing::warn!(version = %record.version, %error, "old adapter could not be deleted");
            }
        }
    }
}

// Which ancestors of the served version keep their files.

/// Whether an ancestor keeps its files although newer versions have taken its place.
///
/// `chain` is the served version, its parent, and so on to the base. The version at depth `d` below the base is
/// kept while it is less than twice the largest power of two that divides `d` away: of `n` versions at most
/// `log2(n) + 1`, at exponentially growing distances. A version that was deleted would not be kept later either.
pub(super) fn is_kept(chain: &[PolicyVersion], version: PolicyVersion) -> bool {
    let Some(distance) = chain.iter().position(|ancestor| *ancestor == version) else {
        return false;
    };
    let depth = chain.len() - 1 - distance;
    // The base, at depth 0, has no files.
    depth > 0 && distance < 2 * (1 << depth.trailing_zeros())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kept versions of a chain of `n` versions after the base.
    fn kept(n: u64) -> Vec<u64> {
        let chain: Vec<PolicyVersion> = (0..=n).rev().map(PolicyVersion).collect();
        (0..=n).filter(|version| is_kept(&chain, PolicyVersion(*version))).collect()
    }

    #[test]
    fn ancestors_are_kept_at_growing_distances() {
        assert_eq!(kept(1), [1]);
        assert_eq!(kept(10), [4, 8, 9, 10]);
        assert_eq!(kept(100), [64, 80, 88, 96, 98, 99, 100]);
        for n in 1..2_000 {
            let versions = kept(n);
            assert!(versions.len() <= n.ilog2() as usize + 1, "{n}: {versions:?}");
            // A version as far back as any given distance, up to a factor of two.
            for distance in (0..).map(|power| 1 << power).take_while(|distance| 2 * distance < n) {
                let near = distance / 2..=2 * distance;
                assert!(versions.iter().any(|v| near.contains(&(n - v))), "{n}: {distance}");
            }
        }
    }

    #[test]
    fn a_deleted_version_is_never_needed_again() {
        let mut gone: Vec<u64> = Vec::new();
        for n in 1..500 {
            let versions = kept(n);
            assert!(gone.iter().all(|version| !versions.contains(version)), "{n}");
            gone = (1..=n).filter(|version| !versions.contains(version)).collect();
        }
    }

    #[test]
    fn versions_of_another_branch_are_not_kept() {
        let chain = [9, 8, 3, 0].map(PolicyVersion);
        assert!(is_kept(&chain, PolicyVersion(8)));
        assert!(!is_kept(&chain, PolicyVersion(4)));
    }
}
