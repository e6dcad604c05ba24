//! Which records of a ledger a run uses, and on which side they are.

use std::collections::BTreeMap;

use hone_core::testing;
use hone_core::types::{
    Group, GroupState, Interaction, PolicyVersion, PromptSource, Reward, Sample, SampleOrigin,
};
use hone_reward::Routes;
use hone_reward::feedback::Aggregate;
use hone_reward::routes::RouteList;
use hone_store::{FeedbackEntry, Ledger, MERGED, Op, QuarantinedKey, Store, StoreConfig};

use super::filter::{LedgerFilter, VersionRange};
use super::split;
use super::{RecordCounts, UsableGroup, read_records};

const ROUTES: &str = "[[route]]\nname = \"users\"\n\
    reward = [{ name = \"stars\", kind = \"feedback\", weight = 2.0 }]\n\
    [[route]]\nname = \"graded\"\n\
    reward = [{ name = \"exact\", kind = \"regex\", pattern = \"a\", weight = 0.5 }]";

fn routes() -> Routes {
    let tables: BTreeMap<String, RouteList> = toml::from_str(ROUTES).unwrap();
    Routes::new(&tables["route"]).unwrap()
}

/// The records of a ledger before they are written.
#[derive(Default)]
struct Book(Vec<Op>);

impl Book {
    fn prompt(&mut self, token: u32, held_out: bool) -> Interaction {
        let interaction = Interaction {
            created: 1,
            prompt_ids: vec![token, 7],
            held_out,
            ..Interaction::new(PromptSource::Live, "graded", Vec::new())
        };
        self.0.push(Op::Interaction(Box::new(interaction.clone())));
        interaction
    }

    /// A completion of three tokens that ended at `created`, changed by `change`.
    fn sample(
        &mut self,
        prompt: &Interaction,
        created: u64,
        change: impl FnOnce(&mut Sample),
    ) -> Sample {
        let mut sample = Sample {
            created,
            ids: vec![1, 2, 3],
            logprobs: vec![-1.0, -0.5, -0.25],
            ..Sample::new(prompt.id, SampleOrigin::Served, PolicyVersion(0))
        };
        change(&mut sample);
        self.0.push(Op::Sample(Box::new(sample.clone())));
        sample
    }

    fn grade(&mut self, sample: &Sample, value: Option<f64>) {
        let graded = Reward::graded(sample.id, "exact", value);
        self.0.push(Op::Reward(Box::new(Reward { created: 5, ..graded })));
    }

    fn rate(&mut self, sample: &Sample, key: &str) {
        self.0.push(Op::Feedback(vec![FeedbackEntry {
            interaction: sample.interaction,
            choice: 0,
            name: "stars".to_owned(),
            value: Some(1.0),
            comment: None,
            idempotency_key: None,
            key_id: Some(key.to_owned()),
            created: 5,
            aggregate: Aggregate::Mean,
            elsewhere: None,
        }]));
    }

    fn group(&mut self, route: &str, members: &[Sample], state: GroupState) {
        let part = if route == "users" { "stars" } else { "exact" };
        let group = Group {
            oldest_version: PolicyVersion(0),
            state,
            ..testing::group(route, part, members)
        };
        self.0.push(Op::Group(Box::new(group)));
    }

    /// A graded group of one completion of a prompt of its own.
    fn graded(&mut self, token: u32, created: u64, change: impl FnOnce(&mut Sample)) {
        let prompt = self.prompt(token, false);
        let sample = self.sample(&prompt, created, change);
        self.grade(&sample, Some(1.0));
        self.group("graded", &[sample], GroupState::Trained(1));
    }

    /// Writes the ledger and reads it, with samples of up to 8 tokens.
    fn read(self, filter: &LedgerFilter) -> anyhow::Result<(Vec<UsableGroup>, RecordCounts)> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ledger.redb");
        let metrics = std::sync::Arc::new(hone_core::metrics::Metrics::new().unwrap());
        let store = Store::open(&path, &StoreConfig::default(), metrics).unwrap();
        store.commit_blocking(self.0).unwrap();
        drop(store);
        read_records(&Ledger::open_read_only(&path).unwrap(), &routes(), filter, 8)
    }
}

/// A ledger with one record of every kind.
fn mixed() -> Book {
    let mut book = Book::default();
    let prompt = book.prompt(1, false);
    let good = book.sample(&prompt, 10, |_| {});
    let text = book.sample(&prompt, 10, |s| s.origin = SampleOrigin::Correction);
    let greedy = book.sample(&prompt, 10, |s| s.untrainable = Some("greedy".to_owned()));
    let blank = book.sample(&prompt, 10, |s| s.logprobs.clear());
    let long = book.sample(&prompt, 10, |s| {
        s.ids = vec![1; 7];
        s.logprobs = vec![-1.0; 7];
    });
    let unscored = book.sample(&prompt, 10, |_| {});
    for sample in [&good, &text, &greedy, &blank, &long] {
        book.grade(sample, Some(1.0));
    }
    book.grade(&unscored, None);
    let members = [good, text, greedy, blank, long, unscored];
    // The daemon dropped it; its importance weights make it usable.
    book.group("graded", &members, GroupState::Dropped("stale".to_owned()));
    book.group("other", &members[..1], GroupState::Ready);
    book.group("graded", &members[..1], GroupState::Dropped(MERGED.to_owned()));
    let prompt = book.prompt(2, false);
    let rated = book.sample(&prompt, 20, |s| s.version = PolicyVersion(3));
    book.rate(&rated, "good");
    book.group("users", &[rated], GroupState::Ready);
    let prompt = book.prompt(3, false);
    let spam = book.sample(&prompt, 30, |_| {});
    book.rate(&spam, "bad");
    book.group("users", &[spam], GroupState::Ready);
    let (key_id, reason) = ("bad".to_owned(), "{}".to_owned());
    book.0.push(Op::Quarantine(QuarantinedKey { key_id, reason, since: 6 }));
    book
}

#[test]
fn unusable_records_are_counted_by_their_reason() {
    let (records, counts) = mixed().read(&LedgerFilter::default()).unwrap();
    insta::assert_snapshot!(
        counts.skipped_text(),
        @"1 written by a client, 1 not trainable, 1 without log-probabilities, 1 too long, 1 of a route that the configuration lacks, 1 rated by quarantined keys, 1 without a reward"
    );
    assert_eq!((counts.found, counts.used, records.len()), (9, 2, 2));
    let rewards = |record: &UsableGroup| -> Vec<f64> {
        record.group.samples().flat_map(|s| s.rewards.into_values().collect::<Vec<_>>()).collect()
    };
    assert_eq!((rewards(&records[0]), rewards(&records[1])), (vec![0.5], vec![2.0]));
    let sample = records[0].group.samples().next().unwrap();
    let own = &sample.sample;
    assert_eq!((&own.prompt_ids[..], &own.ids[..]), (&[1, 7][..], &[1, 2, 3][..]));
    assert_eq!(own.logprobs, [-1.0, -0.5, -0.25]);
}

#[test]
fn filters_select_records() {
    let used = |filter: LedgerFilter| mixed().read(&filter).map(|(_, counts)| counts.used);
    let users = LedgerFilter { routes: vec!["users".to_owned()], ..LedgerFilter::default() };
    assert_eq!(used(users.clone()).unwrap(), 1);
    let third = VersionRange { first: 3, last: 9 };
    assert_eq!(used(LedgerFilter { policies: vec![third], ..users.clone() }).unwrap(), 1);
    assert_eq!(used(LedgerFilter { until: Some(20), ..LedgerFilter::default() }).unwrap(), 1);
    let graded = LedgerFilter { routes: vec!["graded".to_owned()], ..LedgerFilter::default() };
    let together = LedgerFilter { policies: vec![third], ..graded };
    insta::assert_snapshot!(
        used(together).unwrap_err(),
        @"no record passes all of --since, --until, --route and --policy; each of them selects some"
    );
    insta::assert_snapshot!(
        used(LedgerFilter { since: Some(25), ..users }).unwrap_err(),
        @"of 1 records, 0 can be trained on: 1 rated by quarantined keys; rewards need the weights in the daemon's --config"
    );
    insta::assert_snapshot!(
        Book::default().read(&LedgerFilter::default()).map(|_| ()).unwrap_err(),
        @"the ledger has no completion that was scored or rated"
    );
}

#[test]
fn all_records_of_a_prompt_are_on_one_side() {
    let mut book = Book::default();
    for token in 0..40 {
        book.graded(token, 10, |_| {});
        book.graded(token, 20, |s| s.version = PolicyVersion(1));
    }
    let (records, _) = book.read(&LedgerFilter::default()).unwrap();
    let prompts = |side: &[UsableGroup]| side.iter().map(|r| r.prompt).collect::<Vec<_>>();
    let both = split(records, 0.3).unwrap();
    let (train, held_out) = (prompts(&both.train), prompts(&both.held_out));
    assert_eq!(train.len() + held_out.len(), 80);
    assert!(held_out.iter().all(|prompt| !train.contains(prompt)));
}

#[test]
fn prompts_of_exams_are_held_out_and_no_side_may_be_empty() {
    let book = |exam: bool| {
        let mut book = Book::default();
        book.graded(1, 10, |_| {});
        book.graded(2, 10, |_| {});
        if exam {
            // Only another request with the second prompt was marked.
            book.prompt(2, true);
        }
        book.read(&LedgerFilter::default()).unwrap().0
    };
    let with_exam = split(book(true), 1e-9).unwrap();
    assert_eq!((with_exam.train.len(), with_exam.held_out.len()), (1, 1));
    let refused = |share: f64| split(book(false), share).map(|_| ()).unwrap_err();
    insta::assert_snapshot!(
        refused(1e-9),
        @"--holdout is 0.000000001: of 2 recorded prompts it holds out none; use a larger share"
    );
    insta::assert_snapshot!(
        refused(0.999_999_999),
        @"--holdout is 0.999999999: of 2 recorded prompts it leaves none to train on; use a smaller share"
    );
}

mod held_out {
    use super::super::*;

    #[test]
    fn the_side_depends_on_the_prompt_and_the_share_alone() {
        let prompt = |n: u64| Digest::new().bytes(n.to_le_bytes()).prefix::<16>();
        let held = |share: f64| (0..4000).filter(|n| is_held_out(prompt(*n), share)).count();
        assert_eq!((held(0.0), held(1.0)), (0, 4000));
        assert!((320..480).contains(&held(0.1)), "{}", held(0.1));
        // A larger share holds out the same prompts and more.
        assert!((0..4000).all(|n| !is_held_out(prompt(n), 0.1) || is_held_out(prompt(n), 0.3)));
    }
}

mod report {
    use std::collections::BTreeMap;

    use super::super::*;
    use crate::runs::from_ledger::RecordSkip;

    fn report() -> RecordReport {
        let estimate = |reward, effective_records, log_ratio| PolicyEstimate {
            reward: Some(reward),
            effective_records,
            reliable: effective_records >= 2.0,
            log_ratio_above: Some(log_ratio),
            log_ratio_below: None,
            behavior_kl: Some(0.001),
        };
        RecordReport {
            ledger: "old_data/ledger.redb".to_owned(),
            records: RecordCounts {
                found: 120,
                used: 105,
                skipped: BTreeMap::from([(RecordSkip::TooLong, 12), (RecordSkip::NoReward, 3)]),
            },
            train_prompts: 11,
            train_records: 85,
            held_out_prompts: 3,
            held_out_records: 20,
            left_out: 2,
            skipped_batches: 0,
            mean_reward: 0.5,
            before: estimate(0.5, 19.5, 0.0),
            after: estimate(0.75, 1.5, 3.25),
        }
    }

    #[test]
    fn the_section_of_a_report() {
        insta::assert_snapshot!(report(), @r"
        - 120 records in `old_data/ledger.redb`
        - not used: 12 too long, 3 without a reward
        - trained on 85 records of 11 prompts, 20 of 3 prompts held out
        - left out of steps: 2 samples from which the policy has moved away
        - mean recorded reward of held-out records: 0.5000

        | held-out records                 |  before |  after |
        |----------------------------------|---------|--------|
        | estimated reward                 |  0.5000 | 0.7500 |
        | effective records                | 19.5000 | 1.5000 |
        | log-ratio, reward above the mean |  0.0000 | 3.2500 |
        | log-ratio, reward below the mean |       – |      – |
        | KL to the behavior policy        |  0.0010 | 0.0010 |

        **Warning**: the estimated reward after training is unreliable: fewer than 10 % of the held-out records are effective, because the policy is far from those that sampled them.
        ");
        let json = serde_json::to_value(report()).unwrap();
        assert_eq!(json["records"]["skipped"]["too_long"], 12);
        assert_eq!(serde_json::from_value::<RecordReport>(json).unwrap(), report());
    }
}
