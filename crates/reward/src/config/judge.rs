//! The keys of `kind = "judge"`.

use serde::{Deserialize, Serialize};

use hone_core::config::describe::Problem;
use hone_core::config::quoted;
use hone_core::config::range::{at_least, between};
use hone_core::config::secret::{Secret, from_environment};

use super::webhook;
use super::webhook::{CallLimits, call_limits, check_url};

/// How a judge looks at the completions of one prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JudgeMode {
    /// Each completion by itself, on a scale.
    #[default]
    Score,
    /// Two at a time, in both orders; the value is the share of comparisons won.
    Pairwise,
    /// All at once, best first; the value falls from 1 to 0 by rank.
    Rank,
}

/// What a judge judges by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rubric {
    /// Whether the answer does what was asked.
    #[default]
    Helpfulness,
    /// Whether it agrees with `metadata[reference]`.
    Correctness,
    /// Whether it avoids harm.
    Safety,
    /// What `template` says.
    Custom,
}

/// The request field that limits a judge's answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TokenLimitField {
    /// What most servers know.
    #[default]
    MaxTokens,
    /// What OpenAI's reasoning models demand.
    MaxCompletionTokens,
}

/// A reward that a language model gives.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JudgeParams {
    /// An OpenAI-compatible endpoint such as `https://api.example/v1`, or `self` for this
    /// server's own base model.
    pub base_url: String,
    /// The model to ask for; not needed with `self`.
    #[serde(default)]
    pub model: String,
    /// Environment variable with the API key; empty sends none.
    #[serde(default)]
    pub api_key_env: String,
    /// What the loader found in `api_key_env`.
    #[serde(skip)]
    pub api_key: Option<Secret>,
    /// One by one, in pairs, or ranked.
    #[serde(default)]
    pub mode: JudgeMode,
    /// What to judge by.
    #[serde(default)]
    pub rubric: Rubric,
    /// The judge's instruction with `rubric = "custom"`: a minijinja template.
    #[serde(default)]
    pub template: String,
    /// Metadata key of the reference answer.
    #[serde(default = "super::answer_key")]
    pub reference: String,
    /// The scale's worst score, which becomes 0.
    #[serde(default)]
    pub min: f64,
    /// The scale's best score, which becomes 1.
    #[serde(default = "max")]
    pub max: f64,
    /// Sampling temperature of the judge.
    #[serde(default)]
    pub temperature: f32,
    /// Longest answer of the judge, in tokens.
    #[serde(default = "max_tokens")]
    pub max_tokens: u32,
    /// The request field that carries `max_tokens`.
    #[serde(default)]
    pub token_limit_field: TokenLimitField,
    /// Seeds the judge's sampling and the order in which candidates are shown.
    #[serde(default)]
    pub seed: u64,
    /// Pairs compared for one prompt (each in both orders): all of them where this is enough.
    #[serde(default = "max_pairs")]
    pub max_pairs: usize,
    /// Candidates that may be ranked in one question; a larger group is not ranked.
    #[serde(default = "max_candidates")]
    pub max_candidates: usize,
    /// Judgements remembered; 0 remembers none.
    #[serde(default = "cache_entries")]
    pub cache_entries: usize,
    /// Price of a million prompt tokens, in any one currency.
    #[serde(default)]
    pub prompt_price: f64,
    /// Price of a million completion tokens, in the same currency.
    #[serde(default)]
    pub completion_price: f64,
    /// Questions at once.
    #[serde(default = "webhook::max_concurrency")]
    pub max_concurrency: usize,
    /// Milliseconds for one attempt, from connecting to the last byte.
    #[serde(default = "timeout_ms")]
    pub timeout_ms: u64,
    /// Attempts after the first, on a failed connection, 408, 429 and 5xx only.
    #[serde(default = "webhook::retries")]
    pub retries: u32,
    /// Milliseconds before the first retry; each further one waits twice as long, jittered.
    #[serde(default = "webhook::backoff_ms")]
    pub backoff_ms: u64,
    /// Longest wait between attempts, in milliseconds; also for `Retry-After`.
    #[serde(default = "webhook::max_backoff_ms")]
    pub max_backoff_ms: u64,
    /// Failed attempts in a row that open the circuit.
    #[serde(default = "webhook::breaker_failures")]
    pub breaker_failures: u32,
    /// Milliseconds that an open circuit rests before one request probes the service.
    #[serde(default = "webhook::breaker_cooldown_ms")]
    pub breaker_cooldown_ms: u64,
    /// Longest answer in bytes.
    #[serde(default = "webhook::max_response_bytes")]
    pub max_response_bytes: usize,
    /// Whether plain http may leave this machine.
    #[serde(default)]
    pub allow_http: bool,
}

fn max() -> f64 {
    10.0
}
fn max_tokens() -> u32 {
    512
}
fn max_pairs() -> usize {
    28
}
fn max_candidates() -> usize {
    16
}
fn cache_entries() -> usize {
    4096
}
fn timeout_ms() -> u64 {
    60_000
}

/// The `base_url` that means this server's own base model.
const OWN: &str = "self";

impl JudgeParams {
    /// A judge at `base_url`, everything else at its default.
    pub fn new(base_url: impl Into<String>, model: impl Into<String>) -> Self {
        Self {
            base_url: base_url.into(),
            model: model.into(),
            api_key_env: String::new(),
            api_key: None,
            mode: JudgeMode::default(),
            rubric: Rubric::default(),
            template: String::new(),
            reference: super::answer_key(),
            min: 0.0,
            max: max(),
            temperature: 0.0,
            max_tokens: max_tokens(),
            token_limit_field: TokenLimitField::default(),
            seed: 0,
            max_pairs: max_pairs(),
            max_candidates: max_candidates(),
            cache_entries: cache_entries(),
            prompt_price: 0.0,
            completion_price: 0.0,
            max_concurrency: webhook::max_concurrency(),
            timeout_ms: timeout_ms(),
            retries: webhook::retries(),
            backoff_ms: webhook::backoff_ms(),
            max_backoff_ms: webhook::max_backoff_ms(),
            breaker_failures: webhook::breaker_failures(),
            breaker_cooldown_ms: webhook::breaker_cooldown_ms(),
            max_response_bytes: webhook::max_response_bytes(),
            allow_http: false,
        }
    }

    /// Whether this server's own base model judges.
    pub fn is_own_model(&self) -> bool {
        self.base_url == OWN
    }

    /// How the endpoint is called.
    pub fn limits(&self) -> CallLimits {
        call_limits!(self)
    }

    /// Puts the API key in its place; the loader calls it with the environment.
    ///
    /// # Errors
    /// The rest of a sentence that begins with the key `api_key_env`.
    pub fn resolve(&mut self, lookup: impl Fn(&str) -> Option<String>) -> Result<(), String> {
        self.api_key = from_environment(&self.api_key_env, lookup)?;
        Ok(())
    }

    /// Checks every range; `key` is the part's, as in `route[0].reward[1]`. Whether the template
    /// can be read is found when the judge is built.
    ///
    /// # Errors
    /// The first value that is out of range, as a sentence.
    pub fn check(&self, key: &str) -> Result<(), Problem> {
        let of = |name: &str| format!("{key}.{name}");
        if !self.is_own_model() {
            check_url(&of("base_url"), &self.base_url, self.allow_http)?;
            if self.model.is_empty() {
                let allowed = "the name of a model that the endpoint serves";
                return Err(Problem::value(&of("model"), quoted(""), allowed));
            }
        }
        if (self.rubric == Rubric::Custom) == self.template.trim().is_empty() {
            let allowed = "a template with rubric = \"custom\", and empty without";
            return Err(Problem::value(&of("template"), quoted(&self.template), allowed));
        }
        let width = self.max - self.min;
        if !(self.min.is_finite() && width.is_finite() && width > 0.0) {
            let allowed = format!("a finite number above min ({})", self.min);
            return Err(Problem::value(&of("max"), self.max, &allowed));
        }
        between(&of("temperature"), self.temperature, 0.0, 2.0)?;
        between(&of("max_tokens"), self.max_tokens, 1, 1 << 20)?;
        between(&of("max_pairs"), self.max_pairs, 1, 1 << 16)?;
        between(&of("max_candidates"), self.max_candidates, 2, 256)?;
        between(&of("cache_entries"), self.cache_entries, 0, 1 << 24)?;
        at_least(&of("prompt_price"), self.prompt_price, 0.0)?;
        at_least(&of("completion_price"), self.completion_price, 0.0)?;
        between(&of("max_concurrency"), self.max_concurrency, 1, 1024)?;
        self.limits().check(key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(params: &JudgeParams) -> String {
        params.check("reward[0]").unwrap_err().sentence()
    }

    #[test]
    fn defaults_stand_in_the_text_and_in_new() {
        let read: JudgeParams = toml::from_str("base_url = \"self\"").unwrap();
        assert_eq!(read, JudgeParams::new("self", ""));
        assert!(read.is_own_model());
        assert_eq!(read.check("r"), Ok(()));
        let mut keyed = JudgeParams::new("https://api.example/v1", "m");
        keyed.api_key_env = "KEY".to_owned();
        keyed.resolve(|_| Some("sk-hunter2".to_owned())).unwrap();
        assert_eq!(keyed.check("r"), Ok(()));
        assert!(!format!("{keyed:?}{}", toml::to_string(&keyed).unwrap()).contains("hunter2"));
        assert!(keyed.resolve(|_| None).is_err());
    }

    #[test]
    fn ranges_are_named() {
        let base = JudgeParams::new("https://api.example/v1", "m");
        insta::assert_snapshot!(refusal(&JudgeParams::new("https://api.example/v1", "")), @r#"reward[0].model is "": it must be the name of a model that the endpoint serves"#);
        insta::assert_snapshot!(refusal(&JudgeParams { max: 0.0, ..base.clone() }), @"reward[0].max is 0: it must be a finite number above min (0)");
        insta::assert_snapshot!(refusal(&JudgeParams { rubric: Rubric::Custom, ..base.clone() }), @r#"reward[0].template is "": it must be a template with rubric = "custom", and empty without"#);
        assert!(refusal(&JudgeParams { min: f64::NAN, ..base.clone() }).contains("max"));
        assert!(refusal(&JudgeParams { prompt_price: -1.0, ..base }).contains("prompt_price"));
    }
}
