//! Kinds that run programs, ask services and models, or take values from clients.
//!
//! Their implementations, with the parameters, are in modules of their own at the crate's root.

pub mod grader;

use std::sync::Arc;

use hone_core::config::{Checked, Problem};

use crate::code::{BlockChoice, CodeLanguage, CodeReward, PythonFunction, SyntaxReward};
use crate::judge::Judge;
use crate::kinds::kind::{BuildContext, Built, Documented, Kind, KindEntry, keyed};
use crate::kinds::prelude::*;
use crate::script::ScriptReward;
use crate::webhook::Webhook;

pub use crate::code::{CodeParams, PythonParams};
pub use crate::feedback::FeedbackParams;
pub use crate::judge::JudgeParams;
pub use crate::script::ScriptParams;
pub use crate::webhook::WebhookParams;

// `feedback`: values that clients post.

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

// `code_syntax`: whether a completion's code compiles.

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

// `script`: the value of a Rhai script.

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

// `webhook`: values that another service computes.

impl Documented for WebhookParams {
    fn entry() -> KindEntry {
        KindEntry {
            kind: "webhook",
            formula: "the answer of a service to batches of {messages, completion, metadata}; missing \
                      while it does not answer",
            range: "the service's",
            parameters:
                "url, secret_env = \"\", max_batch = 32, max_concurrency = 4, timeout_ms = \
                         5000, retries = 2, backoff_ms = 200, max_backoff_ms = 10000, \
                         breaker_failures = 5, breaker_cooldown_ms = 10000, max_response_bytes = \
                         1048576, allow_http = false"
                    .to_owned(),
            typical_weight: "1.0",
            example: "url = \"http://127.0.0.1:9/score\"",
            calls_out: true,
            bounds: [f64::NEG_INFINITY, f64::INFINITY],
        }
    }
}

impl Kind for WebhookParams {
    fn check(&self) -> Checked {
        Self::check(self)
    }

    fn build(&self, context: &BuildContext<'_>) -> Built {
        let webhook = Webhook::new(self, context.route, context.part, &context.metrics()?);
        Ok(Some(Arc::new(webhook.map_err(keyed)?)))
    }

    fn resolve(&mut self, lookup: &dyn Fn(&str) -> Option<String>) -> Result<(), String> {
        Self::resolve(self, lookup).map_err(|error| format!("secret_env{error}"))
    }
}

// `python`: the values of a reward function with TRL's signature.

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

// `code`: the share of a program's tests that pass.

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

// `judge`: the verdict of a language model.

impl Documented for JudgeParams {
    fn entry() -> KindEntry {
        KindEntry {
            kind: "judge",
            formula: "the verdict of a language model: its score on the scale min to max as 0 to 1, \
                      or within a group the share of pairs won, or the place in a ranking",
            parameters: "base_url (or \"self\"), model = \"\", api_key_env = \"\", mode = \"score\" \
                         (or \"pairwise\", \"rank\"), rubric = \"helpfulness\" (or \"correctness\", \
                         \"safety\", \"custom\" with template), template = \"\", reference = \
                         \"answer\", min = 0, max = 10, temperature = 0, max_tokens = 512, \
                         token_limit_field = \"max_tokens\" (or \"max_completion_tokens\"), seed = \
                         0, max_pairs = 28, max_candidates = 16, cache_entries = 4096, prompt_price \
                         = 0, completion_price = 0, max_concurrency = 4, timeout_ms = 60000, \
                         retries = 2, backoff_ms = 200, max_backoff_ms = 10000, breaker_failures = \
                         5, breaker_cooldown_ms = 10000, max_response_bytes = 1048576, allow_http = \
                         false".to_owned(),
            typical_weight: "1.0",
            example: "base_url = \"http://127.0.0.1:9/v1\"\nmodel = \"judge\"",
            calls_out: true,
            ..KindEntry::default()
        }
    }
}

impl Kind for JudgeParams {
    fn check(&self) -> Checked {
        Self::check(self)
    }

    fn build(&self, context: &BuildContext<'_>) -> Built {
        let own = context.tools.self_judge.clone();
        let judge = Judge::new(self, context.route, context.part, &context.metrics()?, own);
        Ok(Some(Arc::new(judge.map_err(keyed)?)))
    }

    fn resolve(&mut self, lookup: &dyn Fn(&str) -> Option<String>) -> Result<(), String> {
        Self::resolve(self, lookup).map_err(|error| format!("api_key_env{error}"))
    }

    fn needs_self_judge(&self) -> bool {
        self.is_self_judge()
    }
}
