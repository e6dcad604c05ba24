//! `feedback`: values that clients post.

use hone_core::config::Checked;

pub use crate::feedback::FeedbackParams;
use crate::kinds::kind::{BuildContext, Built, Documented, Kind, KindEntry};

impl Documented for FeedbackParams {
    fn entry() -> KindEntry {
        KindEntry {
            kind: "feedback",
            formula: "the value that clients post to /v1/feedback under the part's name",
            range: "any finite number; true is 1, false is 0",
            parameters: "type = \"number\" (or \"boolean\", \"comment\"), range = any, \
                         aggregate = \"last\" (or \"mean\", \"median\", \"majority\"), \
                         max_key_share = 1, share_rule = \"weight\" (or \"drop\")"
                .to_owned(),
            typical_weight: "1.0",
            bounds: [f64::NEG_INFINITY, f64::INFINITY],
            ..KindEntry::default()
        }
    }
}

impl Kind for FeedbackParams {
    fn check(&self) -> Checked {
        Self::check(self)
    }

    fn build(&self, _: &BuildContext<'_>) -> Built {
        Ok(None)
    }
}
