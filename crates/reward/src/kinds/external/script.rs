//! `script`: the value of a Rhai script.

use std::sync::Arc;

use hone_core::config::{Checked, Problem};

use crate::kinds::kind::{BuildContext, Built, Documented, Kind, KindEntry};
pub use crate::script::ScriptParams;
use crate::script::ScriptReward;

impl Documented for ScriptParams {
    fn entry() -> KindEntry {
        KindEntry {
            kind: "script",
            formula: "the value of a Rhai script that sees text, tokens, prompt, messages, \
                      metadata, group (all texts) and index, limited to max_operations; () is missing",
            range: "the script's",
            parameters: "source, max_operations = 100000".to_owned(),
            typical_weight: "0.5",
            example: "source = 'if contains(text, \"1\") { 1.0 } else { 0.0 }'",
            ..KindEntry::default()
        }
    }
}

impl Kind for ScriptParams {
    fn check(&self) -> Checked {
        Self::check(self)
    }

    fn build(&self, _: &BuildContext<'_>) -> Built {
        let script = ScriptReward::new(self)
            .map_err(|error| Problem::new("source", format!(" does not compile: {error}")))?;
        Ok(Some(Arc::new(script)))
    }
}
