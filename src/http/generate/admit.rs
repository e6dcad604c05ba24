//! What a request may use: the limits of the server, of its key and of the queue. All are checked before the
//! work of rendering and tokenizing a prompt.

use hone_core::types::SamplingParams;
use hone_engine::EngineError;

use crate::http::AppState;
use crate::http::auth::{Caller, KeyPermit};
use crate::http::error::ApiError;

/// Usual bytes of a token.
pub const BYTES_PER_TOKEN: usize = 4;

/// What a request asks for, as far as it is known before its prompts are tokenized.
pub struct WantedTokens<'a> {
    pub params: &'a SamplingParams,
    /// The field of the token limit, for error messages.
    pub max_tokens_field: &'a str,
    /// Number of choices of all prompts together.
    pub choices: usize,
    /// The field that asks for several choices, for error messages.
    pub choices_field: &'a str,
    /// Estimated tokens of all prompts together.
    pub prompt_tokens: usize,
}

/// Admits a request or refuses it. Returns what its key permits, for the run; `None` without a key.
pub fn admit(
    state: &AppState,
    caller: &Caller,
    wanted: &WantedTokens<'_>,
) -> Result<Option<KeyPermit>, ApiError> {
    check_max_tokens(wanted, state.config.max_tokens)?;
    let longest = u64::from(wanted.params.max_tokens).min(state.engine.info().context as u64);
    let completions = (wanted.choices as u64).saturating_mul(longest);
    let permit = caller.begin(completions.saturating_add(wanted.prompt_tokens as u64))?;
    state.engine.admits(&caller.owner(), wanted.choices).map_err(|error| refusal(error, wanted))?;
    Ok(permit)
}

/// The answer to a request that the engine does not admit. If it never can, repeating it is of no use, so
/// the answer names the field.
fn refusal(error: EngineError, wanted: &WantedTokens<'_>) -> ApiError {
    let EngineError::TooManyChoices { choices, most } = error else { return error.into() };
    let name = wanted.choices_field;
    let message = format!(
        "{name} asks for {choices} choices at once: there can be at most {most} (engine.slots, and \
         engine.queue or a key's share of it)"
    );
    ApiError::field(name, message)
}

/// Refuses a request for more tokens than the server permits; 0 permits all.
fn check_max_tokens(wanted: &WantedTokens<'_>, most: u32) -> Result<(), ApiError> {
    let (name, max_tokens) = (wanted.max_tokens_field, wanted.params.max_tokens);
    if most == 0 || max_tokens <= most {
        return Ok(());
    }
    let message = format!("{name} is {max_tokens}: it must be at most {most} (server.max_tokens)");
    Err(ApiError::field(name, message))
}
