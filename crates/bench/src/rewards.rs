//! `hone-bench rewards`: the worst time of each reward function, over texts that are likely to be slow
//! for some function, and how fast that time grows with the text. All times are processor time of the thread
//! that computes the function, which other processes affect little.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::ensure;
use clap::Args;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde::Serialize;

use hone_core::threads::processor_time;
use hone_reward::kinds::random_text::{PIECES, random_text};
use hone_reward::routes::{RouteConfig, RouteList};
use hone_reward::text::Metric;
use hone_reward::{KindEntry, RewardFn, Routes, ScoreInput, catalogue};

/// Time limit of a function on a completion of [`BYTES`], in microseconds.
const LIMIT: f64 = 1000.0;

/// The completion size of the limit.
const BYTES: usize = 4096;

/// Largest exponent p of a time that grows as `size^p`. It is above that of `n log n` with its
/// noise, and below 2.
const MAX_GROWTH: f64 = 1.5;

/// Sizes at which growth is measured, in multiples of the completion's. They are greater than it,
/// because some functions take quadratic time up to a number of characters, and ignore the rest.
const SIZES: [usize; 4] = [4, 8, 16, 32];

/// Least time on the largest size from which growth is measured. Shorter times are mostly overhead.
const MEASURABLE: Duration = Duration::from_micros(500);

/// Measurements of growth that must all exceed [`MAX_GROWTH`], because other processes share the caches and
/// can make a single one of them too large.
const ATTEMPTS: usize = 10;

/// `hone-bench rewards`.
#[derive(Debug, Args)]
pub struct RewardsOptions {
    /// Size of each completion
    #[arg(long, value_name = "BYTES", default_value_t = BYTES)]
    pub bytes: usize,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

/// One function's worst time, and its growth.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Worst {
    /// The kind of reward; `text_similarity` with its metric.
    pub kind: String,
    /// Microseconds on the slowest text, the best of three runs, which reduces the effect of other
    /// processes.
    pub microseconds: f64,
    /// Exponent p of the text whose time grows fastest, as `size^p`, from 4 to 32 times the size of
    /// the completions. `None` if every text takes less than 0.5 ms at the largest size.
    pub growth_exponent: Option<f64>,
}

impl Worst {
    /// Whether the time grows faster than [`MAX_GROWTH`] allows.
    fn grows_too_fast(&self) -> bool {
        self.growth_exponent.is_some_and(|exponent| exponent > MAX_GROWTH)
    }
}

/// Measures every function on completions of `bytes`.
pub async fn run(bytes: usize) -> anyhow::Result<Vec<Worst>> {
    let (texts, long_texts) = (slow(bytes), slow(bytes * SIZES[3]));
    let mut all = Vec::new();
    for (kind, grader) in functions()? {
        let microseconds = worst_time(&*grader, &texts).await.as_secs_f64() * 1e6;
        let mut growth_exponent = None;
        for text in &long_texts {
            let exponent = growth(&*grader, &SIZES.map(|size| prefix(text, size * bytes))).await;
            growth_exponent = [growth_exponent, exponent].into_iter().flatten().reduce(f64::max);
        }
        all.push(Worst { kind, microseconds, growth_exponent });
    }
    Ok(all)
}

/// Refuses functions that are too slow on completions of `bytes`, or whose time grows too fast.
///
/// # Errors
/// Names the functions.
pub fn check(all: &[Worst], bytes: usize) -> anyhow::Result<()> {
    let names = |holds: &dyn Fn(&Worst) -> bool| {
        let kinds: Vec<&str> = all.iter().filter(|w| holds(w)).map(|w| w.kind.as_str()).collect();
        kinds.join(", ")
    };
    // The limit applies to completions of the default size.
    let slow = names(&|w| bytes <= BYTES && w.microseconds > LIMIT);
    ensure!(slow.is_empty(), "over {LIMIT} microseconds: {slow}");
    let growing = names(&Worst::grows_too_fast);
    ensure!(growing.is_empty(), "the time grows faster than size^{MAX_GROWTH}: {growing}");
    Ok(())
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

async fn worst_time(grader: &dyn RewardFn, texts: &[String]) -> Duration {
    let mut worst = Duration::ZERO;
    for input in texts.iter().flat_map(|text| inputs(text)) {
        worst = worst.max(time(grader, &input, 3).await);
    }
    worst
}

/// The best time of some runs.
async fn time(grader: &dyn RewardFn, input: &ScoreInput, runs: usize) -> Duration {
    let input = std::slice::from_ref(input);
    let mut best = Duration::MAX;
    for _ in 0..runs {
        let before = processor_time();
        grader.score(input).await;
        best = best.min(processor_time() - before);
    }
    best
}

/// The greatest exponent over the answers of a text, from its prefixes. `None` if it cannot be measured.
async fn growth(grader: &dyn RewardFn, prefixes: &[&str; 4]) -> Option<f64> {
    let mut greatest = None;
    for answer in 0..inputs("").len() {
        let inputs = prefixes.map(|text| inputs(text).swap_remove(answer));
        if time(grader, &inputs[3], 1).await < MEASURABLE {
            continue;
        }
        let (mut times, mut exponent) = ([Duration::MAX; 4], f64::INFINITY);
        for _ in 0..ATTEMPTS {
            for (best, input) in times.iter_mut().zip(&inputs) {
                *best = (*best).min(time(grader, input, 2).await);
            }
            exponent = exponent.min(fit(SIZES.map(|size| size as f64).into_iter().zip(times)));
            if exponent <= MAX_GROWTH {
                break;
            }
        }
        if times[3] >= MEASURABLE {
            greatest = Some(greatest.map_or(exponent, |greatest: f64| greatest.max(exponent)));
        }
    }
    greatest
}

/// The exponent p of `time = c size^p`, by least squares of the logarithms.
fn fit(points: impl Iterator<Item = (f64, Duration)>) -> f64 {
    let points: Vec<_> = points.map(|(size, time)| (size.ln(), time.as_secs_f64().ln())).collect();
    let mean =
        |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / points.len() as f64;
    let (x_mean, y_mean) = (mean(|p| p.0), mean(|p| p.1));
    let covariance: f64 = points.iter().map(|(x, y)| (x - x_mean) * (y - y_mean)).sum();
    covariance / points.iter().map(|(x, _)| (x - x_mean).powi(2)).sum::<f64>()
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
    async fn scoring_time_is_near_linear_in_the_text() {
        let all = run(BYTES).await.unwrap();
        let inside = catalogue().iter().filter(|entry| !entry.calls_out).count();
        assert_eq!(all.len(), inside - 2 + Metric::ALL.len());
        for worst in &all {
            assert!(!worst.grows_too_fast(), "{worst:?}");
        }
        // The others take less than `MEASURABLE` on the longest texts. How many do depends on the machine.
        assert!(all.iter().any(|worst| worst.growth_exponent.is_some()), "{all:?}");
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

    /// Times of a function that takes `microseconds(size)`.
    fn exponent(microseconds: impl Fn(f64) -> f64) -> f64 {
        let time = |size: usize| Duration::from_secs_f64(microseconds(size as f64 * 1024.0) / 1e6);
        fit(SIZES.into_iter().map(|size| (size as f64, time(size))))
    }

    #[test]
    fn the_exponent_of_growth_separates_quadratic_from_linear_times() {
        assert!((exponent(|n| 0.01 * n) - 1.0).abs() < 1e-3);
        assert!((exponent(|n| 1e-5 * n.powi(2)) - 2.0).abs() < 1e-3);
        assert!((exponent(|n| 1e-3 * n.powf(1.5)) - 1.5).abs() < 1e-3);
        let n_log_n = exponent(|n| 0.001 * n * n.ln());
        assert!(n_log_n > 1.0 && n_log_n < 1.2, "{n_log_n}");
        // With overhead, and with a linear part.
        assert!(exponent(|n| 30.0 + 0.01 * n) < 1.0);
        assert!(exponent(|n| 0.005 * n + 1e-6 * n.powi(2)) > MAX_GROWTH);
        // A time that is doubled by another process at one size.
        for (disturbed, expected) in [(4.0, 0.7), (8.0, 0.9), (16.0, 1.1), (32.0, 1.3)] {
            let size = 1024.0 * disturbed;
            let found = exponent(|n| if (n - size).abs() < 1.0 { 0.02 * n } else { 0.01 * n });
            assert!((found - expected).abs() < 1e-3, "{found}");
        }
        let worst =
            |growth_exponent| Worst { kind: "a".into(), microseconds: 1.0, growth_exponent };
        assert!(worst(Some(1.51)).grows_too_fast());
        assert!(!worst(Some(1.49)).grows_too_fast() && !worst(None).grows_too_fast());
    }

    #[test]
    fn a_prefix_has_whole_characters() {
        assert_eq!((prefix("aé", 2), prefix("aé", 3), prefix("aé", 9)), ("a", "aé", "aé"));
    }
}
