//! `python`: the values of a reward function with TRL's signature.

use std::sync::Arc;

use hone_core::config::{Checked, Problem};

use crate::code::PythonFunction;
pub use crate::code::PythonParams;
use crate::kinds::kind::{BuildContext, Built, Documented, Kind, KindEntry};

impl Documented for PythonParams {
    fn entry() -> KindEntry {
        KindEntry {
            kind: "python",
            formula: "the list that the Python function f(prompts, completions, **columns) returns \
                      for a group, as in TRL; None is missing, and all values are if it fails",
            range: "the function's",
            parameters: "path = \"\" (or source = \"\", the Python itself), function = \"\" (needed \
                         if several have an argument completions), format = \"chat\" (or \"text\"), \
                         columns = {} (of \"text\" or \"json\"), timeout_ms = 10000, memory_mb = 512"
                .to_owned(),
            typical_weight: "1.0",
            example: "source = \"def f(completions, **columns): return [0.0 for _ in completions]\"",
            calls_out: true,
            bounds: [f64::NEG_INFINITY, f64::INFINITY],
        }
    }
}

impl Kind for PythonParams {
    fn check(&self) -> Checked {
        Self::check(self)
    }

    fn build(&self, context: &BuildContext<'_>) -> Built {
        let Some(sandbox) = context.tools.sandbox.clone() else {
            let why = " is \"python\", which needs the sandbox, and it is not set up";
            return Err(Problem::new("kind", why));
        };
        let function = PythonFunction::new(self.clone(), sandbox, context.route, context.part)?;
        Ok(Some(Arc::new(function)))
    }

    fn needs_sandbox(&self) -> bool {
        true
    }
}
