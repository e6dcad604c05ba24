//! The reward functions of the guides to GRPO with TRL: the parts in `docs/from-trl.md` give the values
//! that `tests/reference/guides/make_guide_cases.py` computes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use futures::FutureExt;
use serde::Deserialize;
use serde_json::{Map, Value};
use toml::Table;

use super::samples::sample;
use crate::routes::{AdaptiveConfig, AdaptiveWeight, Preset, RewardConfig, RouteConfig, RouteList};
use crate::{Route, Routes, ScoreInput};

/// Functions whose cases other tests use.
const ELSEWHERE: [(&str, &str); 5] = [
    ("code_execution", "runs code: tests/sandbox"),
    ("no_syntax_error", "runs code: tests/sandbox"),
    ("code_generation", "runs code: tests/sandbox"),
    ("dataset_answer", "extracts from a dataset: crates/dataset"),
    ("group_advantages", "no reward: crates/train"),
];

const NO_ANSWER: &str = "without tags the answer is wrong; the guides find an empty one";
const LAST: &str = "the last answer counts; the guides take the first";
const WHOLE: &str = "without tags all of the completion is the answer";
const TRIMMED: &str = "the reference is trimmed; the guides' is not";
/// The cases, counted from 1, in which a value differs from the guide's, with the reason.
const DIFFERENCES: &[(&str, &[usize], &str)] = &[
    ("correctness_answer_tag", &[8, 9, 10], TRIMMED),
    ("connectors", &[23], LAST),
    ("correctness_announced", &[12, 13, 14], LAST),
    ("correctness_answer_tag", &[21, 22, 25], LAST),
    ("correctness_answer_tag", &[26], WHOLE),
    ("correctness_answer_tag", &[31], NO_ANSWER),
    ("correctness_boxed", &[7], "the last closed box is taken where the last is not closed"),
    ("correctness_boxed", &[25], TRIMMED),
    ("correctness_demo_extract", &[19], TRIMMED),
    ("exact_match", &[21, 22, 25], LAST),
    ("exact_match", &[26], WHOLE),
    ("exact_match", &[31], NO_ANSWER),
    ("fuzzy_match", &[11, 33], TRIMMED),
    ("ideal_words", &[24], "each character of a script without spaces is a word"),
    ("fuzzy_match", &[36], WHOLE),
    ("fuzzy_match", &[37], NO_ANSWER),
    ("fuzzy_match", &[38], LAST),
    ("group_diversity", &[1], "a completion without others is missing, not 0"),
    ("integer_check", &[3, 4, 5], "a sign and thousands separators are allowed"),
    ("integer_check", &[19, 20, 21, 22], "other scripts' digits, ² and ② are no numbers"),
    ("json_format", &[14, 15, 32], "NaN and Infinity are not JSON"),
    ("math_problem", &[3], WHOLE),
    ("math_problem", &[26, 30], LAST),
    ("math_problem", &[43], NO_ANSWER),
    ("multi_objective", &[2, 5, 15], WHOLE),
    ("multi_stage", &[20], WHOLE),
    ("multi_stage", &[26], TRIMMED),
    ("numeric", &[5, 6, 32], "commas separate groups of three digits, and `_` no digits"),
    ("numeric", &[29], "U+2212 is a minus sign"),
    ("numeric", &[44, 45], "other scripts' digits are no numbers"),
    (
        "numeric",
        &[34, 35, 36, 48, 50, 51],
        "without a finite reference the value is missing, not 0",
    ),
    ("numeric", &[38, 39, 40], "amounts may have a sign or a unit"),
    ("numeric", &[55], WHOLE),
    ("numeric", &[56], LAST),
    ("problem", &[8, 9, 10], TRIMMED),
    ("problem", &[21, 22, 25], LAST),
    ("problem", &[26, 35], WHOLE),
    ("repetition_share", &[25], "each character of a script without spaces is a word"),
    ("repetition_threshold", &[1, 2, 3, 4, 25], "completions below three words earn 0"),
];

#[derive(Deserialize)]
struct Reference {
    functions: BTreeMap<String, Function>,
}

#[derive(Deserialize)]
struct Function {
    cases: Vec<(Value, Value)>,
}

fn file(path: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)).unwrap()
}

fn functions() -> BTreeMap<String, Function> {
    let text = file("tests/reference/guides/guide_cases.json");
    serde_json::from_str::<Reference>(&text).unwrap().functions
}

/// The blocks under "Reward functions" by the name in their first line, `# name: where it is from`.
fn blocks() -> BTreeMap<String, Vec<RouteConfig>> {
    let text = file("docs/from-trl.md");
    let (_, section) = text.split_once("\n## Reward functions\n").unwrap();
    let section = section.split("\n## ").next().unwrap();
    let mut blocks = BTreeMap::new();
    for block in section.split("toml\n# ").skip(1) {
        let (name, toml) = block.split_once(": ").unwrap();
        // The comment's rest remains; a block ends at its fence.
        let toml = format!("# {}", toml.split("\n```").next().unwrap());
        let known = blocks.insert(name.to_owned(), routes(&toml));
        assert!(known.is_none(), "two blocks are named {name}");
    }
    blocks
}

/// The routes of a block; parts without a route are in one named like none.
fn routes(toml: &str) -> Vec<RouteConfig> {
    let mut table: Table = toml.parse().unwrap();
    match table.remove("route").unwrap() {
        toml::Value::Table(mut parts) => {
            parts.insert("name".to_owned(), "alone".into());
            vec![parts.try_into().unwrap()]
        }
        list => list.try_into().unwrap(),
    }
}

fn build(route: &RouteConfig) -> Arc<Route> {
    let routes = Routes::new(&RouteList(vec![route.clone()])).unwrap();
    Arc::clone(routes.get(&route.name).unwrap())
}

/// The weighted sum of the parts of each member of a group; `None` if one is missing.
fn sums(route: &Route, group: &[ScoreInput]) -> Vec<Option<f64>> {
    let graded = route.grade(group).now_or_never().unwrap();
    let sum = |member: usize| {
        graded.iter().map(|(part, values)| Some(route.weight(part)? * values[member]?)).sum()
    };
    (0..group.len()).map(sum).collect()
}

/// A completion with the other columns of its row.
fn row(row: &Map<String, Value>) -> ScoreInput {
    let text = |key: &str| row[key].as_str().unwrap_or_default();
    let columns: Vec<(&str, &str)> =
        row.keys().filter(|key| *key != "text").map(|key| (key.as_str(), text(key))).collect();
    sample(text("text"), &columns)
}

fn texts(value: &Value) -> Vec<&str> {
    value.as_array().unwrap().iter().map(|text| text.as_str().unwrap()).collect()
}

fn numbers(value: &Value) -> Vec<f64> {
    match value {
        Value::Array(list) => list.iter().flat_map(numbers).collect(),
        other => vec![other.as_f64().unwrap()],
    }
}

/// The values of a case, and those that the guide's function has.
fn values(name: &str, routes: &[RouteConfig], case: &(Value, Value)) -> [Vec<Option<f64>>; 2] {
    let (input, expected) = case;
    let route = build(&routes[0]);
    let (found, wanted) = match name {
        "group_diversity" => {
            let group: Vec<_> = texts(input).into_iter().map(|text| sample(text, &[])).collect();
            (sums(&route, &group), numbers(expected))
        }
        "multi_objective" => {
            let mut routes = routes.to_vec();
            let weights = numbers(&input["weights"]);
            for (part, weight) in routes[0].rewards.iter_mut().zip(weights) {
                part.weight *= weight;
            }
            let route = build(&routes[0]);
            let completions = texts(&input["completions"]).into_iter();
            let rows = completions.zip(texts(&input["answer"]));
            let sums = rows.flat_map(|(text, answer)| {
                self::sums(&route, &[sample(text, &[("answer", answer)])])
            });
            (sums.collect(), numbers(&expected["sums"]))
        }
        "multi_stage" => {
            let stage = format!("stage{}", input["stage"]);
            let route = build(routes.iter().find(|route| route.name == stage).unwrap());
            (sums(&route, &[row(input.as_object().unwrap())]), numbers(expected))
        }
        "adaptive" => {
            let (weights, rewards) = adaptive(routes[0].rewards[0].adaptive.unwrap(), input);
            let wanted = [&expected["weights"], &expected["rewards"]].map(numbers).concat();
            (weights.into_iter().chain(rewards).map(Some).collect(), wanted)
        }
        _ => {
            let input = match input {
                Value::Object(columns) => row(columns),
                text => sample(text.as_str().unwrap(), &[]),
            };
            (sums(&route, &[input]), numbers(expected))
        }
    };
    [found, wanted.into_iter().map(Some).collect()]
}

/// The weight after each period of a case, and the case's rewards times the last weight.
fn adaptive(rule: AdaptiveConfig, case: &Value) -> (Vec<f64>, Vec<f64>) {
    let start = case["weight"].as_f64().unwrap();
    let every = u32::try_from(case["every"].as_u64().unwrap()).unwrap();
    let mut weight = AdaptiveWeight::new(start, &AdaptiveConfig { every, ..rule });
    let mut weights = Vec::new();
    for successes in case["successes"].as_array().unwrap() {
        let successes = successes.as_u64().unwrap();
        weight.observe((0..u64::from(every)).map(|i| Some(f64::from(u8::from(i < successes)))));
        weights.push(weight.weight());
    }
    let rewards = numbers(&case["rewards"]).iter().map(|reward| reward * weight.weight()).collect();
    (weights, rewards)
}

fn is_equal([found, wanted]: &[Vec<Option<f64>>; 2]) -> bool {
    let equal = |(found, wanted): (&Option<f64>, &Option<f64>)| match (found, wanted) {
        (Some(found), Some(wanted)) => (found - wanted).abs() <= 1e-9 * wanted.abs().max(1.0),
        _ => false,
    };
    found.len() == wanted.len() && found.iter().zip(wanted).all(equal)
}

#[test]
fn parts_give_the_values_of_the_guides_functions() {
    let (functions, blocks) = (functions(), blocks());
    let elsewhere: BTreeSet<&str> = ELSEWHERE.iter().map(|(name, _)| *name).collect();
    let (mut wrong, mut compared) = (Vec::new(), 0);
    for (name, Function { cases }) in &functions {
        assert!(cases.len() >= 20, "{name}: {} cases", cases.len());
        if elsewhere.contains(name.as_str()) {
            continue;
        }
        let routes = blocks.get(name).unwrap_or_else(|| panic!("{name} has no block"));
        let listed: BTreeSet<usize> = DIFFERENCES
            .iter()
            .filter(|(function, ..)| function == name)
            .flat_map(|(_, numbers, _)| numbers.iter().copied())
            .collect();
        for (number, case) in (1..).zip(cases) {
            let both = values(name, routes, case);
            compared += 1;
            if is_equal(&both) == listed.contains(&number) {
                let [found, wanted] = both;
                wrong.push(format!("{name} {number}: {found:?}, not {wanted:?}: {}", case.0));
            }
        }
        assert!(listed.iter().all(|number| (1..=cases.len()).contains(number)), "{name}");
    }
    assert!(wrong.is_empty(), "{} cases:\n{}", wrong.len(), wrong.join("\n"));
    assert!(compared > 1200, "{compared} cases");
    for name in blocks.keys().map(String::as_str).chain(elsewhere) {
        assert!(functions.contains_key(name), "{name} has no cases");
    }
    for (name, _, reason) in DIFFERENCES {
        assert!(functions.contains_key(*name) && !reason.is_empty(), "{name}");
    }
}

#[test]
fn the_preset_has_the_parts_of_the_template() {
    let blocks = blocks();
    let part = |block: &str, weight: f64| {
        let part = blocks[block][0].rewards[0].clone();
        RewardConfig { weight, ..part }
    };
    let template = [
        part("format_incremental_any", 0.5),
        part("format_soft", 0.5),
        part("correctness_answer_tag", 2.0),
    ];
    assert_eq!(Preset::Guides.parts(), template);
}
