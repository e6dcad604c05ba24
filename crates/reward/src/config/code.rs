//! Parameters of the rewards that execute something: `code` and `script`.

use serde::{Deserialize, Serialize};

use hone_core::config::describe::Problem;
use hone_core::config::range::between;

/// What a completion's code is written in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CodeLanguage {
    /// Python 3, in a sandbox process.
    #[default]
    Python,
    /// Rhai, interpreted here under an operation limit; needs no interpreter and no sandbox.
    Rhai,
}

/// Parameters of `kind = "code"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CodeParams {
    /// What the code is written in.
    pub language: CodeLanguage,
    /// The metadata key of the tests.
    pub tests: String,
    /// The metadata key of the input and output pairs.
    pub cases: String,
    /// Time for all tests of one completion together, in milliseconds; 10 to 600,000.
    pub timeout_ms: u64,
    /// Memory for the program, in MiB; 32 to 65,536. Of no effect on Rhai, whose values are bounded.
    pub memory_mb: u64,
    /// Bytes that the program may write, per case or in all; 1,024 to 16 MiB.
    pub max_output_bytes: usize,
    /// Whether some passed tests earn their share; otherwise it is all or nothing.
    pub partial: bool,
}

impl Default for CodeParams {
    fn default() -> Self {
        Self {
            language: CodeLanguage::Python,
            tests: "tests".to_owned(),
            cases: "cases".to_owned(),
            timeout_ms: 5_000,
            memory_mb: 256,
            max_output_bytes: 64 * 1024,
            partial: true,
        }
    }
}

impl CodeParams {
    /// Refuses what is out of range.
    ///
    /// # Errors
    /// The key, its value, and what is allowed.
    pub fn check(&self) -> Result<(), Problem> {
        between("timeout_ms", self.timeout_ms, 10, 600_000)?;
        between("memory_mb", self.memory_mb, 32, 65_536)?;
        between("max_output_bytes", self.max_output_bytes, 1_024, 16 << 20)?;
        if self.tests == self.cases {
            let allowed = "another key than that of the tests";
            return Err(Problem::value("cases", format!("{:?}", self.cases), allowed));
        }
        Ok(())
    }
}

/// Parameters of `kind = "script"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScriptParams {
    /// The script's text, in Rhai.
    pub source: String,
    /// Operations that one completion may take; 100 to 100,000,000.
    #[serde(default = "default_operations")]
    pub max_operations: u64,
}

fn default_operations() -> u64 {
    100_000
}

impl ScriptParams {
    /// Refuses what is out of range.
    ///
    /// # Errors
    /// As [`CodeParams::check`].
    pub fn check(&self) -> Result<(), Problem> {
        between("max_operations", self.max_operations, 100, 100_000_000)
    }
}
