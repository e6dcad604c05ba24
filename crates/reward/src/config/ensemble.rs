//! Several kinds as one part.

use serde::{Deserialize, Serialize};

use hone_core::config::range::Checked;

use super::{Problem, RewardKind, Shaping};

/// How the members of an ensemble become one value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EnsembleHow {
    /// Their mean.
    #[default]
    Mean,
    /// The least.
    Min,
    /// The middle one; of an even number the mean of the middle two.
    Median,
    /// The greatest.
    Max,
}

/// One value of several functions; members that are missing are left out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ensemble {
    /// How the members become one value.
    #[serde(default)]
    pub how: EnsembleHow,
    /// The members (`[[route.reward.of]]`).
    pub of: Vec<EnsembleMember>,
}

/// A member of an ensemble; in TOML one flat table `kind, clip, scale, offset, <the kind's
/// parameters>`, without a name or a weight.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(try_from = "toml::Table")]
pub struct EnsembleMember {
    /// Which function, and its parameters.
    pub kind: RewardKind,
    /// What is done to its values.
    pub shape: Shaping,
}

impl Ensemble {
    pub(super) fn check(&self) -> Checked {
        if !(1..=16).contains(&self.of.len()) {
            let shown = format!("a list of {}", self.of.len());
            return Err(Problem::value("of", shown, "a list of 1 to 16 rewards"));
        }
        for (i, member) in self.of.iter().enumerate() {
            let key = format!("of[{i}].");
            let refused = match member.kind {
                RewardKind::Feedback(_) => Some("\"feedback\""),
                RewardKind::Ensemble(_) => Some("\"ensemble\""),
                _ => None,
            };
            if let Some(kind) = refused {
                let allowed = "a kind that computes its value, and no ensemble";
                return Err(Problem::value(&format!("{key}kind"), kind, allowed));
            }
            member.shape.check(&key)?;
            member.kind.check().map_err(|problem| problem.prefixed(&key))?;
        }
        Ok(())
    }
}
