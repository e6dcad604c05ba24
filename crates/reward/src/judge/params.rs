//! The parameters of `kind = "judge"`.

use serde::{Deserialize, Serialize};

use hone_core::config::Secret;

use crate::kinds::define::define_kind;
use crate::remote::{CallLimits, call_limits};

/// The name under which judges and model graders ask this server's own base model.
pub const SELF_JUDGE: &str = "self";

/// How a judge compares the completions of one prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JudgeMode {
    /// Each completion by itself, on a scale.
    #[default]
    Score,
    /// Two at a time, in both orders; the value is the share of comparisons won.
    Pairwise,
}

/// The criterion of a judge.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rubric {
    /// Whether the answer does what the user asked for.
    #[default]
    Helpfulness,
    /// Whether it agrees with `metadata[reference]`.
    Correctness,
    /// Whether it avoids harm.
    Safety,
    /// The instruction in `template`.
    Custom,
}

/// The request field that limits a judge's answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TokenLimitField {
    /// The field that most servers support.
    #[default]
    MaxTokens,
    /// The field that OpenAI's reasoning models require.
    MaxCompletionTokens,
}

define_kind! {
    /// The model that judges, its instruction, and how it is called.
    pub struct JudgeParams {
        /// An OpenAI-compatible endpoint such as `https://api.example/v1`, or [`SELF_JUDGE`].
        pub base_url: String,
        /// The model's name at the endpoint; not needed with `self`.
        pub model: String = String::new(),
        /// Environment variable with the API key; empty sends none.
        pub api_key_env: String = String::new(),
        /// How the judge compares the completions of one prompt.
        pub mode: JudgeMode = JudgeMode::default(),
        /// The criterion.
        pub rubric: Rubric = Rubric::default(),
        /// The judge's instruction with `rubric = "custom"`: a minijinja template.
        pub template: String = String::new(),
        /// Metadata key of the reference answer.
        pub reference: String = "answer".to_owned(),
        /// The scale's worst score, which becomes 0.
        pub min: f64 = 0.0,
        /// The scale's best score, which becomes 1.
        pub max: f64 = 10.0,
        /// Sampling temperature of the judge.
        pub temperature: f32 = 0.0 => between(0.0, 2.0),
        /// Longest answer of the judge, in tokens.
        pub max_tokens: u32 = 512 => between(1, 1 << 20),
        /// The request field that carries `max_tokens`.
        pub token_limit_field: TokenLimitField = TokenLimitField::default(),
        /// Seed of the judge's sampling and of the choice of pairs.
        pub seed: u64 = 0,
        /// Most pairs compared for one prompt, each in both orders; if there are fewer, all are.
        pub max_pairs: usize = 28 => between(1, 1 << 16),
        /// Most judgments in the cache; 0 caches none.
        pub cache_entries: usize = 4096 => between(0, 1 << 24),
        /// Price of a million prompt tokens, in any one currency.
        pub prompt_price: f64 = 0.0 => at_least(0.0),
        /// Price of a million completion tokens, in the same currency.
        pub completion_price: f64 = 0.0 => at_least(0.0),
        /// Most questions at a time.
        pub max_concurrency: usize = 4 => between(1, 1024),
        /// Milliseconds for one attempt, from connecting to the last byte.
        pub timeout_ms: u64 = 60_000 => between(1, 600_000),
        /// Attempts after the first, on a failed connection, 408, 429 and 5xx only.
        pub retries: u32 = 2 => between(0, 10),
        /// Milliseconds before the first retry; each further one waits twice as long, jittered.
        pub backoff_ms: u64 = 200 => between(1, 60_000),
        /// Longest wait between attempts, in milliseconds; also for `Retry-After`.
        pub max_backoff_ms: u64 = 10_000,
        /// Failed attempts in a row that open the circuit.
        pub breaker_failures: u32 = 5 => between(1, 1000),
        /// Milliseconds that an open circuit waits before one request probes the service.
        pub breaker_cooldown_ms: u64 = 10_000 => between(1, 3_600_000),
        /// Longest answer in bytes.
        pub max_response_bytes: usize = 1_048_576 => between(64, 1 << 26),
        /// Whether plain http may leave this machine.
        pub allow_http: bool = false,
        ;
        /// The value of `api_key_env`, which [`Kind::resolve`](crate::kinds::Kind::resolve) looks up.
        pub api_key: Option<Secret>,
    }
    kind: "judge",
    typical_weight: "1.0",
    example: "base_url = \"http://127.0.0.1:9/v1\"\nmodel = \"judge\"",
    calls_out: true,
    formula: "the verdict of a language model (base_url = \"self\" is this server's): its score on the scale min to \
              max as 0 to 1, or within a group the share of pairs won; rubric = \"custom\" needs template",
}

impl JudgeParams {
    /// Whether this server's own base model judges.
    pub fn is_self_judge(&self) -> bool {
        self.base_url == SELF_JUDGE
    }

    /// How the endpoint is called.
    pub fn limits(&self) -> CallLimits {
        call_limits!(self)
    }

    /// A judge at `base_url` with every other default.
    #[cfg(test)]
    pub fn new(base_url: impl Into<String>, model: impl Into<String>) -> Self {
        let keys = serde_json::json!({ "base_url": base_url.into(), "model": model.into() });
        serde_json::from_value(keys).unwrap()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kinds::Kind;

    fn refusal(params: &JudgeParams) -> String {
        params.check().unwrap_err().sentence()
    }

    #[test]
    fn keys_are_read_and_the_key_is_never_written() {
        let read: JudgeParams = toml::from_str("base_url = \"self\"").unwrap();
        assert_eq!(read, JudgeParams::new("self", ""));
        assert!(read.is_self_judge());
        assert_eq!(read.check(), Ok(()));
        let mut keyed = JudgeParams::new("https://api.example/v1", "m");
        keyed.api_key_env = "KEY".to_owned();
        keyed.resolve(&|_| Some("sk-hunter2".to_owned())).unwrap();
        assert_eq!(keyed.check(), Ok(()));
        assert!(!format!("{keyed:?}{}", toml::to_string(&keyed).unwrap()).contains("hunter2"));
        assert!(keyed.resolve(&|_| None).is_err());
    }

    #[test]
    fn ranges_are_named() {
        let base = JudgeParams::new("https://api.example/v1", "m");
        insta::assert_snapshot!(refusal(&JudgeParams::new("https://api.example/v1", "")), @r#"model is "": it must be the name of a model that the endpoint serves"#);
        insta::assert_snapshot!(refusal(&JudgeParams { max: 0.0, ..base.clone() }), @"max is 0: it must be a finite number above min (0)");
        insta::assert_snapshot!(refusal(&JudgeParams { rubric: Rubric::Custom, ..base.clone() }), @r#"template is "": it must be a template with rubric = "custom", and empty without"#);
        assert!(refusal(&JudgeParams { min: f64::NAN, ..base.clone() }).contains("max"));
        assert!(refusal(&JudgeParams { prompt_price: -1.0, ..base }).contains("prompt_price"));
    }
}
