//! Files of earlier schemas, which every later version must read.

use std::path::PathBuf;

use redb::ReadableTable;
use serde_json::{Value, json};

use hone_core::types::{
    ChatOptions, ClientEndpoint, Continuation, GrammarSpec, PolicyCheck, ResponseOptions,
    TokenSpan, Tool, ToolCall, ToolChoice,
};

use super::*;
use crate::format::codec::{LedgerRecord, decode, encode};
use crate::format::{Bytes, Id, LedgerTables};
use crate::write::Applier;
use crate::{FeedbackOutcome, file, maintain, migrate};

fn fixture(schema: u32) -> PathBuf {
    let file = format!("../../tests/fixtures/ledger-v{schema}.redb");
    Path::new(env!("CARGO_MANIFEST_DIR")).join(file)
}

/// The operations that made the file of schema 1: every kind of record.
pub(super) fn contents() -> Vec<Op> {
    let mut dataset = interaction(2);
    dataset.source = PromptSource::Dataset;
    dataset.key_id = None;
    dataset.messages = [Role::System, Role::Developer, Role::User, Role::Assistant, Role::Tool]
        .map(|role| Message::new(role, format!("{role:?} says ∑ 🦀")))
        .to_vec();
    let mut cut = sample(11, 1, SampleOrigin::Served, 1);
    cut.finish = FinishReason::Length;
    cut.logprobs = vec![-0.125, f32::MIN_POSITIVE, f32::NEG_INFINITY];
    let mut gone = shadow(12, 1);
    gone.finish = FinishReason::Cancelled;
    gone.params = SamplingParams {
        temperature: 0.7,
        top_p: 0.9,
        top_k: 40,
        min_p: 0.05,
        presence_penalty: 0.5,
        frequency_penalty: -0.5,
        logit_bias: BTreeMap::from([(0, 100.0), (151_643, -100.0)]),
        seed: u64::MAX,
        max_tokens: 1,
        ..SamplingParams::default()
    };
    let thumb = |choice, key: &str| FeedbackEntry {
        choice,
        idempotency_key: Some(key.to_owned()),
        key_id: Some("key-1".to_owned()),
        ..thumbs(1, 0.5, 7000)
    };
    vec![
        Op::Interaction(Box::new(interaction(1))),
        Op::Interaction(Box::new(dataset)),
        Op::Sample(Box::new(served(10, 1))),
        Op::Sample(Box::new(cut)),
        Op::Sample(Box::new(gone)),
        Op::Reward(Box::new(graded(1, 10, "exact", Some(1.0)))),
        Op::Reward(Box::new(graded(2, 12, "length", None))),
        feedback(thumb(0, "first")),
        feedback(FeedbackEntry { idempotency_key: None, ..thumb(1, "") }),
        feedback(FeedbackEntry { name: "stars".to_owned(), ..thumb(1, "second") }),
        Op::Group(Box::new(group(1, 1, &[10, 11, 12], &["exact", "length"]))),
        Op::Group(Box::new(group(2, 1, &[10], &["thumbs"]))),
        Op::Group(Box::new(group(3, 1, &[12], &["length"]))),
        Op::GroupState(group_id(3), GroupState::Dropped("stale".to_owned())),
        Op::Step(Box::new(step(1, &[1]))),
        Op::Policy(Box::new(policy(0, PolicyState::Retired))),
        Op::Policy(Box::new(policy(1, PolicyState::Active))),
        Op::Policy(Box::new(policy(2, PolicyState::Candidate))),
        Op::Policy(Box::new(policy(3, PolicyState::Rejected))),
    ]
}

/// Records with the values that [`contents`] lacks, ids above it.
pub(super) fn further_contents() -> Vec<Op> {
    let mut asked = interaction(3);
    asked.stop = vec!["</answer>".to_owned(), "∎".to_owned()];
    asked.continues = Some(Continuation {
        conversation: interaction_id(1),
        interaction: interaction_id(2),
        choice: 3,
        prefix_tokens: 70_000,
        edited: true,
    });
    let mut exam = interaction(4);
    exam.held_out = true;
    exam.endpoint = ClientEndpoint::Messages;
    let mut truncated = served(30, 3);
    truncated.kept = vec![0.5, 1.0, f32::MIN_POSITIVE];
    truncated.params.top_k = 5;
    let mut checked = policy(4, PolicyState::RolledBack);
    checked.pinned = true;
    checked.checks = vec![PolicyCheck {
        name: "parity/serving".to_owned(),
        passed: false,
        value: Some(0.25),
        bound: None,
        detail: "one prompt".to_owned(),
    }];
    let mut ops = vec![
        Op::Interaction(Box::new(asked)),
        Op::Interaction(Box::new(exam)),
        Op::Sample(Box::new(truncated)),
        Op::Policy(Box::new(checked)),
        Op::Policy(Box::new(policy(5, PolicyState::Canary))),
    ];
    ops.push(Op::Interaction(Box::new(with_tools(5))));
    ops.extend(constrained());
    ops
}

/// How the fixture of a schema was made, when it was the current one. A released schema must not be
/// written again: `cargo test --release -p hone-store write_the_fixture -- --ignored`.
#[test]
#[ignore = "writes a fixture"]
fn write_the_fixture() {
    let path = fixture(crate::format::VERSION);
    assert!(!path.exists(), "{} is released", path.display());
    let database = file::create(&path).unwrap();
    migrate::to_current(&database).unwrap();
    file::write(&database, |tx| {
        let mut tables = Applier::new(tx)?;
        for (n, op) in contents().iter().chain(&further_contents()).enumerate() {
            tables.apply(op, reward_id(100 + n as u64))?;
        }
        tables.combine_ratings()
    })
    .unwrap();
    drop(database);
    maintain::compact(&path).unwrap();
}

/// Copies a fixture, so that the test does not migrate it.
pub(super) fn copy_fixture(schema: u32) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ledger.redb");
    std::fs::copy(fixture(schema), &path).unwrap();
    (dir, path)
}

/// A prompt for each kind of grammar, with a sample of which the grammar forced tokens.
fn constrained() -> Vec<Op> {
    let specs = [
        GrammarSpec::JsonObject,
        GrammarSpec::JsonSchema("{\"type\": \"integer\"}".to_owned()),
        GrammarSpec::Regex("[a-z]+".to_owned()),
        GrammarSpec::Choice(vec!["yes".to_owned(), "no".to_owned()]),
        GrammarSpec::Lark("start: \"a\"".to_owned()),
    ];
    let mut ops = Vec::new();
    for (n, spec) in (20..).zip(specs) {
        let mut asked = interaction(n);
        asked.grammar = Some(spec);
        asked.params = SamplingParams {
            repetition_penalty: 1.5,
            min_tokens: 2,
            ignore_eos: n % 2 == 0,
            stop_token_ids: vec![5, 70_000],
            include_stop: n % 2 == 1,
            ..asked.params
        };
        let mut answer = served(10 * n, n);
        answer.params = asked.params.clone();
        answer.kept = vec![0.25, 1.0, 0.125];
        answer.forced = vec![TokenSpan { start: 0, end: 1 }, TokenSpan { start: 2, end: 3 }];
        ops.push(Op::Interaction(Box::new(asked)));
        ops.push(Op::Sample(Box::new(answer)));
    }
    ops
}

#[test]
fn every_record_of_schema_1_is_read() {
    let (_dir, path) = copy_fixture(1);
    let store = open(&path);
    let mut groups = BTreeMap::new();
    for op in contents().into_iter().chain(further_contents()) {
        match op {
            Op::Interaction(row) => assert_eq!(store.interaction(row.id).unwrap(), Some(*row)),
            Op::Sample(row) => assert_eq!(store.sample(row.id).unwrap(), Some(*row)),
            Op::Reward(row) => assert!(store.rewards_of(row.sample).unwrap().contains(&row)),
            Op::Policy(row) => assert_eq!(store.policy(row.version).unwrap(), Some(*row)),
            Op::Step(row) => {
                for group in &row.groups {
                    groups.entry(*group).and_modify(|g: &mut Group| {
                        g.state = GroupState::Trained(row.step);
                    });
                }
                assert_eq!(store.last_step().unwrap(), Some(*row));
            }
            Op::Group(row) => drop(groups.insert(row.id, *row)),
            Op::GroupState(id, state) => groups.get_mut(&id).unwrap().state = state,
            _ => {}
        }
    }
    let found = store.groups_of(interaction_id(1)).unwrap();
    assert_eq!(found, groups.into_values().collect::<Vec<_>>());
    assert_eq!(store.ready_groups(9).unwrap().len(), 1);
    assert_eq!(store.samples_of(interaction_id(1)).unwrap().len(), 3);
    assert_eq!(
        ungrouped(&store),
        [("stars", 11), ("thumbs", 11)].map(|(part, n)| (sample_id(n), part.to_owned()))
    );
    let thumb = Reward {
        id: reward_id(107),
        value: Some(0.5),
        source: RewardSource::Feedback,
        created: 7000,
        idempotency_key: Some("first".to_owned()),
        comment: Some("good".to_owned()),
        key_id: Some("key-1".to_owned()),
        ..graded(0, 10, "thumbs", None)
    };
    assert_eq!(store.rewards_of(sample_id(10)).unwrap()[1], thumb);
    let stats = store.stats().unwrap();
    assert_eq!((stats.interactions, stats.samples, stats.rewards, stats.feedback), (10, 9, 5, 3));
    assert_eq!((stats.groups, stats.policy_versions, stats.steps), (3, 6, 1));
    let rating =
        |key: &str| vec![Rating { key_id: Some(key.to_owned()), value: 0.5, created: 7000 }];
    for (sample, name) in [(10, "thumbs"), (11, "thumbs"), (11, "stars")] {
        assert_eq!(store.ratings_of(sample_id(sample), name).unwrap(), rating("key-1"));
    }
    assert_eq!(store.ratings_of(sample_id(10), "stars").unwrap(), []);
    drop(store);
    let report = maintain::check(&path).unwrap();
    assert!(report.is_healthy(), "{report:?}");
}

#[test]
fn a_file_of_schema_2_is_read() {
    let (_dir, path) = copy_fixture(2);
    let store = open(&path);
    let stats = store.stats().unwrap();
    assert_eq!((stats.interactions, stats.samples, stats.feedback), (10, 9, 3));
    assert_eq!((store.outbox_state().unwrap(), store.held_feedback().unwrap()), (None, 0));
    drop(store);
    assert!(maintain::check(&path).unwrap().is_healthy());
}

/// The format does not change where `hone_core::types` do.
#[test]
fn every_record_of_schema_1_is_encoded_to_the_same_bytes() {
    fn check<R: LedgerRecord>(bytes: &[u8]) {
        assert!(encode(&decode::<R>(bytes).unwrap()).unwrap() == bytes, "{}", R::TABLE);
    }
    let (_dir, path) = copy_fixture(1);
    let database = file::create(&path).unwrap();
    let tx = database.begin_write().unwrap();
    let tables = LedgerTables::new(&tx).unwrap();
    let values = |table: &redb::Table<'_, &'static Id, Bytes>, check: fn(&[u8])| {
        table.iter().unwrap().for_each(|row| check(row.unwrap().1.value()));
    };
    values(&tables.interactions, check::<Interaction>);
    values(&tables.samples, check::<Sample>);
    values(&tables.feedback, check::<Reward>);
    values(&tables.groups, check::<Group>);
    for table in [
        (&tables.policies, check::<PolicyRecord> as fn(&[u8])),
        (&tables.steps, check::<StepRecord>),
    ] {
        table.0.iter().unwrap().for_each(|row| table.1(row.unwrap().1.value()));
    }
}

#[test]
fn a_file_of_schema_1_accepts_new_writes() {
    let (_dir, path) = copy_fixture(1);
    let store = open(&path);
    let again = FeedbackEntry {
        idempotency_key: Some("first".to_owned()),
        key_id: Some("key-1".to_owned()),
        ..thumbs(1, 0.5, 8000)
    };
    let new = thumbs(6, 1.0, 8000);
    let mut ops = prompt_ops(6, 0);
    ops.extend([feedback(again), feedback(new)]);
    // The recorded rater corrects the rating, and another rater adds one.
    let mean = |key: &str, value, created| FeedbackEntry {
        key_id: Some(key.to_owned()),
        aggregate: Aggregate::Mean,
        ..thumbs(1, value, created)
    };
    ops.extend([feedback(mean("key-1", 1.0, 8001)), feedback(mean("key-2", 0.0, 8002))]);
    let outcomes = store.commit_blocking(ops).unwrap().feedback;
    let expected = [
        FeedbackOutcome::Duplicate(sample_id(10)),
        FeedbackOutcome::Recorded(sample_id(60)),
        FeedbackOutcome::Recorded(sample_id(10)),
        FeedbackOutcome::Recorded(sample_id(10)),
    ];
    assert_eq!(outcomes, expected);
    assert_eq!(store.stats().unwrap().interactions, 11);
    assert_eq!(store.rewards_of(sample_id(10)).unwrap()[1].value, Some(0.5));
    assert_eq!(store.ratings_of(sample_id(10), "thumbs").unwrap().len(), 2);
}

/// Prompt `n` with tools, a call and its result, asked through the responses API.
pub(super) fn with_tools(n: u64) -> Interaction {
    let mut row = interaction(n);
    let call = ToolCall {
        id: "call_1".to_owned(),
        name: "add".to_owned(),
        arguments: "{\"b\": 2, \"a\": 1}".to_owned(),
    };
    row.messages.push(Message {
        reasoning: Some("Adding.".to_owned()),
        tool_calls: vec![call],
        ..Message::new(Role::Assistant, "")
    });
    row.messages.push(Message {
        name: Some("add".to_owned()),
        tool_call_id: Some("call_1".to_owned()),
        ..Message::new(Role::Tool, "3")
    });
    let add = Tool {
        name: "add".to_owned(),
        description: Some("Adds.".to_owned()),
        parameters: Some(parameters()),
        strict: true,
    };
    let now = Tool { name: "now".to_owned(), description: None, parameters: None, strict: false };
    let variables = json!({"enable_thinking": false, "level": "é"});
    row.chat = ChatOptions {
        tools: vec![add, now],
        tool_choice: ToolChoice::Function("add".to_owned()),
        parallel_tool_calls: false,
        template_variables: variables.as_object().unwrap().clone(),
    };
    row.endpoint = ClientEndpoint::Responses(ResponseOptions {
        instructions: true,
        previous: Some(interaction_id(2)),
        schema_name: Some("sum".to_owned()),
    });
    row
}

fn parameters() -> Value {
    json!({"type": "object", "properties": {"b": {}, "a": {"minimum": -1.5}}})
}

#[test]
fn a_ledger_holds_tools_and_calls() {
    let store = TestLedger::new();
    let row = with_tools(3);
    store.commit_blocking(vec![Op::Interaction(Box::new(row.clone()))]).unwrap();
    let found = store.interaction(row.id).unwrap().unwrap();
    assert_eq!(found, row);
    // The order of keys is part of the prompt.
    let stored = found.chat.tools[0].parameters.as_ref().unwrap().to_string();
    assert_eq!(stored, parameters().to_string());
}
