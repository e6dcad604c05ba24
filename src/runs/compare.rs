//! Comparison of two evaluations of the same prompts.

use std::fmt::Write as _;

use super::eval_set::Evaluation;
use super::report::{Comparison, SamplePair};
use super::stats::{self, Estimate};
use super::table::ScoredSample;

/// The total and every part before and after, with the paired difference.
pub fn comparisons(before: &Evaluation, after: &Evaluation, seed: u64) -> Vec<Comparison> {
    let mut all = vec![comparison("total", before, after, seed, |sample| sample.total)];
    for name in after.parts() {
        let value = |sample: &ScoredSample| sample.parts.get(&name).copied().flatten();
        all.push(comparison(&name, before, after, seed, value));
    }
    all
}

fn comparison(
    name: &str,
    before: &Evaluation,
    after: &Evaluation,
    seed: u64,
    value: impl Fn(&ScoredSample) -> Option<f64>,
) -> Comparison {
    let (first, second) = (before.means(&value), after.means(&value));
    let known = |means: &[Option<f64>]| means.iter().copied().flatten().collect::<Vec<f64>>();
    let pairs: Vec<(f64, f64)> =
        first.iter().zip(&second).filter_map(|(a, b)| Some(((*a)?, (*b)?))).collect();
    Comparison {
        name: name.to_owned(),
        before: stats::estimate(&known(&first), seed),
        after: stats::estimate(&known(&second), seed),
        difference: stats::paired_difference(&pairs, seed),
    }
}

/// The first completion of each of the first `most` prompts.
pub fn samples(before: &Evaluation, after: &Evaluation, most: usize) -> Vec<SamplePair> {
    let completion =
        |sample: Option<&ScoredSample>| sample.map(|s| (s.completion.clone(), s.total));
    let pairs = before.answers.iter().zip(&after.answers);
    pairs
        .filter_map(|(before, after)| {
            let (before, after) = (before.first(), after.first());
            let prompt = after.or(before)?.prompt.clone();
            Some(SamplePair { prompt, before: completion(before), after: completion(after) })
        })
        .take(most)
        .collect()
}

/// The comparisons as a table; `names` are the titles of the two evaluations.
pub fn table(comparisons: &[Comparison], names: [&str; 2]) -> String {
    let shown = |estimate: Option<Estimate>| match estimate {
        None => "–".to_owned(),
        Some(Estimate { mean, interval: None, .. }) => format!("{mean:.3}"),
        Some(Estimate { mean, interval: Some(i), .. }) => {
            format!("{mean:.3} ({:.3} to {:.3})", i.low, i.high)
        }
    };
    let width = comparisons.iter().map(|c| c.name.chars().count()).max().unwrap_or(0).max(8);
    let mut text = String::new();
    let mut row = |name: &str, before: &str, after: &str, difference: &str| {
        let _ = writeln!(text, "  {name:width$}  {before:>24}  {after:>24}  {difference:>26}");
    };
    row("", names[0], names[1], "difference");
    for c in comparisons {
        let sign = if c.difference.is_some_and(|d| d.mean >= 0.0) { "+" } else { "" };
        let difference = format!("{sign}{}", shown(c.difference));
        row(&c.name, &shown(c.before), &shown(c.after), &difference);
    }
    text
}
