use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;
use crate::config::{KINDS, RouteConfig, RouteList};
use crate::reward::{PartStats, Route, Routes, ScoreInput};

/// Kinds whose values are not a function's of the completion; they have tests of their own.
const CALLS: [&str; 3] = ["code", "webhook", "judge"];

/// A route with the example of every entry as a part of its kind's name.
fn every_kind() -> Arc<Route> {
    let mut toml = "name = \"all\"\n".to_owned();
    for Entry { kind, example, .. } in catalogue() {
        toml += &format!("[[reward]]\nname = \"{kind}\"\nkind = \"{kind}\"\n{example}\n");
    }
    build(&toml)
}

fn build(toml: &str) -> Arc<Route> {
    let route: RouteConfig = toml::from_str(toml).unwrap();
    let routes = Routes::new(&RouteList(vec![route])).unwrap();
    Arc::clone(routes.get("all").unwrap())
}

/// As [`every_kind`], with whole completions for answers, so that each function reads all of it.
fn whole_texts() -> Arc<Route> {
    let mut toml = "name = \"all\"\n".to_owned();
    for Entry { kind, example, parameters, .. } in catalogue() {
        let whole = if parameters.contains("extract = ") { "extract = \"\"" } else { "" };
        toml += &format!("[[reward]]\nname = \"{kind}\"\nkind = \"{kind}\"\n{example}\n{whole}\n");
    }
    build(&toml)
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

const PIECES: [&str; 72] = [
    "<reasoning>",
    "</reasoning>",
    "<answer>",
    "</answer>",
    "<think>",
    "</think>",
    "<",
    ">",
    "/answer>",
    "\\boxed{",
    "\\boxed",
    "\\frac{",
    "\\frac",
    "\\dfrac12",
    "\\sqrt[3]{",
    "\\sqrt",
    "\\cdot ",
    "\\times ",
    "\\pi",
    "\\left(",
    "\\right)",
    "\\text{",
    "\\",
    "{",
    "}",
    "{,}",
    "$",
    "%",
    "^",
    "_",
    "(",
    ")",
    "[",
    "]",
    "1",
    "0",
    "12",
    ",234",
    ".5",
    "e9",
    "-",
    "+",
    "*",
    "/",
    "=",
    "x",
    "π",
    "√",
    "½",
    "²",
    "−",
    "answer is ",
    "Answer: ",
    "B",
    "(C)",
    "D. ",
    "Step 1: ",
    "First, ",
    "\n- ",
    "\n1. ",
    "[1]",
    "(Smith, 2020)",
    "https://a.example/",
    "```json\n",
    "```",
    "{\"answer\": 1}",
    "sorry ",
    "the ",
    " ",
    "\n",
    "é",
    "\u{3000}",
];

/// A mixture of what the functions look for, and of everything else.
fn scrap(rng: &mut ChaCha8Rng, most: usize) -> String {
    let of_unicode = rng.random_bool(0.1);
    let mut text = String::new();
    for _ in 0..rng.random_range(0..=most) {
        if of_unicode || rng.random_bool(0.05) {
            text.push(char::from_u32(rng.random_range(0..0x11_0000)).unwrap_or('\u{fffd}'));
        } else {
            text.push_str(PIECES[rng.random_range(0..PIECES.len())]);
        }
    }
    text
}

fn sample(rng: &mut ChaCha8Rng) -> ScoreInput {
    let inside = scrap(rng, 12);
    let text = match rng.random_range(0..6) {
        0 => format!("<reasoning>{inside}</reasoning><answer>{}</answer>", scrap(rng, 8)),
        1 => format!("<think>{inside}</think> \\boxed{{{}}}", scrap(rng, 8)),
        2 => format!("<think>{inside}</think><answer>{}</answer>", scrap(rng, 8)),
        3 => format!("<answer>{inside}</answer>"),
        _ => inside,
    };
    let mut metadata = BTreeMap::new();
    for key in ["answer", "keywords"] {
        if rng.random_bool(0.9) {
            metadata.insert(key.to_owned(), scrap(rng, 8));
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

/// Texts of `size` bytes that are likely to be slow for one function or another.
fn slow(size: usize) -> Vec<String> {
    let mut rng = ChaCha8Rng::seed_from_u64(4);
    let mut texts: Vec<String> = PIECES.iter().map(|p| p.repeat(size / p.len())).collect();
    texts.push(format!("\\boxed{{{}}}", "(1+".repeat(size / 3)));
    texts.push("The answer is that of the first, and then some more. ".repeat(size / 53));
    texts.push("http://a".repeat(size / 8));
    texts.push("a b ".repeat(size / 4));
    texts.push((0..size / 4).map(|i| format!("w{i} ")).collect());
    texts.extend((0..20).map(|_| scrap(&mut rng, size / 4)));
    let whole = |mut text: String| {
        let end = (0..=size.min(text.len())).rev().find(|i| text.is_char_boundary(*i));
        text.truncate(end.unwrap_or(0));
        text
    };
    texts.into_iter().map(whole).collect()
}

/// The slowest of the best of three runs over the slow texts, for every kind.
async fn worst(size: usize) -> Vec<(String, Duration)> {
    let route = whole_texts();
    let mut all = Vec::new();
    for part in &route.parts {
        let Some(grader) = part.grader.as_ref().filter(|_| !CALLS.contains(&part.name.as_str()))
        else {
            continue;
        };
        let mut worst = Duration::ZERO;
        for text in slow(size) {
            // Another text of the same letters, which has the least in common by place.
            let reversed: String = text.chars().rev().collect();
            for answer in ["7", text.as_str(), reversed.as_str()] {
                let metadata = ["answer", "keywords"].map(|k| (k.to_owned(), answer.to_owned()));
                let input = [ScoreInput {
                    messages: Arc::new(Vec::new()),
                    metadata: Arc::new(BTreeMap::from(metadata)),
                    text: text.clone(),
                    ids: (0..size as u32 / 4).map(|i| i % 7).collect(),
                }];
                let mut best = Duration::MAX;
                for _ in 0..3 {
                    let began = std::time::Instant::now();
                    grader.score(&input).await;
                    best = best.min(began.elapsed());
                }
                worst = worst.max(best);
            }
        }
        all.push((part.name.clone(), worst));
    }
    all
}

/// `cargo test --release --lib reward::catalogue -- --ignored --nocapture` prints the worst time of
/// each function on completions of 4 kB.
#[tokio::test]
#[ignore = "prints times; nothing to hold"]
async fn worst_times_on_4_kb() {
    for (kind, time) in worst(4096).await {
        println!("{kind:20} {:8.1} us", time.as_secs_f64() * 1e6);
    }
}

#[tokio::test]
async fn scoring_time_is_near_linear_in_the_text() {
    // Sixteen times the text; a quadratic function would take 256 times as long.
    let (short, long) = (worst(8192).await, worst(16 * 8192).await);
    for ((kind, short), (_, long)) in short.into_iter().zip(long) {
        let floor = Duration::from_micros(200);
        assert!(long < short.max(floor) * 80, "{kind}: {short:?} then {long:?}");
    }
}
