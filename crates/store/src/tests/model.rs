//! Random operations, compared with a model made of plain maps.

use proptest::prelude::*;

use super::faults::Disk;
use super::*;
use crate::FeedbackOutcome;

/// A random action. The numbers are small, so that actions concern the same records.
#[derive(Clone, Debug)]
enum Action {
    Prompt { n: u64, shadows: u64 },
    Grade { sample: u64, name: u8, value: Option<i8> },
    Feedback { of: u64, choice: u32, name: u8, value: i8, key: Option<(u8, bool)> },
    Group { n: u64, of: u64, size: u64, part: u8 },
    Drop { group: u64 },
    Step { groups: Vec<u64> },
    Policy { n: u64 },
    Reopen,
}

fn action() -> impl Strategy<Value = Action> {
    let key = proptest::option::of((0..3_u8, any::<bool>()));
    prop_oneof![
        4 => (0..4_u64, 0..3_u64).prop_map(|(n, shadows)| Action::Prompt { n, shadows }),
        2 => (0..40_u64, 0..3_u8, proptest::option::of(-2..3_i8))
            .prop_map(|(sample, name, value)| Action::Grade { sample, name, value }),
        6 => (0..5_u64, 0..2_u32, 0..3_u8, 0..2_i8, key)
            .prop_map(|(of, choice, name, value, key)| {
                Action::Feedback { of, choice, name, value, key }
            }),
        3 => (0..6_u64, 0..4_u64, 1..4_u64, 0..3_u8)
            .prop_map(|(n, of, size, part)| Action::Group { n, of, size, part }),
        1 => (0..6_u64).prop_map(|group| Action::Drop { group }),
        2 => proptest::collection::vec(0..6_u64, 0..3).prop_map(|groups| Action::Step { groups }),
        1 => (0..3_u64).prop_map(|n| Action::Policy { n }),
        1 => Just(Action::Reopen),
    ]
}

fn part(name: u8) -> String {
    format!("part {name}")
}

/// The expected content of the ledger.
#[derive(Default)]
struct Model {
    interactions: BTreeMap<u64, Interaction>,
    samples: BTreeMap<u64, Sample>,
    rewards: BTreeMap<(u64, String), Reward>,
    feedback: u64,
    /// API key and idempotency key -> what was first posted with them.
    keys: BTreeMap<(Option<String>, String), FeedbackEntry>,
    groups: BTreeMap<u64, Group>,
    steps: BTreeMap<u64, StepRecord>,
    policies: BTreeMap<u64, PolicyRecord>,
    /// `(sample, part)` of feedback that waits for a group -> when it arrived.
    waiting: BTreeMap<(u64, String), u64>,
    clock: u64,
}

impl Model {
    fn put_reward(&mut self, sample: u64, row: Reward) -> Option<Reward> {
        let key = (sample, row.name.clone());
        self.waiting.remove(&key);
        self.rewards.insert(key, row)
    }

    fn feedback(&mut self, entry: &FeedbackEntry, of: u64) -> FeedbackOutcome {
        let key = entry.idempotency_key.clone().map(|k| (entry.key_id.clone(), k));
        if let Some(first) = key.as_ref().and_then(|k| self.keys.get(k)) {
            let same = first.interaction == entry.interaction
                && first.choice == entry.choice
                && first.name == entry.name
                && first.value == entry.value;
            return match same {
                true => FeedbackOutcome::Duplicate(sample_id(10 * of)),
                false => FeedbackOutcome::Reused,
            };
        }
        if !self.interactions.contains_key(&of) {
            return FeedbackOutcome::UnknownCompletion;
        }
        // These actions serve only choice 0, as sample `10 * of`.
        if entry.choice != 0 {
            return FeedbackOutcome::UnknownChoice;
        }
        let sample = 10 * of;
        let row = Reward {
            id: reward_id(0),
            source: RewardSource::Feedback,
            created: entry.created,
            idempotency_key: entry.idempotency_key.clone(),
            comment: entry.comment.clone(),
            key_id: entry.key_id.clone(),
            ..graded(0, sample, &entry.name, entry.value)
        };
        self.feedback += 1;
        if let Some(key) = key {
            self.keys.insert(key, entry.clone());
        }
        let previous = self.put_reward(sample, row);
        let naming: Vec<_> = self
            .groups
            .values()
            .filter(|g| g.members.contains(&sample_id(sample)) && g.parts.contains(&entry.name))
            .collect();
        let ready = naming.iter().any(|g| g.state == GroupState::Ready);
        let changed = previous.is_none_or(|p| p.value != entry.value);
        if naming.is_empty() || (changed && !ready) {
            self.waiting.insert((sample, entry.name.clone()), entry.created);
        }
        FeedbackOutcome::Recorded(sample_id(sample))
    }

    /// Updates the model with an action. Returns its operations and their expected outcomes.
    fn apply(&mut self, action: &Action) -> (Vec<Op>, Vec<FeedbackOutcome>) {
        self.clock += 1;
        match action {
            Action::Prompt { n, shadows } => {
                let ops = prompt_ops(*n, *shadows);
                for op in &ops {
                    match op {
                        Op::Interaction(row) => drop(self.interactions.insert(*n, (**row).clone())),
                        Op::Sample(row) => {
                            let number = (0..50).find(|i| sample_id(*i) == row.id).unwrap();
                            self.samples.insert(number, (**row).clone());
                        }
                        Op::Reward(row) => {
                            let number = (0..50).find(|i| sample_id(*i) == row.sample).unwrap();
                            self.put_reward(number, (**row).clone());
                        }
                        _ => unreachable!(),
                    }
                }
                (ops, vec![])
            }
            Action::Grade { sample, name, value } => {
                let row = graded(self.clock, *sample, &part(*name), value.map(f64::from));
                if self.samples.contains_key(sample) {
                    self.put_reward(*sample, row.clone());
                }
                (vec![Op::Reward(Box::new(row))], vec![])
            }
            Action::Feedback { of, choice, name, value, key } => {
                let entry = FeedbackEntry {
                    choice: *choice,
                    name: part(*name),
                    idempotency_key: key.map(|(k, _)| format!("key {k}")),
                    key_id: key.and_then(|(_, own)| own.then(|| "key-1".to_owned())),
                    ..thumbs(*of, f64::from(*value), self.clock)
                };
                let outcome = self.feedback(&entry, *of);
                (vec![feedback(entry)], vec![outcome])
            }
            Action::Group { n, of, size, part: name } => {
                // The prompt and time of a group never change.
                let (of, created) = match self.groups.get(n) {
                    Some(g) => {
                        ((0..50).find(|i| interaction_id(*i) == g.interaction).unwrap(), g.created)
                    }
                    None => (*of, 4000 + self.clock),
                };
                // The served sample and its shadows, which may not all exist.
                let members: Vec<u64> = (0..*size).map(|i| 10 * of + i).collect();
                let row = Group { created, ..group(*n, of, &members, &[&part(*name)]) };
                if members.iter().all(|m| self.samples.contains_key(m)) {
                    for member in &members {
                        self.waiting.remove(&(*member, part(*name)));
                    }
                    self.set_state(*n, &row.state);
                    self.groups.insert(*n, row.clone());
                }
                (vec![Op::Group(Box::new(row))], vec![])
            }
            Action::Drop { group } => {
                let state = GroupState::Dropped("stale".to_owned());
                self.set_state(*group, &state);
                (vec![Op::GroupState(group_id(*group), state)], vec![])
            }
            Action::Step { groups } => {
                let number = self.steps.len() as u64 + 1;
                let mut known = groups.clone();
                known.retain(|group| self.groups.contains_key(group));
                for group in &known {
                    self.set_state(*group, &GroupState::Trained(number));
                }
                let row = step(number, &known);
                self.steps.insert(number, row.clone());
                (vec![Op::Step(Box::new(row))], vec![])
            }
            Action::Policy { n } => {
                // A version needs its parent.
                let n = (*n).min(self.policies.len() as u64);
                let row = policy(n, PolicyState::Active);
                self.policies.insert(n, row.clone());
                (vec![Op::Policy(Box::new(row))], vec![])
            }
            Action::Reopen => (vec![], vec![]),
        }
    }

    /// A group leaves the step that trained on it before.
    fn set_state(&mut self, group: u64, state: &GroupState) {
        let Some(row) = self.groups.get_mut(&group) else { return };
        if let GroupState::Trained(step) = row.state
            && *state != row.state
        {
            self.steps.get_mut(&step).unwrap().groups.retain(|id| *id != group_id(group));
        }
        row.state = state.clone();
    }

    fn compare(&self, store: &Store) {
        let stats = store.stats().unwrap();
        assert_eq!(stats.interactions, self.interactions.len() as u64);
        assert_eq!(stats.samples, self.samples.len() as u64);
        assert_eq!(stats.rewards, self.rewards.len() as u64);
        assert_eq!(stats.feedback, self.feedback);
        assert_eq!(stats.groups, self.groups.len() as u64);
        for (n, row) in &self.samples {
            assert_eq!(store.sample(sample_id(*n)).unwrap().as_ref(), Some(row));
            let expected: Vec<_> = self
                .rewards
                .range((*n, String::new())..(*n + 1, String::new()))
                .map(|(_, row)| row.clone())
                .collect();
            let mut found = store.rewards_of(sample_id(*n)).unwrap();
            for row in &mut found {
                if row.source == RewardSource::Feedback {
                    // The ledger chooses the id.
                    row.id = reward_id(0);
                }
            }
            assert_eq!(found, expected);
        }
        for (n, row) in &self.interactions {
            assert_eq!(store.interaction(interaction_id(*n)).unwrap().as_ref(), Some(row));
            let expected: Vec<_> =
                self.samples.values().filter(|s| s.interaction == row.id).cloned().collect();
            assert_eq!(store.samples_of(row.id).unwrap(), expected);
        }
        let groups: Vec<_> =
            self.groups.keys().map(|n| store.group(group_id(*n)).unwrap()).collect();
        assert_eq!(groups, self.groups.values().cloned().map(Some).collect::<Vec<_>>());
        let mut ready: Vec<_> =
            self.groups.values().filter(|g| g.state == GroupState::Ready).cloned().collect();
        ready.sort_by_key(|g| (g.created, g.id));
        assert_eq!(store.ready_groups(100).unwrap(), ready);
        assert_eq!(*store.watch_ready().borrow(), ready.len());
        let mut waiting: Vec<_> = self.waiting.iter().map(|(key, since)| (*since, key)).collect();
        waiting.sort();
        let waiting: Vec<_> =
            waiting.into_iter().map(|(_, (n, name))| (sample_id(*n), name.clone())).collect();
        assert_eq!(ungrouped(store), waiting);
        assert_eq!(store.steps(0, 100).unwrap(), self.steps.values().cloned().collect::<Vec<_>>());
        assert_eq!(store.policies().unwrap(), self.policies.values().cloned().collect::<Vec<_>>());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn the_ledger_agrees_with_the_model(actions in proptest::collection::vec(action(), 1..40)) {
        let disk = Disk::new(Vec::new(), 0);
        let mut store = Some(disk.store().unwrap());
        let mut model = Model::default();
        for action in &actions {
            if matches!(action, Action::Reopen) {
                drop(store.take());
                store = Some(disk.store().unwrap());
            }
            let (ops, expected) = model.apply(action);
            let done = store.as_ref().unwrap().commit_blocking(ops).unwrap();
            prop_assert_eq!(done.feedback, expected);
        }
        let store = store.unwrap();
        model.compare(&store);
        let problems = problems(&store);
        prop_assert_eq!(problems.first, Vec::<String>::new());
    }
}
