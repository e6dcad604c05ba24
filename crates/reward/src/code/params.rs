//! The parameters of `kind = "code"` and of `kind = "code_syntax"`.

use serde::{Deserialize, Serialize};

use crate::kinds::define::define_kind;

/// The language of a completion's code.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CodeLanguage {
    /// Python 3, in a sandbox process.
    #[default]
    Python,
    /// Rhai, interpreted in this process under an operation limit, without a sandbox.
    Rhai,
}

/// The fenced block of a completion that counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BlockChoice {
    /// The last one, usually the final version.
    #[default]
    Last,
    /// The first one, as in the guides to GRPO.
    First,
}

define_kind! {
    pub struct CodeParams {
        /// The language of the code.
        pub language: CodeLanguage = CodeLanguage::Python,
        /// The fenced block that contains the code.
        pub block: BlockChoice = BlockChoice::Last,
        /// Metadata key of the tests: lines of assertions.
        pub tests: String = "tests".to_owned(),
        /// Metadata key of the cases: a JSON list of `{"input": …, "output": …}`.
        pub cases: String = "cases".to_owned(),
        /// Metadata key of the calls: a JSON list of `[input, expected]`. Rhai ignores them.
        pub calls: String = "test_cases".to_owned(),
        /// The function that the calls call with one argument.
        pub function: String = "solution".to_owned(),
        /// Time of each case and each call, and of all assertions of one completion together, in
        /// milliseconds.
        pub timeout_ms: u64 = 5_000 => between(10, 600_000),
        /// Memory of the program, in MiB. Rhai ignores it, as its values are bounded.
        pub memory_mb: u64 = 256 => between(32, 65_536),
        /// Most bytes that the program may write, per case and in total.
        pub max_output_bytes: usize = 64 * 1024 => between(1_024, 16 << 20),
        /// Whether the value is the share of passed tests; otherwise 1 if all pass, else 0.
        pub partial: bool = true,
    }
    kind: "code",
    typical_weight: "2.0",
    example: "language = \"rhai\"",
    calls_out: true,
    formula: "the share of the tests in metadata[tests] (lines of assertions), \
              metadata[cases] ([{input, output}]) and metadata[calls] ([[input, expected]] of \
              the function) that the last fenced block in the language passes, run in sandbox \
              processes; missing without tests or assertions",
}

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
