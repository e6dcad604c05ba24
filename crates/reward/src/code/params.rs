//! The parameters of `kind = "code"`.

use serde::{Deserialize, Serialize};

use hone_core::config::between;
use hone_core::config::{Checked, Problem, quoted};

use crate::kinds::define::parameters;

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

parameters! {
    /// Parameters of `kind = "code"`.
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
        /// milliseconds; 10 to 600,000.
        pub timeout_ms: u64 = 5_000,
        /// Memory of the program, in MiB; 32 to 65,536. Rhai ignores it, as its values are bounded.
        pub memory_mb: u64 = 256,
        /// Most bytes that the program may write, per case and in total; 1,024 to 16 MiB.
        pub max_output_bytes: usize = 64 * 1024,
        /// Whether the value is the share of passed tests; otherwise 1 if all pass, else 0.
        pub partial: bool = true,
    }
}

impl CodeParams {
    /// Checks every range.
    ///
    /// # Errors
    /// The first value that is out of range.
    pub fn check(&self) -> Checked {
        between("timeout_ms", self.timeout_ms, 10, 600_000)?;
        between("memory_mb", self.memory_mb, 32, 65_536)?;
        between("max_output_bytes", self.max_output_bytes, 1_024, 16 << 20)?;
        let different = |key, value: &String, others: &[&String]| match others.contains(&value) {
            true => {
                Err(Problem::value(key, quoted(value), "another key than those of other tests"))
            }
            false => Ok(()),
        };
        different("cases", &self.cases, &[&self.tests])?;
        different("calls", &self.calls, &[&self.tests, &self.cases])?;
        if self.function.trim().is_empty() {
            return Err(Problem::value("function", quoted(&self.function), "a function's name"));
        }
        Ok(())
    }
}
