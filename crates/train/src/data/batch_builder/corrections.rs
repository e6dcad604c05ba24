//! The corrections of a batch: texts that clients wrote in place of a completion.
//!
//! A correction is a ready group of its own and counts like a completion towards
//! `train.samples_per_step`. No policy sampled it, so it does not become stale, and it stays valid when
//! an operator activates another version.

use std::collections::BTreeSet;

use hone_core::types::{Group, GroupId, SampleId, TokenId, UnixMillis, include_rater};
use hone_store::{ERASED, QUARANTINED, Store, StoreError};

use crate::TrainSample;

/// Reason of a dropped correction whose prompt or text has no token.
const UNSCORED: &str = "unscored";

/// One correction with everything that training needs from the ledger.
#[derive(Debug)]
pub(crate) struct BatchCorrection {
    pub(crate) group: GroupId,
    pub(crate) sample: SampleId,
    pub(crate) prompt_ids: Vec<TokenId>,
    /// The tokens of the text, the stop token included.
    pub(crate) ids: Vec<TokenId>,
    /// Time of arrival.
    pub(crate) created: UnixMillis,
}

impl BatchCorrection {
    /// Reads a correction; the inner error is why it is not trained on.
    ///
    /// # Errors
    /// If the ledger cannot be read.
    pub(super) fn load(
        store: &Store,
        quarantined: &BTreeSet<String>,
        group: &Group,
    ) -> Result<Result<Self, &'static str>, StoreError> {
        let sample = group.members.first().map(|id| store.sample(*id)).transpose()?.flatten();
        let prompt = store.interaction(group.interaction)?;
        let Some((sample, prompt)) = sample.zip(prompt) else { return Ok(Err(ERASED)) };
        if sample.ids.is_empty() || prompt.prompt_ids.is_empty() {
            return Ok(Err(UNSCORED));
        }
        let rater = store.correction(sample.id)?.and_then(|row| row.key_id);
        if rater.is_some_and(|rater| include_rater(quarantined, &rater)) {
            return Ok(Err(QUARANTINED));
        }
        Ok(Ok(Self {
            group: group.id,
            sample: sample.id,
            prompt_ids: prompt.prompt_ids,
            ids: sample.ids,
            created: sample.created,
        }))
    }

    /// Prompt and text in tokens.
    pub(crate) fn tokens(&self) -> usize {
        self.prompt_ids.len() + self.ids.len()
    }

    pub(super) fn train_sample(&self) -> TrainSample {
        TrainSample {
            prompt_ids: self.prompt_ids.clone(),
            ids: self.ids.clone(),
            logprobs: Vec::new(),
            masked: Vec::new(),
            temperature: 1.0,
            advantage: 0.0,
            version: u64::MAX,
            truncated: false,
            late: false,
            correction: true,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use hone_core::metrics::Metrics;
    use hone_core::types::{
        FinishReason, GroupState, Interaction, InteractionId, Lineage, PolicyVersion, PromptSource,
        Sample, SampleOrigin, SamplingParams,
    };
    use hone_store::{CorrectionEntry, Op, QuarantinedKey, StoreConfig};

    use super::*;
    use crate::data::advantage::Advantages;
    use crate::data::batch_builder::{StalenessLimits, TrainBatch, VersionAges, build_batch};

    /// Records a completion of an unknown version, and its correction by a client.
    fn corrected(store: &Store, key: &str, prompt: TokenId, created: UnixMillis) -> GroupId {
        let interaction = InteractionId::new();
        let ops = vec![
            Op::Interaction(Box::new(Interaction {
                id: interaction,
                created,
                source: PromptSource::Live,
                route: String::new(),
                model: "default".to_owned(),
                endpoint: Default::default(),
                key_id: Some(key.to_owned()),
                messages: Vec::new(),
                metadata: BTreeMap::new(),
                params: SamplingParams::default(),
                prompt_ids: vec![prompt, 9],
                template_hash: String::new(),
                stop: Vec::new(),
                held_out: false,
                chat: Default::default(),
                grammar: None,
                continues: None,
            })),
            Op::Sample(Box::new(Sample {
                id: SampleId::new(),
                interaction,
                choice: 0,
                origin: SampleOrigin::Served,
                created,
                ids: vec![1],
                logprobs: vec![-1.0],
                kept: Vec::new(),
                forced: Vec::new(),
                text: String::new(),
                finish: FinishReason::Stop,
                version: PolicyVersion(7),
                params: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
                untrainable: Some("greedy".to_owned()),
            })),
            Op::Correction(Box::new(CorrectionEntry {
                interaction,
                choice: 0,
                text: "better".to_owned(),
                ids: vec![prompt, 5, 2],
                unused: None,
                rating: None,
                comment: None,
                idempotency_key: None,
                key_id: Some(key.to_owned()),
                created,
            })),
        ];
        store.commit_blocking(ops).unwrap();
        store.groups_of(interaction).unwrap()[0].id
    }

    #[test]
    fn corrections_fill_a_batch_whatever_the_version_of_the_completion() {
        let dir = tempfile::tempdir().unwrap();
        let metrics = Arc::new(Metrics::new().unwrap());
        let path = dir.path().join("ledger.redb");
        let store = Store::open(&path, &StoreConfig::default(), metrics.clone()).unwrap();
        let first = corrected(&store, "alice", 3, 10);
        let unwanted = corrected(&store, "mallory", 4, 20);
        let row = QuarantinedKey { key_id: "mallory".to_owned(), reason: String::new(), since: 1 };
        store.commit_blocking(vec![Op::Quarantine(row)]).unwrap();
        let lineage = Arc::new(Lineage::default());
        let ages = VersionAges { lineage, head: PolicyVersion::BASE, ahead: 0 };
        let limits = StalenessLimits { graded: 0, rated: 0 };
        let routes = crate::testing::routes(
            "[[route]]\nname = \"users\"\nreward = [{ name = \"stars\", kind = \"feedback\" }]",
        );
        let dropped = &metrics.train.dropped_groups;
        let build =
            |wanted| build_batch(&store, &routes, &ages, limits, wanted, 2, dropped).unwrap();
        assert!(build(3).is_none(), "two are not enough");
        assert!(build(2).is_none(), "one of two is quarantined");
        let state = store.group(unwanted).unwrap().unwrap().state;
        assert_eq!(state, GroupState::Dropped(QUARANTINED.to_owned()));
        assert_eq!(dropped.with_label_values(&[QUARANTINED]).get(), 1);
        let second = corrected(&store, "bob", 6, 30);
        let batch: TrainBatch = build(2).unwrap();
        assert_eq!((batch.sample_count(), batch.members().count()), (2, 0));
        assert_eq!(batch.group_ids(), [first, second]);
        assert_eq!(batch.feedback_times().collect::<Vec<_>>(), [10, 30]);
        assert_eq!(batch.staleness(&ages), 0.0);
        let none = Advantages::default();
        let samples = batch.train_samples(&none);
        assert!(samples.iter().all(|s| s.correction && s.temperature == 1.0 && !s.late));
        assert_eq!(
            (&samples[0].prompt_ids[..], &samples[0].ids[..]),
            (&[3, 9][..], &[3, 5, 2][..])
        );
        assert_eq!((batch.group_of(&none, 1), batch.group_of(&none, 2)), (vec![second], vec![]));
        assert_eq!(batch.without(&none, &[]).1, [first, second], "they are never stale");
        assert_eq!(batch.corrections[0].tokens(), 5);
    }
}
