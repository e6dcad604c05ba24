//! The parameters of `kind = "script"`.

use hone_core::config::Checked;
use hone_core::config::range::between;

use crate::kinds::define::parameters;

parameters! {
    /// Parameters of `kind = "script"`.
    pub struct ScriptParams {
        /// The script, in Rhai.
        pub source: String,
        /// Most operations for one completion; 100 to 100,000,000.
        pub max_operations: u64 = 100_000,
    }
}

impl ScriptParams {
    /// Checks every range.
    ///
    /// # Errors
    /// The first value that is out of range.
    pub fn check(&self) -> Checked {
        between("max_operations", self.max_operations, 100, 100_000_000)
    }
}
