//! `script`: a reward written in [Rhai](https://rhai.rs), for values that no built-in part computes.
//!
//! A script sees the constants `text` (the completion), `tokens` (its length), `prompt` (the last
//! user message), `messages` (maps of `role` and `content`), `metadata` (a map), `group` (the texts of
//! all completions of the group, in order) and `index` (the place of `text` in it, from 0). It has
//! Rhai's standard functions and these:
//!
//! | function | value |
//! | --- | --- |
//! | `contains(text, part)` | whether `text` contains `part` |
//! | `count(text, part)` | number of non-overlapping occurrences; 0 for an empty part |
//! | `extract_tag(text, "answer")` | trimmed content of the last `<answer>…</answer>`, or `()` |
//! | `to_number(text)` | the number, parsed as in `numeric_match`, or `()` |
//! | `matches(text, pattern)` | whether the regular expression matches anywhere |
//!
//! The script's last value is the reward: a number, a boolean (1 or 0), or `()` for a missing one. A
//! script that fails or exceeds its limits yields a missing value too; the first failure is logged. It
//! runs on the caller's thread, has no input or output, and is deterministic.

pub(crate) mod engine;

use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use rhai::{AST, Array, Dynamic, Engine, INT, Map, Scope};

use crate::kinds::define::define_kind;
use crate::{RewardFn, ScoreInput};

/// The part `kind = "script"`.
pub struct ScriptReward {
    engine: Engine,
    script: AST,
    warned: AtomicBool,
}

impl ScriptReward {
    /// Compiles the script.
    /// Errors: if the script does not compile, with line and column.
    pub fn new(params: &ScriptParams) -> Result<Self, String> {
        let mut engine = engine::restricted(params.max_operations);
        engine::add_helpers(&mut engine);
        let script = engine.compile(&params.source).map_err(|error| {
            let (line, column) = (error.position().line(), error.position().position());
            let (line, column) = (line.unwrap_or(1), column.unwrap_or(1));
            let what = error.err_type();
            format!("source does not compile, line {line}, column {column}: {what}")
        })?;
        Ok(Self { engine, script, warned: AtomicBool::new(false) })
    }

    /// The value for the completion `index` of a group whose texts are `texts`; `None` if the script
    /// returns `()`.
    /// Errors: if the script fails, exceeds a limit, or returns a value that is not a reward.
    fn evaluate(
        &self,
        input: &ScoreInput,
        texts: &Array,
        index: usize,
    ) -> Result<Option<f64>, String> {
        let mut scope = scope(input);
        scope
            .push_constant("group", texts.clone())
            .push_constant("index", INT::try_from(index).unwrap_or(INT::MAX));
        let run = || self.engine.eval_ast_with_scope::<Dynamic>(&mut scope, &self.script);
        let value = engine::with_scan_budget(run);
        let value = value.map_err(|error| format!("the script failed: {error}"))?;
        if value.is_unit() {
            return Ok(None);
        }
        let number = match (value.as_float(), value.as_int(), value.as_bool()) {
            (Ok(number), ..) => number,
            (_, Ok(number), _) => number as f64,
            (.., Ok(holds)) => f64::from(u8::from(holds)),
            _ => f64::NAN,
        };
        if number.is_finite() {
            return Ok(Some(number));
        }
        let (kind, text) = (value.type_name(), value.to_string());
        let text: String = text.chars().take(40).collect();
        let allowed = "it must be a finite number, a boolean or ()";
        Err(format!("the script's value is the {kind} `{text}`; {allowed}"))
    }
}

#[async_trait]
impl RewardFn for ScriptReward {
    async fn score(&self, samples: &[ScoreInput]) -> Vec<Option<f64>> {
        // Clones of a Rhai text share its memory.
        let texts: Array = samples.iter().map(|sample| sample.text.clone().into()).collect();
        let value = |(index, input)| {
            self.evaluate(input, &texts, index).unwrap_or_else(|error| {
                if !self.warned.swap(true, Ordering::Relaxed) {
                    tracing::warn!(%error, "a script reward failed; later failures are not logged");
                }
                None
            })
        };
        samples.iter().enumerate().map(value).collect()
    }
}

fn scope(input: &ScoreInput) -> Scope<'static> {
    let messages: Vec<Dynamic> = input
        .messages
        .iter()
        .map(|message| {
            let pairs = [("role", message.role.as_str()), ("content", &message.content)];
            Dynamic::from(pairs.into_iter().map(|(k, v)| (k.into(), v.into())).collect::<Map>())
        })
        .collect();
    let metadata: Map =
        input.metadata.iter().map(|(k, v)| (k.as_str().into(), v.clone().into())).collect();
    let mut scope = Scope::new();
    scope
        .push_constant("text", input.text.clone())
        .push_constant("tokens", INT::try_from(input.ids.len()).unwrap_or(INT::MAX))
        .push_constant("prompt", input.prompt().unwrap_or_default().to_owned())
        .push_constant("messages", messages)
        .push_constant("metadata", metadata);
    scope
}

define_kind! {
    pub struct ScriptParams {
        /// The script, in Rhai.
        pub source: String,
        /// Most operations for one completion.
        pub max_operations: u64 = 100_000 => between(100, 100_000_000),
    }
    kind: "script",
    range: "the script's",
    typical_weight: "0.5",
    example: "source = 'if contains(text, \"1\") { 1.0 } else { 0.0 }'",
    formula: "the value of a Rhai script that sees text, tokens, prompt, messages, metadata, group (all texts) and \
              index, limited to max_operations; () is missing",
}

#[cfg(test)]
mod tests;
