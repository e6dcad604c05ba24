//! `script`: a reward written in [Rhai](https://rhai.rs), for what no built-in part computes.
//!
//! The script sees `text` (the completion), `tokens` (its length), `prompt` (the last user message),
//! `messages` (maps of `role` and `content`) and `metadata` (a map), all constant, and has Rhai's
//! standard functions and these:
//!
//! | function | value |
//! | --- | --- |
//! | `contains(text, part)` | whether it is in there |
//! | `count(text, part)` | how often, without overlaps; 0 for an empty part |
//! | `extract_tag(text, "answer")` | trimmed inside of the last `<answer>…</answer>`, or `()` |
//! | `to_number(text)` | the number, read as `numeric_match` does, or `()` |
//! | `matches(text, pattern)` | whether the regular expression matches anywhere |
//!
//! Its last value is the reward: a number, a boolean (1 or 0), or `()` for a missing one. A script
//! that fails or exceeds its limits gives a missing value too, with one warning for all its life. It
//! can neither read nor write anything, and the same input gives the same value.

pub(crate) mod engine;
mod params;

use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use rhai::{AST, Dynamic, Engine, Map, Scope};

use hone_core::types::Role;

use super::{RewardFn, ScoreInput};

pub use params::ScriptParams;

/// What is wrong with a script.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScriptError {
    /// It is not Rhai.
    #[error("source does not compile, line {line}, column {column}: {reason}")]
    Compile {
        /// From 1.
        line: usize,
        /// From 1.
        column: usize,
        /// What is wrong there.
        reason: String,
    },
    /// It was stopped, or failed.
    #[error("the script failed: {0}")]
    Run(String),
    /// Its value is no reward.
    #[error("the script's value is {0}; it must be a finite number, a boolean or ()")]
    Value(String),
}

/// The part `kind = "script"`.
pub struct ScriptReward {
    engine: Engine,
    script: AST,
    warned: AtomicBool,
}

impl ScriptReward {
    /// Compiles the script.
    ///
    /// # Errors
    /// Names the line and column of what does not compile.
    pub fn new(params: &ScriptParams) -> Result<Self, ScriptError> {
        let mut engine = engine::restricted(params.max_operations);
        engine::add_helpers(&mut engine);
        let script = engine.compile(&params.source).map_err(|error| ScriptError::Compile {
            line: error.position().line().unwrap_or(1),
            column: error.position().position().unwrap_or(1),
            reason: error.err_type().to_string(),
        })?;
        Ok(Self { engine, script, warned: AtomicBool::new(false) })
    }

    /// The value for one completion; `None` where the script answers `()`.
    ///
    /// # Errors
    /// If the script fails, exceeds a limit, or answers something else.
    pub fn evaluate(&self, input: &ScoreInput) -> Result<Option<f64>, ScriptError> {
        let mut scope = scope(input);
        let run = || self.engine.eval_ast_with_scope::<Dynamic>(&mut scope, &self.script);
        let value = engine::fresh(run).map_err(|error| ScriptError::Run(error.to_string()))?;
        let wrong = || ScriptError::Value(shortened(&value));
        if value.is_unit() {
            return Ok(None);
        }
        let number = match (value.as_float(), value.as_int(), value.as_bool()) {
            (Ok(number), ..) => number,
            (_, Ok(number), _) => number as f64,
            (.., Ok(holds)) => f64::from(u8::from(holds)),
            _ => return Err(wrong()),
        };
        if number.is_finite() { Ok(Some(number)) } else { Err(wrong()) }
    }
}

#[async_trait]
impl RewardFn for ScriptReward {
    async fn score(&self, samples: &[ScoreInput]) -> Vec<Option<f64>> {
        let value = |input| {
            self.evaluate(input).unwrap_or_else(|error| {
                if !self.warned.swap(true, Ordering::Relaxed) {
                    tracing::warn!(%error, "a scripted reward is missing; further ones stay silent");
                }
                None
            })
        };
        samples.iter().map(value).collect()
    }
}

fn scope(input: &ScoreInput) -> Scope<'static> {
    let prompt = input.messages.iter().rfind(|m| m.role == Role::User).map(|m| m.content.clone());
    let messages: Vec<Dynamic> = input
        .messages
        .iter()
        .map(|message| {
            let role = serde_json::to_value(message.role).ok();
            let role = role.as_ref().and_then(|r| r.as_str()).unwrap_or_default().to_owned();
            let pairs = [("role", role), ("content", message.content.clone())];
            Dynamic::from(pairs.into_iter().map(|(k, v)| (k.into(), v.into())).collect::<Map>())
        })
        .collect();
    let metadata: Map =
        input.metadata.iter().map(|(k, v)| (k.as_str().into(), v.clone().into())).collect();
    let mut scope = Scope::new();
    scope
        .push_constant("text", input.text.clone())
        .push_constant("tokens", rhai::INT::try_from(input.ids.len()).unwrap_or(rhai::INT::MAX))
        .push_constant("prompt", prompt.unwrap_or_default())
        .push_constant("messages", messages)
        .push_constant("metadata", metadata);
    scope
}

/// A value's kind and beginning, for an error.
fn shortened(value: &Dynamic) -> String {
    let text: String = value.to_string().chars().take(40).collect();
    format!("the {} `{text}`", value.type_name())
}

#[cfg(test)]
mod tests;
