//! One part of a route's reward.

use serde::ser::SerializeMap;
use serde::{Deserialize, Serialize, Serializer};
use toml::Table;

use hone_core::config::range::finite;
use hone_core::config::{Checked, Problem};

use crate::kinds::{RewardKind, Shaping, flat};
use crate::routes::adaptive::AdaptiveConfig;

/// One named, weighted part of a route's reward; in TOML one flat table
/// `name, kind, weight, clip, scale, offset, adaptive, <the kind's parameters>`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(try_from = "Table")]
pub struct RewardConfig {
    /// The part's name, unique within the route; for `feedback` the name that clients post.
    pub name: String,
    /// The factor of the part's advantage.
    pub weight: f64,
    /// The kind with its parameters.
    pub kind: RewardKind,
    /// How the values are shaped.
    pub shape: Shaping,
    /// How the weight follows the success rate; absent: it is constant.
    pub adaptive: Option<AdaptiveConfig>,
}

impl RewardConfig {
    /// A part without shaping and with a constant weight.
    pub fn new(name: &str, weight: f64, kind: RewardKind) -> Self {
        Self { name: name.to_owned(), weight, kind, shape: Shaping::default(), adaptive: None }
    }

    /// Checks the ranges of everything but the name.
    ///
    /// # Errors
    /// The first value that is out of range, its key relative to the part.
    pub fn check(&self) -> Checked {
        finite("weight", self.weight)?;
        self.shape.check()?;
        if let (RewardKind::Feedback(_), false) = (&self.kind, self.shape.is_default()) {
            let keys = "clip, scale and offset shape what a grader computes: this part is feedback";
            return Err(Problem::new("kind", format!(" is \"feedback\": {keys}")));
        }
        if let Some(adaptive) = &self.adaptive {
            adaptive.check(self.weight)?;
        }
        self.kind.check()
    }
}

/// The keys of a part that do not depend on its kind.
#[derive(Deserialize)]
struct CommonKeys {
    name: String,
    #[serde(default = "one")]
    weight: f64,
    adaptive: Option<AdaptiveConfig>,
}

fn one() -> f64 {
    1.0
}

impl TryFrom<Table> for RewardConfig {
    type Error = String;

    fn try_from(mut table: Table) -> Result<Self, String> {
        let kind = flat::take_kind::<RewardKind>(&mut table)?;
        let CommonKeys { name, weight, adaptive } =
            flat::read(flat::split_off(&mut table, &["name", "weight", "adaptive"]))?;
        let (shape, kind) = flat::read_kind(&kind, table)?;
        Ok(Self { name, weight, kind, shape, adaptive })
    }
}

impl Serialize for RewardConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("name", &self.name)?;
        map.serialize_entry("weight", &self.weight)?;
        flat::write_kind(&mut map, &self.shape, &self.kind)?;
        if let Some(adaptive) = &self.adaptive {
            map.serialize_entry("adaptive", adaptive)?;
        }
        map.end()
    }
}
