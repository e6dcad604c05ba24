//! Which ancestors of the served version keep their files.

use hone_core::types::PolicyVersion;

/// Whether an ancestor keeps its files although newer versions have taken its place.
///
/// `chain` is the served version, its parent, and so on to the base. The version at depth `d` below
/// the base is kept while it is less than twice the largest power of two that divides `d` away. So the
/// distances of the kept ancestors grow exponentially: of `n` versions, at most `log2(n) + 1` are kept.
/// The distance of a version only grows until a rollback, so a version that was deleted would not be
/// kept later either.
pub(super) fn is_kept(chain: &[PolicyVersion], version: PolicyVersion) -> bool {
    let Some(distance) = chain.iter().position(|ancestor| *ancestor == version) else {
        return false;
    };
    let depth = chain.len() - 1 - distance;
    // The base, at depth 0, has no files.
    depth > 0 && distance < 2 * (1 << depth.trailing_zeros())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kept versions of a chain of `n` versions after the base.
    fn kept(n: u64) -> Vec<u64> {
        let chain: Vec<PolicyVersion> = (0..=n).rev().map(PolicyVersion).collect();
        (0..=n).filter(|version| is_kept(&chain, PolicyVersion(*version))).collect()
    }

    #[test]
    fn ancestors_are_kept_at_growing_distances() {
        assert_eq!(kept(1), [1]);
        assert_eq!(kept(10), [4, 8, 9, 10]);
        assert_eq!(kept(100), [64, 80, 88, 96, 98, 99, 100]);
        for n in 1..2_000 {
            let versions = kept(n);
            assert!(versions.len() <= n.ilog2() as usize + 1, "{n}: {versions:?}");
            // A version as far back as any given distance, up to a factor of two.
            for distance in (0..).map(|power| 1 << power).take_while(|distance| 2 * distance < n) {
                let near = distance / 2..=2 * distance;
                assert!(versions.iter().any(|v| near.contains(&(n - v))), "{n}: {distance}");
            }
        }
    }

    #[test]
    fn a_deleted_version_is_never_needed_again() {
        let mut gone: Vec<u64> = Vec::new();
        for n in 1..500 {
            let versions = kept(n);
            assert!(gone.iter().all(|version| !versions.contains(version)), "{n}");
            gone = (1..=n).filter(|version| !versions.contains(version)).collect();
        }
    }

    #[test]
    fn versions_of_another_branch_are_not_kept() {
        let chain = [9, 8, 3, 0].map(PolicyVersion);
        assert!(is_kept(&chain, PolicyVersion(8)));
        assert!(!is_kept(&chain, PolicyVersion(4)));
    }
}
