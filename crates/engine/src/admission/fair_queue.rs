//! A queue that serves its owners in turn, so that one of them cannot delay the others by many requests.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use crate::error::EngineError;

/// Identifies the API key that a request is for. `None` are callers without a key.
pub type Owner = Option<Arc<str>>;

/// Waiting items by owner. Each owner's items are served in their order.
pub struct FairQueue<T> {
    /// The owners that wait, the one that was served least recently first. No lane is empty.
    lanes: VecDeque<QueueLane<T>>,
}

/// Limits of the queue of live requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueLimits {
    /// Live requests that may wait beyond those that are about to be served.
    pub places: usize,
    /// Longest wait of a live request; `None` is without end.
    pub timeout: Option<Duration>,
}

/// What decides whether a further live request may wait.
#[derive(Clone, Copy, Debug)]
pub struct QueueCapacity {
    /// Sequences that can run at once.
    pub slots: usize,
    /// Slots that live requests can have now or by preemption.
    pub obtainable: usize,
    /// Requests that may wait beyond those.
    pub places: usize,
    /// The time after which a refused request should be sent again.
    pub retry_after: Duration,
}

impl QueueCapacity {
    /// The largest number of requests of `owner` that can run and wait at once.
    fn most(&self, owner: &Owner) -> usize {
        let own = if owner.is_some() { self.places.div_ceil(2) } else { self.places };
        self.slots.saturating_add(own)
    }
}

struct QueueLane<T> {
    owner: Owner,
    items: VecDeque<T>,
}

impl<T> Default for FairQueue<T> {
    fn default() -> Self {
        Self { lanes: VecDeque::new() }
    }
}

impl<T> FairQueue<T> {
    /// Number of waiting items.
    pub fn len(&self) -> usize {
        self.lanes.iter().map(|lane| lane.items.len()).sum()
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.lanes.is_empty()
    }

    /// Number of waiting items of one owner.
    pub fn len_of(&self, owner: &Owner) -> usize {
        self.lanes.iter().find(|lane| lane.owner == *owner).map_or(0, |lane| lane.items.len())
    }

    /// Every waiting item.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.lanes.iter().flat_map(|lane| &lane.items)
    }

    /// Adds an item after the others of its owner.
    pub fn push_back(&mut self, owner: &Owner, item: T) {
        match self.lanes.iter_mut().find(|lane| lane.owner == *owner) {
            Some(lane) => lane.items.push_back(item),
            None => {
                let (owner, items) = (owner.clone(), VecDeque::from([item]));
                self.lanes.push_back(QueueLane { owner, items });
            }
        }
    }

    /// Puts back the item that [`Self::pop_fairest`] returned.
    pub fn push_front(&mut self, owner: &Owner, item: T) {
        let lane = self.lanes.iter().position(|lane| lane.owner == *owner);
        let lane = lane.and_then(|at| self.lanes.remove(at));
        let mut lane =
            lane.unwrap_or_else(|| QueueLane { owner: owner.clone(), items: VecDeque::new() });
        lane.items.push_front(item);
        self.lanes.push_front(lane);
    }

    /// Removes the oldest item of the owner for which `running` is least; among those with equal numbers,
    /// of the owner that was served least recently.
    pub fn pop_fairest(&mut self, running: impl Fn(&Owner) -> usize) -> Option<(Owner, T)> {
        let numbered = self.lanes.iter().enumerate();
        let (at, _) = numbered.min_by_key(|(_, lane)| running(&lane.owner))?;
        let mut lane = self.lanes.remove(at)?;
        let item = lane.items.pop_front()?;
        let owner = lane.owner.clone();
        if !lane.items.is_empty() {
            self.lanes.push_back(lane);
        }
        Some((owner, item))
    }

    /// Keeps only items for which `keep` returns true.
    pub fn retain(&mut self, keep: impl Fn(&T) -> bool) {
        for lane in &mut self.lanes {
            lane.items.retain(&keep);
        }
        self.lanes.retain(|lane| !lane.items.is_empty());
    }

    /// Whether `more` further items of `owner` may wait.
    ///
    /// An owner may occupy at most as many places as stay free: one owner alone half of them, two a third
    /// each. So a place is left for an owner that has none. Callers without a key, which cannot be
    /// distinguished, may occupy all places.
    ///
    /// # Errors
    /// [`EngineError::Overloaded`] if there are too few places, [`EngineError::ShareExceeded`] if there are
    /// too few for this owner, and [`EngineError::TooManyChoices`] if there are never enough.
    pub fn check(
        &self,
        owner: &Owner,
        more: usize,
        capacity: &QueueCapacity,
    ) -> Result<(), EngineError> {
        let QueueCapacity { slots, obtainable, places, retry_after } = *capacity;
        let after = self.len() + more;
        if after <= obtainable {
            return Ok(());
        }
        let most = capacity.most(owner);
        if more > most {
            return Err(EngineError::TooManyChoices { choices: more, most });
        }
        let (queued, own) = (self.len(), self.len_of(owner));
        if after - obtainable > places {
            return Err(EngineError::Overloaded { slots, queued, retry_after });
        }
        let occupied = (own + more).saturating_sub(obtainable);
        let others = after - obtainable - occupied;
        if owner.is_some() && occupied > (places - others).div_ceil(2) {
            return Err(EngineError::ShareExceeded { own, retry_after });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn owner(name: &str) -> Owner {
        Some(Arc::from(name))
    }

    fn filled(items: &[(&str, u32)]) -> FairQueue<u32> {
        let mut queue = FairQueue::default();
        items.iter().for_each(|(name, item)| queue.push_back(&owner(name), *item));
        queue
    }

    fn drained(queue: &mut FairQueue<u32>) -> Vec<u32> {
        std::iter::from_fn(|| queue.pop_fairest(|_| 0)).map(|(_, item)| item).collect()
    }

    #[test]
    fn owners_are_served_in_turn_those_with_fewer_running_requests_first() {
        let mut queue = filled(&[("a", 1), ("a", 2), ("a", 3), ("b", 4), ("c", 5), ("b", 6)]);
        assert_eq!((queue.len(), queue.len_of(&owner("a")), queue.len_of(&None)), (6, 3, 0));
        assert_eq!(drained(&mut queue), [1, 4, 5, 2, 6, 3]);
        assert!(queue.is_empty());
        let mut queue = filled(&[("a", 1), ("a", 2), ("b", 3)]);
        let running = |of: &Owner| usize::from(*of == owner("a"));
        let next: Vec<u32> =
            std::iter::from_fn(|| queue.pop_fairest(running)).map(|(_, item)| item).collect();
        assert_eq!(next, [3, 1, 2]);
        let mut queue = filled(&[("a", 1), ("a", 2), ("b", 3), ("a", 4), ("c", 6)]);
        queue.retain(|item| item % 2 == 0);
        assert_eq!((queue.len(), queue.iter().count()), (3, 3));
        assert_eq!(drained(&mut queue), [2, 6, 4]);
        let mut queue = filled(&[("a", 1), ("a", 2), ("b", 3)]);
        let (who, item) = queue.pop_fairest(|_| 0).unwrap();
        queue.push_front(&who, item);
        assert_eq!(queue.len(), 3);
        assert_eq!(drained(&mut queue), [1, 3, 2]);
    }

    /// Whether `more` items of `owner` may wait: `ok`, or the kind of the error.
    fn places(
        queue: &FairQueue<u32>,
        owner: &Owner,
        more: usize,
        (now, later): (usize, usize),
    ) -> &'static str {
        let retry_after = Duration::from_secs(3);
        let capacity = QueueCapacity { slots: 2, obtainable: now, places: later, retry_after };
        match queue.check(owner, more, &capacity) {
            Ok(()) => "ok",
            Err(EngineError::Overloaded { slots: 2, .. }) => "full",
            Err(EngineError::ShareExceeded { .. }) => "share",
            Err(EngineError::TooManyChoices { .. }) => "never",
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn an_owner_leaves_places_to_others() {
        let [a, b, d] = ["a", "b", "d"].map(owner);
        let empty = filled(&[]);
        assert_eq!(places(&empty, &a, 2, (0, 4)), "ok");
        assert_eq!(places(&empty, &a, 3, (0, 4)), "share");
        assert_eq!(places(&empty, &a, 4, (0, 4)), "share");
        assert_eq!(places(&empty, &a, 5, (0, 4)), "never");
        assert_eq!(places(&empty, &a, 1, (0, 1)), "ok");
        let two = filled(&[("a", 1), ("a", 2)]);
        assert_eq!(places(&two, &a, 1, (0, 4)), "share");
        assert_eq!(places(&two, &b, 1, (0, 4)), "ok");
        assert_eq!(places(&two, &b, 2, (0, 4)), "share");
        let full = filled(&[("a", 1), ("a", 2), ("b", 3), ("c", 4)]);
        assert_eq!(places(&full, &d, 1, (0, 4)), "full");
        // What is about to be served takes no place.
        assert_eq!(places(&empty, &a, 3, (3, 0)), "ok");
        assert_eq!(places(&empty, &a, 2, (1, 0)), "full");
    }

    #[test]
    fn callers_without_a_key_may_occupy_all_places() {
        let mut queue = FairQueue::default();
        for item in 0..4 {
            assert_eq!(places(&queue, &None, 1, (0, 4)), "ok");
            queue.push_back(&None, item);
        }
        assert_eq!(places(&queue, &None, 1, (0, 4)), "full");
        assert_eq!(places(&queue, &None, 1, (1, 4)), "ok");
        assert_eq!(places(&queue, &None, 6, (0, 4)), "full");
        assert_eq!(places(&queue, &None, 7, (0, 4)), "never");
    }

    proptest! {
        #[test]
        fn no_owner_waits_for_two_requests_of_another(owners in prop::collection::vec(0_u8..5, 0..60)) {
            let mut queue = FairQueue::default();
            for (item, name) in (0_u32..).zip(&owners) {
                queue.push_back(&owner(&name.to_string()), item);
            }
            let mut served: Vec<Owner> = Vec::new();
            let mut last = std::collections::BTreeMap::new();
            while let Some((who, item)) = queue.pop_fairest(|_| 0) {
                // In its owner's order.
                let before = last.insert(who.clone(), item);
                prop_assert!(before.is_none_or(|before| before < item));
                for other in 0_u8..5 {
                    let other = owner(&other.to_string());
                    let since = served.iter().rev().take_while(|served| **served != other);
                    let repeated = since.filter(|served| **served == who).count();
                    prop_assert!(queue.len_of(&other) == 0 || other == who || repeated == 0);
                }
                served.push(who);
            }
            prop_assert_eq!(served.len(), owners.len());
        }
    }
}
