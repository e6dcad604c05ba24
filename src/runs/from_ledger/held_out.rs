//! Which prompts a run holds out.

use std::collections::BTreeSet;

use anyhow::ensure;

use hone_core::digest::Digest;

use super::read::UsableGroup;

/// 2^64, exactly.
const KEYS: f64 = 18_446_744_073_709_551_616.0;

/// The records of a run.
pub(super) struct Split {
    pub(super) train: Vec<UsableGroup>,
    pub(super) held_out: Vec<UsableGroup>,
}

/// Whether a prompt is held out, by its digest and the share to hold out. It does not depend on the other
/// prompts, so a later run on a longer ledger holds out the same ones.
fn is_held_out(prompt: [u8; 16], share: f64) -> bool {
    let key = Digest::new().field("hold out of recorded prompts").bytes(prompt).prefix();
    (u64::from_le_bytes(key) as f64) < share * KEYS
}

/// Holds out a share of the prompts, and those that only the exams of the daemon used. All records of a
/// prompt are on the same side.
///
/// # Errors
/// If one side would be empty.
pub(super) fn split(records: Vec<UsableGroup>, share: f64) -> anyhow::Result<Split> {
    let prompts = records.iter().map(|r| r.prompt).collect::<BTreeSet<_>>().len();
    let (held_out, train): (Vec<_>, Vec<_>) = records
        .into_iter()
        .partition(|record| record.reserved || is_held_out(record.prompt, share));
    let plural = if prompts == 1 { "" } else { "s" };
    ensure!(
        !held_out.is_empty(),
        "--holdout is {share}: of {prompts} recorded prompt{plural} it holds out none; use a larger \
         share"
    );
    ensure!(
        !train.is_empty(),
        "--holdout is {share}: of {prompts} recorded prompt{plural} it leaves none to train on; use a \
         smaller share"
    );
    Ok(Split { train, held_out })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_side_depends_on_the_prompt_and_the_share_alone() {
        let prompt = |n: u64| Digest::new().bytes(n.to_le_bytes()).prefix::<16>();
        let held = |share: f64| (0..4000).filter(|n| is_held_out(prompt(*n), share)).count();
        assert_eq!((held(0.0), held(1.0)), (0, 4000));
        assert!((320..480).contains(&held(0.1)), "{}", held(0.1));
        // A larger share holds out the same prompts and more.
        assert!((0..4000).all(|n| !is_held_out(prompt(n), 0.1) || is_held_out(prompt(n), 0.3)));
    }
}
