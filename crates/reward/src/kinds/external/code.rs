//! `code`: the share of a program's tests that pass.

use std::sync::Arc;

use hone_core::config::{Checked, Problem};

pub use crate::code::CodeParams;
use crate::code::{CodeLanguage, CodeReward};
use crate::kinds::kind::{BuildContext, Built, Documented, Kind, KindEntry};

impl Documented for CodeParams {
    fn entry() -> KindEntry {
        KindEntry {
            kind: "code",
            formula: "the share of the tests in metadata[tests] (lines of assertions), \
                      metadata[cases] ([{input, output}]) and metadata[calls] ([[input, expected]] of \
                      the function) that the last fenced block in the language passes, run in sandbox \
                      processes; missing without tests or assertions",
            parameters: "language = \"python\" (or \"rhai\"), block = \"last\" (or \"first\"), tests = \
                         \"tests\", cases = \"cases\", calls = \"test_cases\", function = \"solution\", \
                         timeout_ms = 5000, memory_mb = 256, max_output_bytes = 65536, partial = true"
                .to_owned(),
            typical_weight: "2.0",
            example: "language = \"rhai\"",
            calls_out: true,
            ..KindEntry::default()
        }
    }
}

impl Kind for CodeParams {
    fn check(&self) -> Checked {
        Self::check(self)
    }

    fn build(&self, context: &BuildContext<'_>) -> Built {
        let reward = CodeReward::new(self.clone(), context.tools.sandbox.clone());
        let reward = reward.map_err(|error| Problem::new("language", format!(": {error}")))?;
        Ok(Some(Arc::new(reward)))
    }

    fn needs_sandbox(&self) -> bool {
        self.language == CodeLanguage::Python
    }

    fn reads(&self) -> Vec<&str> {
        vec![self.tests.as_str(), self.cases.as_str()]
    }
}
