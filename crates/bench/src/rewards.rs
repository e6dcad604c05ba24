//! `hone-bench rewards`: the worst time of each reward function, over texts that are likely to be slow
//! for some function. All times are processor time of the thread that computes the function, which other
//! processes affect little.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde_json::json;

use hone_core::threads::processor_time;
use hone_reward::kinds::random_text::{PIECES, random_text};
use hone_reward::routes::{RouteConfig, RouteList};
use hone_reward::text::Metric;
use hone_reward::{KindEntry, RewardFn, Routes, ScoreInput, catalogue};

use crate::measure::BenchOutcome;

/// Time limit of a function on a completion of [`BYTES`], in microseconds.
const LIMIT: f64 = 1000.0;

/// The completion size of the limit.
pub(crate) const BYTES: usize = 4096;

/// Measures every function on completions of `bytes`. The best of three runs reduces the effect of other
/// processes.
pub(crate) async fn run(bytes: usize) -> anyhow::Result<BenchOutcome> {
    let texts = slow(bytes);
    let (mut rows, mut over) = (Vec::new(), Vec::new());
    for (kind, grader) in functions()? {
        let microseconds = worst_time(&*grader, &texts).await.as_secs_f64() * 1e6;
        rows.push(json!({"kind": kind, "microseconds": microseconds}));
        // The limit applies to completions of the default size.
        if bytes <= BYTES && microseconds > LIMIT {
            over.push(kind);
        }
    }
    let failure = format!("over {LIMIT} microseconds: {}", over.join(", "));
    let failure = Some(failure).filter(|_| !over.is_empty());
    Ok(BenchOutcome { failure, ..BenchOutcome::of(rows.into()) })
}

/// Every function with its kind.
fn functions() -> anyhow::Result<Vec<(String, Arc<dyn RewardFn>)>> {
    let toml: RouteConfig = toml::from_str(&route())?;
    let routes = Routes::new(&RouteList(vec![toml]))?;
    let parts = routes.iter().flat_map(|route| &route.parts);
    let function =
        |(name, grader): (&String, &Option<_>)| Some((name.replace("__", " "), grader.clone()?));
    Ok(parts.map(|part| (&part.name, &part.grader)).filter_map(function).collect())
}

/// The time on the slowest text.
async fn worst_time(grader: &dyn RewardFn, texts: &[String]) -> Duration {
    let mut worst = Duration::ZERO;
    for input in texts.iter().flat_map(|text| inputs(text)) {
        let mut best = Duration::MAX;
        for _ in 0..3 {
            let before = processor_time();
            grader.score(std::slice::from_ref(&input)).await;
            best = best.min(processor_time() - before);
        }
        worst = worst.max(best);
    }
    worst
}

/// Every function as a part that compares whole completions, so that it reads all of them.
fn route() -> String {
    let mut toml = "name = \"all\"\n".to_owned();
    let mut part = |name: &str, kind: &str, parameters: &str| {
        toml += &format!("[[reward]]\nname = \"{name}\"\nkind = \"{kind}\"\n{parameters}\n");
    };
    for KindEntry { kind, example, parameters, calls_out, .. } in catalogue() {
        if calls_out || kind == "text_similarity" {
            continue;
        }
        let whole = if parameters.contains("extract = ") { "extract = \"\"" } else { "" };
        part(kind, kind, &format!("{example}\n{whole}"));
    }
    for (metric, _) in Metric::ALL {
        let parameters = format!("metric = \"{metric}\"\nextract = \"\"");
        part(&format!("text_similarity__{metric}"), "text_similarity", &parameters);
    }
    toml
}

/// A text with each of several answers.
fn inputs(text: &str) -> Vec<ScoreInput> {
    // The reversed text has the same characters, but few at the same positions.
    let reversed: String = text.chars().rev().collect();
    let input = |answer: &str| {
        let metadata = ["answer", "keywords"].map(|key| (key.to_owned(), answer.to_owned()));
        ScoreInput {
            messages: Arc::new(Vec::new()),
            metadata: Arc::new(BTreeMap::from(metadata)),
            text: text.to_owned(),
            ids: (0..text.len() as u32 / 4).map(|i| i % 7).collect(),
        }
    };
    ["7", text, reversed.as_str()].map(input).into()
}

/// At most the first `bytes` bytes, in whole characters.
fn prefix(text: &str, bytes: usize) -> &str {
    let end = (0..=bytes.min(text.len())).rev().find(|i| text.is_char_boundary(*i));
    &text[..end.unwrap_or(0)]
}

/// Texts of `size` bytes that are likely to be slow for some function.
fn slow(size: usize) -> Vec<String> {
    let mut rng = ChaCha8Rng::seed_from_u64(4);
    let mut texts: Vec<String> = PIECES.iter().map(|p| p.repeat(size / p.len())).collect();
    texts.push(format!("\\boxed{{{}}}", "(1+".repeat(size / 3)));
    texts.push("The answer is that of the first, and then some more. ".repeat(size / 53));
    texts.push("http://a".repeat(size / 8));
    texts.push("a b ".repeat(size / 4));
    texts.push((0..size / 4).map(|i| format!("w{i} ")).collect());
    texts.extend((0..20).map(|_| random_text(&mut rng, size / 4)));
    texts.into_iter().map(|text| prefix(&text, size).to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn every_function_is_measured() {
        let report = run(64).await.unwrap().report;
        let inside = catalogue().iter().filter(|entry| !entry.calls_out).count();
        assert_eq!(report.as_array().unwrap().len(), inside - 2 + Metric::ALL.len());
    }

    #[tokio::test]
    async fn long_texts_are_scored_in_time() {
        // Sixteen times the text; a quadratic function would take 256 times as long.
        let (short_texts, long_texts) = (slow(8192), slow(16 * 8192));
        let floor = Duration::from_micros(200);
        for (kind, grader) in functions().unwrap() {
            let short = worst_time(&*grader, &short_texts).await;
            let long = worst_time(&*grader, &long_texts).await;
            assert!(long < short.max(floor) * 80, "{kind}: {short:?} {long:?}");
        }
    }

    #[test]
    fn a_prefix_has_whole_characters() {
        assert_eq!((prefix("aé", 2), prefix("aé", 3), prefix("aé", 9)), ("a", "aé", "aé"));
    }
}
