//! The users' satisfaction over windows of consecutive answers.
//!
//! A user's satisfaction with one answer is noisy: with a mean of 0.4, the mean of 300 answers has a
//! standard deviation of about 0.025, so the least of thousands of windows is far below 0.4 although
//! nothing changed. A version's satisfaction is constant, however. So every answer can be valued by its
//! version's mean over all of its answers ([`expected`]), in the run and in an exam after it, which has
//! the same expectation and less noise. The value of a version that was withdrawn, which takes no exam, is
//! as noisy as its few answers.

use std::collections::{BTreeMap, VecDeque};

use serde::Serialize;

use super::crowd::{ObservedAnswer, Satisfaction, UserTaste};

/// Answers of a window.
pub(crate) const WINDOW: usize = 300;

/// The answers, each valued by its version's mean over `all`.
pub(crate) fn expected<'a>(
    all: impl Iterator<Item = &'a ObservedAnswer>,
    answers: &[ObservedAnswer],
) -> Vec<ObservedAnswer> {
    let mut by_version: BTreeMap<u64, Vec<Satisfaction>> = BTreeMap::new();
    for answer in all {
        by_version.entry(answer.version).or_default().push(answer.satisfaction);
    }
    let means: BTreeMap<u64, Satisfaction> =
        by_version.into_iter().map(|(v, values)| (v, Satisfaction::mean(values))).collect();
    let value = |answer: &ObservedAnswer| ObservedAnswer {
        satisfaction: means.get(&answer.version).copied().unwrap_or(answer.satisfaction),
        ..*answer
    };
    answers.iter().map(value).collect()
}

/// The window that is furthest below what users could have had.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct WorstWindow {
    /// Number of its first answer.
    pub start: usize,
    /// Mean satisfaction in the window.
    pub satisfaction: f64,
    /// The better of the base's satisfaction and that with the last good version.
    pub reference: f64,
    /// `reference - satisfaction`.
    pub shortfall: f64,
}

/// The means of all windows of [`WINDOW`] consecutive values, or of all values if there are fewer.
pub(crate) fn moving_mean(values: &[f64]) -> Vec<f64> {
    if values.is_empty() {
        return Vec::new();
    }
    let width = values.len().min(WINDOW);
    let mut sum: f64 = values[..width].iter().sum();
    let mut means = vec![sum / width as f64];
    for end in width..values.len() {
        sum += values[end] - values[end - width];
        means.push(sum / width as f64);
    }
    means
}

/// The mean of the last quarter of the values. Satisfaction differs from version to version also where
/// learning has ended, so the last version alone would be a matter of chance.
pub(crate) fn final_mean(values: &[f64]) -> f64 {
    let last = &values[values.len() / 4 * 3..];
    last.iter().sum::<f64>() / last.len().max(1) as f64
}

/// The reference before each answer: the better of the base and, under each taste, the best mean of
/// [`WINDOW`] consecutive answers of versions that `is_good`.
fn references(
    answers: &[ObservedAnswer],
    is_good: &dyn Fn(u64) -> bool,
    base: Satisfaction,
) -> Vec<Satisfaction> {
    let (mut best, mut sum) = (base, Satisfaction::default());
    let mut window: VecDeque<Satisfaction> = VecDeque::new();
    let mut all = Vec::with_capacity(answers.len());
    for answer in answers {
        all.push(best);
        if !is_good(answer.version) {
            continue;
        }
        window.push_back(answer.satisfaction);
        sum = sum.zip(answer.satisfaction, |a, b| a + b);
        if window.len() > WINDOW
            && let Some(oldest) = window.pop_front()
        {
            sum = sum.zip(oldest, |a, b| a - b);
        }
        if window.len() == WINDOW {
            best = best.zip(sum.scaled(1.0 / WINDOW as f64), f64::max);
        }
    }
    all
}

/// The window with the largest shortfall; all zeros without answers. The reference of a window is that
/// before its first answer, under the taste of each of its answers.
pub(crate) fn worst_window(
    answers: &[ObservedAnswer],
    is_good: &dyn Fn(u64) -> bool,
    base: Satisfaction,
) -> WorstWindow {
    let width = answers.len().min(WINDOW);
    if width == 0 {
        return WorstWindow::default();
    }
    let references = references(answers, is_good, base);
    let values: Vec<f64> = answers.iter().map(ObservedAnswer::value).collect();
    let changed: Vec<f64> = answers
        .iter()
        .map(|answer| f64::from(u8::from(answer.taste == UserTaste::Brevity)))
        .collect();
    let windows = moving_mean(&values).into_iter().zip(moving_mean(&changed)).enumerate();
    let windows = windows.map(|(start, (satisfaction, changed))| {
        let [form, brevity] =
            [UserTaste::Form, UserTaste::Brevity].map(|taste| references[start].under(taste));
        let reference = (1.0 - changed) * form + changed * brevity;
        WorstWindow { start, satisfaction, reference, shortfall: reference - satisfaction }
    });
    windows.max_by(|a, b| a.shortfall.total_cmp(&b.shortfall)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::super::crowd::IDEAL;
    use super::*;

    /// A text whose satisfaction under [`UserTaste::Form`] is 1 or 0.
    fn answer(version: u64, good: bool) -> ObservedAnswer {
        ObservedAnswer::to_one_and_one(version, if good { IDEAL } else { "" })
    }

    fn mean(answers: &[ObservedAnswer]) -> Satisfaction {
        Satisfaction::mean(answers.iter().map(|answer| answer.satisfaction))
    }

    #[test]
    fn moving_means_have_one_value_per_window() {
        let values: Vec<f64> = (0..600).map(f64::from).collect();
        let means = moving_mean(&values);
        assert_eq!((means.len(), means[0], means[300]), (301, 149.5, 449.5));
        assert_eq!(moving_mean(&[1.0, 2.0]), [1.5]);
        assert!(moving_mean(&[]).is_empty());
        assert_eq!(final_mean(&values), 524.5);
        assert_eq!(final_mean(&[]), 0.0);
    }

    #[test]
    fn the_reference_is_the_base_until_a_good_version_is_better() {
        let base = mean(&[answer(0, true), answer(0, false)]);
        // 300 answers of version 1 are all good; then version 2 answers nothing for 150 requests.
        let first = vec![answer(1, true); 300];
        let then = [vec![answer(2, false); 150], vec![answer(1, true); 300]].concat();
        let all = [first, then].concat();
        let worst = worst_window(&all, &|version| version == 1, base);
        assert_eq!((worst.satisfaction, worst.reference, worst.shortfall), (0.5, 1.0, 0.5));
        assert_eq!(worst.start, 300);
        // If version 1 was not promoted, only the base counts.
        let worst = worst_window(&all, &|_| false, base);
        assert_eq!((worst.reference, worst.shortfall), (0.5, 0.0));
        // A window is not compared with later versions.
        let all = [vec![answer(0, false); 400], vec![answer(1, true); 400]].concat();
        assert!(worst_window(&all, &|_| true, mean(&all[..1])).shortfall <= 0.0);
        assert_eq!(worst_window(&[], &|_| true, base), WorstWindow::default());
    }

    #[test]
    fn a_change_of_taste_changes_the_reference() {
        let base = mean(&[answer(0, true)]);
        let long = |taste| ObservedAnswer { taste, ..answer(0, true) };
        let all: Vec<_> = [UserTaste::Form, UserTaste::Brevity]
            .into_iter()
            .flat_map(|taste| vec![long(taste); 400])
            .collect();
        // The answers please less than before, but as much as those of any good version.
        let worst = worst_window(&all, &|_| true, base);
        assert!(worst.shortfall.abs() < 1e-9, "{worst:?}");
        assert!(final_mean(&all.iter().map(ObservedAnswer::value).collect::<Vec<_>>()) < 0.7);
    }

    #[test]
    fn expected_answers_have_their_versions_mean() {
        let answers = [answer(1, true), answer(1, false), answer(2, true)];
        let valued = expected(answers.iter(), &answers);
        let values: Vec<f64> = valued.iter().map(ObservedAnswer::value).collect();
        assert_eq!(values, [0.5, 0.5, 1.0]);
    }
}
