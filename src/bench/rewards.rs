//! `hone bench rewards`: the worst time of each reward function, over texts that are likely to be slow
//! for some function.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde::Serialize;

use hone_reward::kinds::random_text::{PIECES, random_text};
use hone_reward::routes::{RouteConfig, RouteList};
use hone_reward::text::Metric;
use hone_reward::{KindEntry, Routes, ScoreInput, catalogue};

/// Time limit of a function on a completion of [`BYTES`].
pub const LIMIT: Duration = Duration::from_millis(1);

/// The completion size of the limit.
pub const BYTES: usize = 4096;

/// One function's worst time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Worst {
    /// The kind of reward; `text_similarity` with its metric.
    pub kind: String,
    /// Microseconds on the slowest text, the best of three runs, which reduces the effect of other
    /// processes.
    pub microseconds: f64,
}

/// Measures every function on completions of `bytes`.
///
/// # Errors
/// If a function cannot be built.
pub async fn run(bytes: usize) -> anyhow::Result<Vec<Worst>> {
    let toml: RouteConfig = toml::from_str(&route())?;
    let routes = Routes::new(&RouteList(vec![toml]))?;
    let texts = slow(bytes);
    let mut all = Vec::new();
    for part in routes.iter().flat_map(|route| &route.parts) {
        let Some(grader) = part.grader.as_ref() else { continue };
        let mut worst = Duration::ZERO;
        for text in &texts {
            // The reversed text has the same characters, but few at the same positions.
            let reversed: String = text.chars().rev().collect();
            for answer in ["7", text.as_str(), reversed.as_str()] {
                let input = [input(text, answer)];
                let mut best = Duration::MAX;
                for _ in 0..3 {
                    let began = Instant::now();
                    grader.score(&input).await;
                    best = best.min(began.elapsed());
                }
                worst = worst.max(best);
            }
        }
        let kind = part.name.replace("__", " ");
        all.push(Worst { kind, microseconds: worst.as_secs_f64() * 1e6 });
    }
    Ok(all)
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

fn input(text: &str, answer: &str) -> ScoreInput {
    let metadata = ["answer", "keywords"].map(|key| (key.to_owned(), answer.to_owned()));
    ScoreInput {
        messages: Arc::new(Vec::new()),
        metadata: Arc::new(BTreeMap::from(metadata)),
        text: text.to_owned(),
        ids: (0..text.len() as u32 / 4).map(|i| i % 7).collect(),
    }
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
    let whole = |mut text: String| {
        let end = (0..=size.min(text.len())).rev().find(|i| text.is_char_boundary(*i));
        text.truncate(end.unwrap_or(0));
        text
    };
    texts.into_iter().map(whole).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn scoring_time_is_near_linear_in_the_text() {
        // Sixteen times the text; a quadratic function would take 256 times as long.
        let (short, long) = (run(8192).await.unwrap(), run(16 * 8192).await.unwrap());
        let inside = catalogue().iter().filter(|entry| !entry.calls_out).count();
        assert_eq!(short.len(), inside - 2 + Metric::ALL.len());
        for (short, long) in short.into_iter().zip(long) {
            let floor = 200.0;
            assert!(long.microseconds < short.microseconds.max(floor) * 80.0, "{short:?} {long:?}");
        }
    }
}
