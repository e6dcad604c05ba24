mod guides;
pub mod samples;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use toml::Table;

use super::random_text::random_text;
use super::*;
use crate::routes::{RouteConfig, RouteList};
use crate::{Route, Routes, ScoreInput};

/// Whether a kind's example runs in the sandbox, which these tests do not have.
fn needs_sandbox(entry: &KindEntry) -> bool {
    let parameters = toml::from_str(entry.example).unwrap();
    RewardKind::read(entry.kind, parameters).unwrap().needs_sandbox()
}

/// A route with every kind's example as a part named like the kind.
fn every_kind() -> Arc<Route> {
    let mut toml = "name = \"all\"\n".to_owned();
    for entry in catalogue().into_iter().filter(|entry| !needs_sandbox(entry)) {
        let KindEntry { kind, example, .. } = entry;
        toml += &format!("[[reward]]\nname = \"{kind}\"\nkind = \"{kind}\"\n{example}\n");
    }
    let route: RouteConfig = toml::from_str(&toml).unwrap();
    let routes = Routes::new(&RouteList(vec![route])).unwrap();
    Arc::clone(routes.get("all").unwrap())
}

#[test]
fn every_example_is_built_and_every_entry_is_complete() {
    let entries = catalogue();
    let names: BTreeSet<&str> = entries.iter().map(|entry| entry.kind).collect();
    assert_eq!(names.len(), entries.len(), "names are distinct");
    let route = every_kind();
    let built: Vec<&str> = route.parts.iter().map(|part| part.name.as_str()).collect();
    for entry in entries {
        let needs_sandbox = ["python", "code", "code_syntax"].contains(&entry.kind);
        assert_eq!(built.contains(&entry.kind), !needs_sandbox, "{}", entry.kind);
        let part = route.parts.iter().find(|part| part.name == entry.kind);
        assert!(part.is_none_or(|part| part.grader.is_none() == (entry.kind == "feedback")));
        for text in [entry.formula, entry.range, &entry.parameters, entry.typical_weight] {
            assert!(!text.is_empty() && !text.contains("  "), "{}: {text:?}", entry.kind);
        }
        assert!(entry.bounds[0] < entry.bounds[1]);
    }
}

/// The value of `key = value` in the list of parameters, which may continue after it.
fn documented(parameters: &str, key: &str) -> Option<toml::Value> {
    let list = format!(", {parameters}");
    let (_, rest) = list.split_once(&format!(", {key} = "))?;
    let is_end = |at: &usize| {
        let after = &rest[*at..];
        after.is_empty() || after.starts_with(", ") || after.starts_with(" (")
    };
    let ends = (0..=rest.len()).filter(|at| rest.is_char_boundary(*at)).filter(is_end);
    let mut values =
        ends.filter_map(|at| toml::from_str::<Table>(&format!("v = {}", &rest[..at])).ok());
    values.next()?.remove("v")
}

#[test]
fn documented_defaults_are_the_defaults() {
    for entry in catalogue() {
        let example: Table = toml::from_str(entry.example).unwrap();
        let kind = RewardKind::read(entry.kind, example.clone()).unwrap();
        for (key, value) in kind.to_json().unwrap().as_object().unwrap() {
            if example.contains_key(key) {
                assert!(entry.parameters.contains(key.as_str()), "{}: {key}", entry.kind);
                continue;
            }
            let documented = documented(&entry.parameters, key);
            let documented = serde_json::to_value(documented).unwrap();
            let equal = match (documented.as_f64(), value.as_f64()) {
                (Some(documented), Some(value)) => documented == value,
                _ => documented == *value,
            };
            assert!(equal, "{}: {key} = {value} is documented as {documented}", entry.kind);
        }
    }
}

fn sample(rng: &mut ChaCha8Rng) -> ScoreInput {
    let inside = random_text(rng, 12);
    let text = match rng.random_range(0..6) {
        0 => format!("<reasoning>{inside}</reasoning><answer>{}</answer>", random_text(rng, 8)),
        1 => format!("<think>{inside}</think> \\boxed{{{}}}", random_text(rng, 8)),
        2 => format!("<think>{inside}</think><answer>{}</answer>", random_text(rng, 8)),
        3 => format!("<answer>{inside}</answer>"),
        _ => inside,
    };
    let mut metadata = BTreeMap::new();
    for key in ["answer", "keywords"] {
        if rng.random_bool(0.9) {
            metadata.insert(key.to_owned(), random_text(rng, 8));
        }
    }
    let ids = (0..rng.random_range(0..40)).map(|_| rng.random_range(0..5)).collect();
    ScoreInput { messages: Arc::new(Vec::new()), metadata: Arc::new(metadata), text, ids }
}

#[tokio::test]
async fn no_input_panics_or_leaves_its_range() {
    let route = every_kind();
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    let mut extremes: BTreeMap<&str, [f64; 2]> = BTreeMap::new();
    for _ in 0..100 {
        let samples: Vec<ScoreInput> = (0..1000).map(|_| sample(&mut rng)).collect();
        let entries = catalogue().into_iter().filter(|entry| !needs_sandbox(entry));
        for (part, entry) in route.parts.iter().zip(entries) {
            // Not through the route, which would catch a panic.
            let Some(grader) = &part.grader else { continue };
            if entry.calls_out {
                continue;
            }
            let values = grader.score(&samples).await;
            assert_eq!(values.len(), samples.len());
            let none = [f64::INFINITY, f64::NEG_INFINITY];
            let [least, greatest] = extremes.entry(entry.kind).or_insert(none);
            for (value, sample) in values.into_iter().zip(&samples) {
                if let Some(value) = value {
                    let [low, high] = entry.bounds;
                    assert!((low..=high).contains(&value), "{}: {value} of {sample:?}", part.name);
                    (*least, *greatest) = (least.min(value), greatest.max(value));
                }
            }
        }
    }
    // The inputs must produce more than one value of every kind, or they test little.
    assert!(extremes.len() > 28);
    for (kind, [least, greatest]) in extremes {
        assert!(least < greatest, "{kind}: {least} to {greatest}");
    }
}

#[test]
fn every_kind_with_a_pattern_shows_the_answer_that_it_finds() {
    let found = |kind: &str, text: &str| {
        RewardKind::read(kind, Table::new()).unwrap().answer(text).unwrap()
    };
    for entry in catalogue() {
        let example: Table = toml::from_str(entry.example).unwrap();
        let kind = RewardKind::read(entry.kind, example).unwrap();
        let has_pattern = kind.to_json().unwrap().get("extract").is_some();
        assert_eq!(kind.extract().is_some(), has_pattern, "{}", entry.kind);
        assert_eq!(kind.answer("x").is_some(), has_pattern, "{}", entry.kind);
    }
    let text = "<think>\\boxed{1}</think> so <answer> \\boxed{\\frac12} </answer>";
    assert_eq!(found("exact_match", text).as_deref(), Some("\\boxed{\\frac12}"));
    for kind in ["math_equal", "reasoning_accuracy"] {
        assert_eq!(found(kind, text).as_deref(), Some("\\frac12"), "{kind}");
    }
    assert_eq!(found("reasoning_accuracy", "\\boxed{1}"), None, "no end of the reasoning");
    assert_eq!(found("math_equal", "so \\boxed{7}.").as_deref(), Some("7"), "the last box");
    assert_eq!(found("numeric_match", "7").as_deref(), Some("7"), "without tags all of it");
    assert_eq!(found("multiple_choice", "the answer is b").as_deref(), Some("B"));
}

#[tokio::test]
async fn a_broken_member_leaves_the_ensemble_to_the_others() {
    let members: Vec<Arc<dyn RewardFn>> = vec![
        Arc::new(samples::Broken { panics: true }),
        Arc::new(samples::Broken { panics: false }),
        samples::half(),
    ];
    let ensemble = EnsembleFn { members, how: EnsembleMethod::Min };
    assert_eq!(
        ensemble.score(&[samples::sample("a", &[]), samples::sample("b", &[])]).await,
        [Some(0.5); 2]
    );
}
