//! All values of a batch by route and part.

use std::collections::BTreeMap;

use super::moments::Moments;
use super::rewards::GroupRewards;

/// One value with its place in the batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct BatchValue {
    /// Index of the group.
    pub(super) group: usize,
    /// Index of the part within the group.
    pub(super) part: usize,
    /// Index of the member within the group.
    pub(super) member: usize,
    pub(super) value: f64,
    /// Weight in running baselines.
    pub(super) cap_weight: f64,
    /// The conversation that the member is a turn of.
    pub(super) conversation: Option<[u8; 16]>,
}

impl BatchValue {
    pub(super) fn moments(self) -> Moments {
        Moments::weighted(self.value, self.cap_weight)
    }
}

/// All values of a batch by `(route, part)`.
pub(super) struct BatchValues(pub(super) BTreeMap<(String, String), Vec<BatchValue>>);

impl BatchValues {
    pub(super) fn new(groups: &[GroupRewards]) -> Self {
        let mut parts: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for (group_index, group) in groups.iter().enumerate() {
            for (part_index, part) in group.parts.iter().enumerate() {
                for member in 0..group.members {
                    let Some(value) = part.value(member) else { continue };
                    let key = (group.route.clone(), part.name.clone());
                    parts.entry(key).or_default().push(BatchValue {
                        group: group_index,
                        part: part_index,
                        member,
                        value,
                        cap_weight: part.cap_weight(member),
                        conversation: group.conversations.get(member).copied().flatten(),
                    });
                }
            }
        }
        Self(parts)
    }

    /// The values of a part on a route.
    pub(super) fn part(&self, route: &str, part: &str) -> &[BatchValue] {
        self.0.get(&(route.to_owned(), part.to_owned())).map_or(&[], Vec::as_slice)
    }
}
