use std::collections::BTreeMap;
use std::sync::Arc;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::random_text::random_text;
use super::*;
use crate::config::{KINDS, RouteConfig, RouteList};
use crate::{PartStats, Route, Routes, ScoreInput};

/// A route with the example of every entry as a part of its kind's name.
fn every_kind() -> Arc<Route> {
    let mut toml = "name = \"all\"\n".to_owned();
    for KindEntry { kind, example, .. } in catalogue() {
        toml += &format!("[[reward]]\nname = \"{kind}\"\nkind = \"{kind}\"\n{example}\n");
    }
    build(&toml)
}

fn build(toml: &str) -> Arc<Route> {
    let route: RouteConfig = toml::from_str(toml).unwrap();
    let routes = Routes::new(&RouteList(vec![route])).unwrap();
    Arc::clone(routes.get("all").unwrap())
}

#[test]
fn the_catalogue_is_the_list_of_kinds_and_every_example_is_built() {
    let kinds: Vec<&str> = catalogue().map(|entry| entry.kind).collect();
    assert_eq!(kinds, KINDS);
    let route = every_kind();
    assert_eq!(route.parts.len(), KINDS.len());
    for (part, entry) in route.parts.iter().zip(catalogue()) {
        assert_eq!(part.grader.is_none(), entry.kind == "feedback");
        for text in [entry.formula, entry.range, entry.parameters, entry.typical_weight] {
            assert!(!text.is_empty() && !text.contains("  "), "{}: {text:?}", entry.kind);
        }
        assert!(entry.bounds[0] < entry.bounds[1]);
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
    let mut stats: BTreeMap<String, PartStats> = BTreeMap::new();
    for _ in 0..100 {
        let samples: Vec<ScoreInput> = (0..1000).map(|_| sample(&mut rng)).collect();
        for part in &route.parts {
            // Not through the route, which would catch a panic.
            let Some(grader) = &part.grader else { continue };
            if CALLS.contains(&part.name.as_str()) {
                continue;
            }
            let values = grader.score(&samples).await;
            assert_eq!(values.len(), samples.len());
            let entry = catalogue().find(|entry| entry.kind == part.name).unwrap();
            for (value, sample) in values.iter().zip(&samples) {
                if let Some(value) = value {
                    let [low, high] = entry.bounds;
                    assert!((low..=high).contains(value), "{}: {value} of {sample:?}", part.name);
                }
            }
            stats.entry(part.name.clone()).or_default().extend(values);
        }
    }
    // The inputs must reach more than one value of every kind, or they say little.
    for (kind, stats) in &stats {
        let summary = stats.summary();
        assert_eq!(summary.count + summary.missing, 100_000);
        assert!(summary.std > Some(0.0) && summary.min < summary.max, "{kind}: {summary:?}");
    }
}
