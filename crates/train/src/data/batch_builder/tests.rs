//! Ratings of quarantined API keys do not reach a batch.

use std::path::Path;
use std::sync::Arc;

use hone_core::metrics::Metrics;
use hone_core::types::{
    FinishReason, Group, GroupId, GroupState, Interaction, InteractionId, PolicyVersion,
    PromptSource, Sample, SampleId, SampleOrigin, SamplingParams,
};
use hone_reward::feedback::{Aggregate, aggregator};
use hone_store::{FeedbackEntry, Op, QUARANTINED, QuarantinedKey, Store, StoreConfig};

use super::{TrainBatch, build_batch};

const ROUTES: &str = "[[route]]\nname = \"users\"\n\
    reward = [{ name = \"stars\", kind = \"feedback\", aggregate = \"mean\" }]";

/// A ready group of one completion with `(API key, value)` ratings.
fn rated(store: &Store, ratings: &[(&str, f64)]) -> GroupId {
    let (interaction, sample, group) = (InteractionId::new(), SampleId::new(), GroupId::new());
    let mut ops = vec![
        Op::Interaction(Box::new(Interaction {
            id: interaction,
            created: 1,
            source: PromptSource::Live,
            route: "users".to_owned(),
            model: "default".to_owned(),
            key_id: None,
            messages: Vec::new(),
            metadata: std::collections::BTreeMap::new(),
            params: SamplingParams::default(),
            prompt_ids: vec![1],
            template_hash: String::new(),
        })),
        Op::Sample(Box::new(Sample {
            id: sample,
            interaction,
            choice: 0,
            origin: SampleOrigin::Served,
            created: 2,
            ids: vec![1],
            logprobs: vec![-1.0],
            kept_mass: 1.0,
            text: String::new(),
            finish: FinishReason::Stop,
            version: PolicyVersion::BASE,
            params: SamplingParams::default(),
            untrainable: None,
        })),
    ];
    ops.extend(ratings.iter().zip(3..).map(|((key, value), created)| {
        Op::Feedback(Box::new(FeedbackEntry {
            interaction,
            choice: 0,
            name: "stars".to_owned(),
            value: Some(*value),
            comment: None,
            idempotency_key: None,
            key_id: Some((*key).to_owned()),
            created,
            join: aggregator(Aggregate::Mean),
        }))
    }));
    ops.push(Op::Group(Box::new(Group {
        id: group,
        interaction,
        route: "users".to_owned(),
        members: vec![sample],
        parts: vec!["stars".to_owned()],
        oldest_version: PolicyVersion::BASE,
        created: 9,
        state: GroupState::Ready,
    })));
    store.commit_blocking(ops).unwrap();
    group
}

fn open(dir: &Path) -> Store {
    let metrics = Arc::new(Metrics::new().unwrap());
    Store::open(&dir.join("ledger.redb"), &StoreConfig::default(), metrics).unwrap()
}

#[test]
fn ratings_of_other_keys_on_the_same_sample_stay() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let routes = crate::testing::routes(ROUTES);
    let build = || build_batch(&store, &routes, PolicyVersion::BASE, 4, 1, 8).unwrap();
    let both = rated(&store, &[("alice", 4.0), ("mallory", 1.0)]);
    let alone = rated(&store, &[("mallory", 1.0)]);
    let values = |batch: &TrainBatch| -> Vec<f64> {
        batch.members().map(|(_, member)| member.parts["stars"]).collect()
    };
    assert_eq!(values(&build().unwrap()), [2.5, 1.0]);
    let row = QuarantinedKey { key_id: "mallory".to_owned(), reason: "{}".to_owned(), since: 10 };
    store.commit_blocking(vec![Op::Quarantine(row)]).unwrap();
    let batch = build().unwrap();
    assert_eq!((values(&batch), batch.group_ids()), (vec![4.0], vec![both]));
    assert_eq!(batch.groups[0].members[0].feedback["stars"].key_id.as_deref(), Some("alice"));
    let state = store.group(alone).unwrap().unwrap().state;
    assert_eq!(state, GroupState::Dropped(QUARANTINED.to_owned()));
    store.commit_blocking(vec![Op::Release("mallory".to_owned())]).unwrap();
    assert_eq!(values(&build().unwrap()), [2.5]);
    assert_eq!(store.ungrouped_feedback(u64::MAX, 9).unwrap().len(), 1, "it comes back");
}
