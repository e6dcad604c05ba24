//! The rewards of a group, by part and member.

/// Values are clamped to this magnitude, so that finite rewards never overflow.
const VALUE_LIMIT: f64 = 1e9;

/// One named part of the rewards of one group.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PartRewards {
    /// The part's name, which selects its running baseline.
    pub name: String,
    /// Factor of its advantage in the sum over parts.
    pub weight: f64,
    /// One value per member; `None` and values that are not finite are missing.
    pub values: Vec<Option<f64>>,
    /// Weight of each value in (0, 1], below 1 where `max_key_share` capped a key's feedback. It
    /// multiplies the value's advantage and its weight in running baselines.
    pub cap_weights: Vec<f64>,
}

impl PartRewards {
    /// The clamped value of a member; `None` if missing.
    pub(super) fn value(&self, member: usize) -> Option<f64> {
        let value = (*self.values.get(member)?)?;
        value.is_finite().then(|| value.clamp(-VALUE_LIMIT, VALUE_LIMIT))
    }

    /// The cap weight of a member's value.
    pub(super) fn cap_weight(&self, member: usize) -> f64 {
        self.cap_weights.get(member).copied().unwrap_or(1.0)
    }

    /// The values of `members`; `None` if one is missing.
    pub(super) fn complete(&self, members: &[usize]) -> Option<Vec<f64>> {
        members.iter().map(|member| self.value(*member)).collect()
    }
}

/// The rewards of one group.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct GroupRewards {
    /// The route, which selects the running baselines.
    pub route: String,
    /// Number of members; every part has as many values.
    pub members: usize,
    /// The group's reward parts.
    pub parts: Vec<PartRewards>,
    /// The conversation of each member that a client received.
    pub conversations: Vec<Option<[u8; 16]>>,
}

impl GroupRewards {
    /// Members that have at least one value.
    pub(super) fn trained(&self) -> Vec<usize> {
        let has_value = |member: &usize| self.parts.iter().any(|p| p.value(*member).is_some());
        (0..self.members).filter(has_value).collect()
    }
}
