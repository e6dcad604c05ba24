//! The order in which a run trains on groups.

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

/// When a run ends.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum RunLength {
    /// After this many steps.
    Steps(u64),
    /// After this many passes over the groups.
    Epochs(f64),
}

/// The groups of every step, as indices into `sizes`, which has the number of samples of each group. A
/// step takes groups until it has `samples_per_step` samples; the last one of a run of epochs may have
/// fewer. Every pass has an order of its own, which depends on `seed`.
pub(super) fn steps(
    sizes: &[usize],
    length: RunLength,
    samples_per_step: usize,
    seed: u64,
) -> Vec<Vec<usize>> {
    let passes = (0_u64..).flat_map(|pass| {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        random.set_stream(pass);
        let mut order: Vec<usize> = (0..sizes.len()).collect();
        order.shuffle(&mut random);
        order
    });
    let (groups, most) = match length {
        RunLength::Steps(steps) => (usize::MAX, usize::try_from(steps).unwrap_or(usize::MAX)),
        RunLength::Epochs(epochs) => {
            ((epochs * sizes.len() as f64).round().max(1.0) as usize, usize::MAX)
        }
    };
    let mut all = Vec::new();
    let (mut step, mut samples) = (Vec::new(), 0);
    if sizes.is_empty() {
        return all;
    }
    for group in passes.take(groups) {
        if all.len() == most {
            return all;
        }
        step.push(group);
        samples += sizes[group];
        if samples >= samples_per_step {
            all.push(std::mem::take(&mut step));
            samples = 0;
        }
    }
    if !step.is_empty() {
        all.push(step);
    }
    all
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn an_epoch_takes_every_group_once() {
        let sizes = [4, 1, 4, 4, 2, 1];
        let all = steps(&sizes, RunLength::Epochs(1.0), 6, 3);
        let mut groups: Vec<usize> = all.iter().flatten().copied().collect();
        for step in &all[..all.len() - 1] {
            assert!(step.iter().map(|group| sizes[*group]).sum::<usize>() >= 6, "{all:?}");
        }
        groups.sort_unstable();
        assert_eq!(groups, [0, 1, 2, 3, 4, 5]);
        assert_eq!(all, steps(&sizes, RunLength::Epochs(1.0), 6, 3), "the order is repeatable");
        let half = steps(&sizes, RunLength::Epochs(0.5), 1, 3);
        assert_eq!(half.concat().len(), 3);
        assert_eq!(steps(&sizes, RunLength::Epochs(1e-9), 1, 3).len(), 1);
    }

    #[test]
    fn steps_repeat_the_groups_in_another_order() {
        let sizes = [1; 16];
        let all = steps(&sizes, RunLength::Steps(8), 4, 0);
        assert_eq!(all.len(), 8);
        let pass = |steps: &[Vec<usize>]| steps.concat();
        let (first, second) = (pass(&all[..4]), pass(&all[4..]));
        let set = |groups: &[usize]| groups.iter().copied().collect::<BTreeSet<_>>();
        assert_eq!((set(&first).len(), set(&second).len()), (16, 16));
        assert_ne!(first, second);
        assert!(steps(&[], RunLength::Steps(8), 4, 0).is_empty());
    }
}
