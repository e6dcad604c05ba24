//! `code_syntax`: whether a completion's code compiles.

use std::sync::Arc;

use crate::code::{BlockChoice, CodeLanguage, SyntaxReward};
use crate::kinds::prelude::*;

define_kind! {
    pub struct CodeSyntax {
        /// The language of the code.
        pub language: CodeLanguage = CodeLanguage::Python,
        /// The fenced block that counts.
        pub block: BlockChoice = BlockChoice::Last,
        /// Whether a completion without a fenced block earns 0; otherwise all of it is the code.
        pub require_block: bool = true,
    }
    kind: "code_syntax",
    typical_weight: "0.2 to 0.5",
    example: "language = \"rhai\"",
    calls_out: true,
    formula: "1 if the code of the last (block = \"first\": first) fenced block compiles and is not \
              blank, else 0; the code does not run",
}

impl Kind for CodeSyntax {
    fn build(&self, context: &BuildContext<'_>) -> Built {
        let reward = SyntaxReward::new(self.clone(), context.tools.sandbox.clone());
        let reward = reward.map_err(|error| Problem::new("language", format!(": {error}")))?;
        Ok(Some(Arc::new(reward)))
    }

    fn needs_sandbox(&self) -> bool {
        self.language == CodeLanguage::Python
    }
}
