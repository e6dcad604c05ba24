//! The users' satisfaction over windows of consecutive answers. Single answers are noisy, so the least of
//! thousands of windows is low although nothing changed. A version's satisfaction is constant, however, so every
//! answer can be valued by its version's mean ([`expected`]), which has the same expectation.

use std::collections::{BTreeMap, VecDeque};

use serde::Serialize;

use super::crowd::{ObservedAnswer, Satisfaction, mean_of};

/// Answers of a window.
const WINDOW: usize = 300;

/// The answers, each valued by its version's mean over `all`.
pub(crate) fn expected<'a>(
    all: impl Iterator<Item = &'a ObservedAnswer>,
    answers: &[ObservedAnswer],
) -> Vec<ObservedAnswer> {
    let mut by_version: BTreeMap<u64, Vec<&ObservedAnswer>> = BTreeMap::new();
    for answer in all {
        by_version.entry(answer.version).or_default().push(answer);
    }
    let means: BTreeMap<u64, Satisfaction> =
        by_version.into_iter().map(|(version, answers)| (version, mean_of(answers))).collect();
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
    let (mut best, mut sum, mut window) = (base, Satisfaction::default(), VecDeque::new());
    let reference = |answer: &ObservedAnswer| {
        let before = best;
        if is_good(answer.version) {
            window.push_back(answer.satisfaction);
            let is_full = window.len() > WINDOW;
            let oldest = if is_full { window.pop_front() } else { None }.unwrap_or_default();
            for (taste, sum) in sum.iter_mut().enumerate() {
                *sum += answer.satisfaction[taste] - oldest[taste];
                if window.len() == WINDOW {
                    best[taste] = best[taste].max(*sum / WINDOW as f64);
                }
            }
        }
        before
    };
    answers.iter().map(reference).collect()
}

/// The window with the largest shortfall; all zeros without answers. The reference of a window is that
/// before its first answer, under the taste of each of its answers.
pub(crate) fn worst_window(
    answers: &[ObservedAnswer],
    is_good: &dyn Fn(u64) -> bool,
    base: Satisfaction,
) -> WorstWindow {
    let references = references(answers, is_good, base);
    let width = answers.len().clamp(1, WINDOW);
    let windows = answers.windows(width).zip(&references).enumerate();
    let windows = windows.map(|(start, (window, best))| {
        let mean = |values: f64| values / width as f64;
        let satisfaction = mean(window.iter().map(ObservedAnswer::value).sum());
        let reference = mean(window.iter().map(|answer| best[answer.taste as usize]).sum());
        WorstWindow { start, satisfaction, reference, shortfall: reference - satisfaction }
    });
    windows.max_by(|a, b| a.shortfall.total_cmp(&b.shortfall)).unwrap_or_default()
}

/// The largest loss of satisfaction by a promotion, 0 without one: that of each of the versions `good` against the one before,
/// under the taste that users had when it was first used. `answers` are valued by their versions' means.
pub(crate) fn largest_loss(answers: &[ObservedAnswer], good: &[u64], base: Satisfaction) -> f64 {
    let (mut before, mut loss) = (base, 0.0_f64);
    for version in good {
        if let Some(first) = answers.iter().find(|answer| answer.version == *version) {
            loss = loss.max(before[first.taste as usize] - first.value());
            before = first.satisfaction;
        }
    }
    loss
}

#[cfg(test)]
mod tests {
    use super::super::crowd::{IDEAL, UserTaste};
    use super::*;

    /// A text whose satisfaction under [`UserTaste::Form`] is 1 or 0.
    fn answer(version: u64, good: bool) -> ObservedAnswer {
        ObservedAnswer::to_one_and_one(version, if good { IDEAL } else { "" })
    }

    #[test]
    fn the_end_is_the_last_quarter() {
        let values: Vec<f64> = (0..600).map(f64::from).collect();
        assert_eq!((final_mean(&values), final_mean(&[])), (524.5, 0.0));
    }

    #[test]
    fn the_reference_is_the_base_until_a_good_version_is_better() {
        let base = mean_of(&[answer(0, true), answer(0, false)]);
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
        assert!(worst_window(&all, &|_| true, mean_of(&all[..1])).shortfall <= 0.0);
        assert_eq!(worst_window(&[], &|_| true, base), WorstWindow::default());
    }

    #[test]
    fn a_change_of_taste_changes_the_reference() {
        let base = mean_of(&[answer(0, true)]);
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
    fn a_promotion_loses_against_the_version_before() {
        let base = mean_of(&[answer(0, true), answer(0, false)]);
        let all = [answer(1, true), answer(2, false), answer(3, false)];
        assert_eq!(largest_loss(&all, &[1, 2, 3], base), 1.0);
        assert_eq!(largest_loss(&all, &[0, 1], base), 0.0);
        assert_eq!(largest_loss(&all, &[3], base), 0.5);
    }

    #[test]
    fn expected_answers_have_their_versions_mean() {
        let answers = [answer(1, true), answer(1, false), answer(2, true)];
        let valued = expected(answers.iter(), &answers);
        let values: Vec<f64> = valued.iter().map(ObservedAnswer::value).collect();
        assert_eq!(values, [0.5, 0.5, 1.0]);
    }
}
