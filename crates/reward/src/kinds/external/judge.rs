//! `judge`: the verdict of a language model.

use std::sync::Arc;

use hone_core::config::Checked;

use crate::judge::Judge;
pub use crate::judge::JudgeParams;
use crate::kinds::kind::{BuildContext, Built, Documented, Kind, KindEntry, keyed};

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
