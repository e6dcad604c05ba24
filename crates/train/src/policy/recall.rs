//! Recalls: canaries that bound what several versions lose together.
//!
//! A canary shows that its version is not worse than the one before by more than the margin, so k promotions could lose
//! k margins. The estimates of their differences cannot tell, because only a version with lucky ratings is promoted. So
//! from the second promotion on, the active version is compared with the anchor, which a share of the traffic gets again.

use tokio::sync::watch;
use tracing::{Instrument as _, info_span};

use hone_core::metrics::SPANS;
use hone_core::types::{PolicyCheck, PolicyRecord, PolicyState};
use hone_store::Op;

use super::config::Promotion;
use super::gate::checked;
use super::registry::Policies;
use super::{FOUND_WORSE, PolicyError, PublishOutcome, WITHDRAWN};

/// Promotions since the anchor from which on the active version is compared with it. The canary of the first one did so.
pub(super) const UNCONFIRMED: usize = 2;

/// The metric of a version that has the time at which its recall began, in Unix milliseconds.
pub(super) const RECALL_BEGAN: &str = "recall_began";

/// The metric of a version that users rated better than its anchor, whose place it takes.
const CONFIRMED: &str = "confirmed";

/// The check of a version whose recall is over.
pub(super) const RECALL: &str = "canary/anchor";

/// A comparison of the active version with its anchor.
struct Recall {
    active: PolicyRecord,
    anchor: PolicyRecord,
}

/// Whether later versions are compared with this one: an operator pinned it, users rated it better than the anchor before
/// it, or the run began from it.
pub(super) fn is_anchor(record: &PolicyRecord) -> bool {
    record.pinned || record.step == 0 || record.metrics.contains_key(CONFIRMED)
}

/// Whether users rated a version better by at least half a margin, which makes it the anchor.
pub(super) fn confirms(check: &PolicyCheck, margin: f64) -> bool {
    check.passed && check.value.is_some_and(|mean| mean >= margin / 2.0)
}

impl Policies {
    /// Runs the recall that is due before the next canary, if there is one. Returns how the publication that it is part of
    /// ends, unless it goes on.
    pub(super) async fn recall_if_due(
        &self,
        interrupts: &mut watch::Receiver<u64>,
    ) -> Result<Option<PublishOutcome>, PolicyError> {
        let Some(mut recall) = self.due_recall()? else { return Ok(None) };
        let mut suspended = self.suspended.subscribe();
        let ended = tokio::select! {
            biased;
            _ = interrupts.changed() => {
                let detail = "an operator ended the comparison".to_owned();
                Ok(Some((checked(RECALL, true, None, None, detail), Some(PublishOutcome::Superseded))))
            }
            _ = suspended.wait_for(|suspended| *suspended) => Ok(None),
            check = self.compare_with_anchor(&mut recall) => check.map(|check| Some((check, None))),
        };
        self.canary.end();
        let outcome = match ended {
            Ok(Some((check, outcome))) => {
                self.end_recall(recall, check).await.map(|end| end.or(outcome))
            }
            Ok(None) => Ok(Some(PublishOutcome::Suspended)),
            Err(error) => Err(error),
        };
        self.setup.publisher.end_canary();
        outcome
    }

    fn due_recall(&self) -> Result<Option<Recall>, PolicyError> {
        let store = &self.setup.store;
        let Some(active) = store.policy(self.active())? else { return Ok(None) };
        let is_over = active.checks.iter().any(|check| check.name == RECALL);
        if self.setup.config.promotion != Promotion::Canary || is_over {
            return Ok(None);
        }
        for (distance, version) in store.lineage().chain(active.version).enumerate() {
            let Some(anchor) = store.policy(version)?.filter(is_anchor) else { continue };
            let is_due = distance >= UNCONFIRMED && self.adapter_dir(&anchor).is_ok();
            return Ok(is_due.then_some(Recall { active, anchor }));
        }
        Ok(None)
    }

    async fn compare_with_anchor(&self, recall: &mut Recall) -> Result<PolicyCheck, PolicyError> {
        let Recall { active, anchor } = recall;
        let adapter = self.adapter_dir(anchor)?;
        self.stage(anchor.version, adapter.as_deref()).await?;
        if !self.setup.publisher.begin_canary().await? {
            let detail = "skipped: no engine serves two versions".to_owned();
            return Ok(checked(RECALL, true, None, None, detail));
        }
        let (begun, recorded) = self.begin_canary(active, Some(anchor.version))?;
        {
            let _switch = self.switch.lock().await;
            self.note(active).await?;
        }
        let check = self.canary.run(begun, recorded);
        let check = check.instrument(info_span!(target: SPANS, "recall")).await;
        Ok(PolicyCheck { name: RECALL.to_owned(), ..check })
    }

    /// Writes the checks and metrics of a version, whose state an operator may have changed meanwhile. Call it with `switch`
    /// locked.
    async fn note(&self, record: &PolicyRecord) -> Result<(), PolicyError> {
        let store = &self.setup.store;
        if let Some(now) = store.policy(record.version)? {
            let (checks, metrics) = (record.checks.clone(), record.metrics.clone());
            let record = PolicyRecord { checks, metrics, ..now };
            store.commit_now(vec![Op::Policy(Box::new(record))]).await?;
        }
        Ok(())
    }

    /// Records the result. If the active version is worse, the anchor takes its place, and so ends the publication.
    async fn end_recall(
        &self,
        Recall { mut active, anchor }: Recall,
        check: PolicyCheck,
    ) -> Result<Option<PublishOutcome>, PolicyError> {
        let (stays, detail) = (check.passed, check.detail.clone());
        if confirms(&check, self.setup.config.canary.margin) {
            active.metrics.insert(CONFIRMED.to_owned(), 1.0);
        }
        active.checks.push(check);
        let _switch = self.switch.lock().await;
        self.note(&active).await?;
        if active.version != self.active() {
            return Ok(Some(PublishOutcome::Superseded));
        }
        if stays {
            return Ok(None);
        }
        self.activate_staged().await?;
        let reason = format!("{WITHDRAWN}: {FOUND_WORSE} {}: {detail}", anchor.version);
        self.switched(anchor.version, &reason, PolicyState::RolledBack, false).await?;
        Ok(Some(PublishOutcome::Superseded))
    }
}
