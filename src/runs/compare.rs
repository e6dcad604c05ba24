//! Two evaluations of the same prompts, side by side.

use std::fmt::Write as _;

use super::evaluate::Evaluation;
use super::report::{Comparison, SamplePair};
use super::stats;
use super::stats::Estimate;
use super::table::ScoredSample;

/// The total, then every part: before, after, and the paired difference.
pub fn comparisons(before: &Evaluation, after: &Evaluation, seed: u64) -> Vec<Comparison> {
    let mut all = vec![one("total", before, after, seed, |sample| sample.total)];
    for name in after.parts() {
        let value = |sample: &ScoredSample| sample.parts.get(&name).copied().flatten();
        all.push(one(&name, before, after, seed, value));
    }
    all
}

fn one(
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

/// The first completions of the first prompts.
pub fn samples(before: &Evaluation, after: &Evaluation, most: usize) -> Vec<SamplePair> {
    let said = |sample: Option<&ScoredSample>| sample.map(|s| (s.completion.clone(), s.total));
    let pairs = before.answers.iter().zip(&after.answers);
    pairs
        .filter_map(|(before, after)| {
            let (before, after) = (before.first(), after.first());
            let prompt = after.or(before)?.prompt.clone();
            Some(SamplePair { prompt, before: said(before), after: said(after) })
        })
        .take(most)
        .collect()
}

/// The comparisons as a table for the terminal.
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
    // Writing to a string cannot fail.
    let _ =
        writeln!(text, "  {:width$}  {:>24}  {:>24}  {:>26}", "", names[0], names[1], "difference");
    for c in comparisons {
        let difference = match c.difference {
            Some(d) => {
                let sign = if d.mean >= 0.0 { "+" } else { "" };
                format!("{sign}{}", shown(Some(d)))
            }
            None => shown(None),
        };
        let _ = writeln!(
            text,
            "  {:width$}  {:>24}  {:>24}  {:>26}",
            c.name,
            shown(c.before),
            shown(c.after),
            difference
        );
    }
    text
}
