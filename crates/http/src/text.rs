//! `POST /v1/completions`: OpenAI's older endpoint, which continues texts or token ids.
//!
//! No chat template is applied. A text is recorded as one message of a user, beside the token ids, which
//! alone are trained on. Each of several prompts has its own record and id.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::response::{IntoResponse, Response};
use futures::{StreamExt, TryStreamExt};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value, json};

use hone_core::types::{FinishReason, Interaction, Message, PolicyVersion, Role, TokenId};
use hone_engine::{Codec, GenerateRequest, Token};

use super::body::{Call, Field, FieldTable, Fields, JsonObject, invalid, list_of, text_schema};
use super::error::ApiError;
use super::generate::prompt::{encode, token_ids};
use super::generate::run::{
    BYTES_PER_TOKEN, RequestRun, SamplingRequest, assigned_version, check_length,
};
use super::generate::sse::{self, ToWire, with_version};
use super::generate::{
    self, CHOICES, ChoiceUpdate, ClientRequest, FieldNames, MAX_CHOICES, MAX_TOP_LOGPROBS,
    SAMPLING, Usage, include_usage, metadata, shown_logprob, to_u32, token_schema,
};
use super::state::AppState;

/// OpenAI's `max_tokens` of requests that contain none.
const DEFAULT_MAX_TOKENS: u32 = 16;
/// Largest number of choices of all prompts together.
const MAX_ALL_CHOICES: usize = 128;
/// Prompts of one request that are scored at the same time.
const SCORED_AT_ONCE: usize = 8;

pub const FIELDS: FieldTable = &[
    &[
        Field::json("prompt", prompt_schema, "What is continued.").required(),
        Field::flag("add_special_tokens", "Whether the tokenizer frames a text; default true."),
        Field::integer("best_of", 1, MAX_CHOICES, "Only the value of `n`."),
        Field::flag("echo", "Whether each text, with its `logprobs`, begins with its prompt."),
        Field::integer("logprobs", 0, MAX_TOP_LOGPROBS, "Number of alternatives for each token."),
        Field::integer("prompt_logprobs", 0, MAX_TOP_LOGPROBS, "As `logprobs`, for the prompt."),
        Field::refused("suffix"),
    ],
    SAMPLING,
    CHOICES,
];

fn prompt_schema() -> Value {
    let several = |items: Value| {
        let mut list = list_of(1, items);
        list["maxItems"] = MAX_ALL_CHOICES.into();
        list
    };
    let ids = list_of(1, token_schema());
    json!({"anyOf": [text_schema(), several(text_schema()), ids, several(ids.clone())]})
}

/// A prompt of a [`TextRequest`].
#[derive(Debug, PartialEq)]
enum TextPrompt {
    /// A text, whose special tokens are recognized.
    Text(String),
    /// Token ids, to which nothing is added.
    Tokens(Vec<TokenId>),
}

/// A valid request, and what is particular to texts.
#[derive(Debug, PartialEq)]
struct TextRequest {
    request: ClientRequest,
    prompts: Vec<TextPrompt>,
    /// Whether the tokenizer puts its special tokens around a text.
    add_special_tokens: bool,
    /// Whether each text begins with its prompt.
    echo: bool,
    /// Number of alternatives per token of the prompt; `None` if its log-probabilities are not requested.
    prompt_logprobs: Option<u8>,
    /// Whether nothing is sampled (`max_tokens: 0`), because the prompt's log-probabilities are all that is wanted.
    scores_only: bool,
    include_usage: bool,
}

/// Validates a body. `vocab` bounds the token ids.
fn from_wire(body: &Map<String, Value>, vocab: usize) -> Result<TextRequest, ApiError> {
    // Without a token only a prompt's log-probabilities can be wanted, of a whole response.
    let is_set =
        |name| body.get(name).is_some_and(|value| *value != Value::Null && *value != false);
    let scores_only = body.get("max_tokens") == Some(&json!(0))
        && (is_set("echo") || is_set("prompt_logprobs"))
        && !is_set("stream");
    let mut body = Cow::Borrowed(body);
    if scores_only {
        body.to_mut().insert("max_tokens".to_owned(), json!(1));
    }
    let fields = Fields::of(&body, FIELDS)?;
    let names = FieldNames { max_tokens: "max_tokens", prompt: "prompt", parameters: "" };
    let request = generate::read(&fields, metadata(&fields)?, DEFAULT_MAX_TOKENS, vocab, names)?;
    let n = fields.whole("n").unwrap_or(1);
    if let Some(best_of) = fields.whole("best_of")
        && best_of != n
    {
        let message =
            format!("best_of is {best_of}: only n choices are sampled, so it must be {n}");
        return Err(ApiError::unsupported("best_of", message));
    }
    let top = |name| fields.whole(name).map(|top| u8::try_from(top).unwrap_or(u8::MAX));
    let prompts = prompts(&fields, vocab)?;
    let choices = to_u32(Some(n)).unwrap_or(1);
    let most = MAX_ALL_CHOICES / choices as usize;
    if prompts.len() > most {
        let message = format!(
            "prompt has {} prompts: it may have {most} if n is {n}, for {MAX_ALL_CHOICES} choices",
            prompts.len()
        );
        return Err(ApiError::field("prompt", message));
    }
    let (logprobs, echo) = (top("logprobs"), fields.is_set("echo")?);
    Ok(TextRequest {
        prompts,
        add_special_tokens: fields.boolean("add_special_tokens")?.unwrap_or(true),
        echo,
        prompt_logprobs: top("prompt_logprobs"),
        scores_only,
        include_usage: include_usage(&fields, request.stream)?,
        request: ClientRequest {
            choices,
            logprobs,
            reports_stop: echo && logprobs.is_some(),
            ..request
        },
    })
}

/// A text, several texts, a list of token ids, or several such lists.
fn prompts(fields: &Fields<'_>, vocab: usize) -> Result<Vec<TextPrompt>, ApiError> {
    const ALLOWED: &str = "a text, a list of texts, a list of token ids or a list of such lists";
    let list = match fields.get("prompt") {
        None => return Err(fields.missing("prompt", ALLOWED)),
        Some(Value::String(text)) => return Ok(vec![TextPrompt::Text(text.clone())]),
        Some(Value::Array(list)) if !list.is_empty() => list,
        Some(_) => return Err(fields.invalid("prompt", ALLOWED)),
    };
    if list.first().is_some_and(Value::is_number) {
        return Ok(vec![TextPrompt::Tokens(token_ids("prompt", list, vocab)?)]);
    }
    let has_lists = list.first().is_some_and(Value::is_array);
    let prompt = |(i, value): (usize, &Value)| {
        let path = format!("prompt[{i}]");
        match value {
            Value::Array(ids) if has_lists => Ok(TextPrompt::Tokens(token_ids(&path, ids, vocab)?)),
            _ if has_lists => Err(invalid(&path, value, "a list of token ids, as the first one")),
            Value::String(text) => Ok(TextPrompt::Text(text.clone())),
            _ => Err(invalid(&path, value, "a text")),
        }
    };
    list.iter().enumerate().map(prompt).collect()
}

pub async fn create(call: Call, JsonObject(body): JsonObject) -> Result<Response, ApiError> {
    let (arrived, Call(state, caller)) = (Instant::now(), call);
    let mut text = from_wire(&body, state.engine.info().vocab)?;
    let prompts = std::mem::take(&mut text.prompts);
    let request = &text.request;
    let estimate = prompts.iter().map(|prompt| match prompt {
        TextPrompt::Text(text) => text.len() / BYTES_PER_TOKEN,
        TextPrompt::Tokens(ids) => ids.len(),
    });
    let permit = request.admit(&state, &caller, prompts.len(), estimate.sum())?;
    let mut interactions = Vec::with_capacity(prompts.len());
    for prompt in prompts {
        let (prompt, ids) = tokenize(&state, prompt, text.add_special_tokens).await?;
        if ids.is_empty() {
            let message = "prompt is empty: it must have at least one token";
            return Err(ApiError::field("prompt", message));
        }
        check_length(&state, "prompt", &ids)?;
        let message = Message::new(Role::User, prompt);
        interactions.push(Arc::new(request.interaction(
            &state,
            &caller,
            vec![message],
            ids,
            "",
            None,
        )));
    }
    let mut scored = Vec::new();
    if request.reports_stop || text.prompt_logprobs.is_some() {
        let most = request.logprobs.max(text.prompt_logprobs).unwrap_or(0);
        scored = score(&state, &interactions, request.user.as_deref(), most).await?;
    }
    let head = TextHead {
        prompts: interactions.clone(),
        choices_per_prompt: request.choices.max(1) as usize,
        echo: text.echo,
        logprobs: request.logprobs.map(usize::from),
        prompt_logprobs: text.prompt_logprobs.map(usize::from),
        scored,
    };
    if text.scores_only {
        let version = state.engine.active_version();
        return Ok(with_version(scores(&head, state.engine.codec(), version), Some(version)));
    }
    let stream = text.request.stream;
    let (request, prompts) = (text.request, interactions);
    let sampling = SamplingRequest { request, prompts, grammar: None, permit, arrived };
    let (offsets, whole) = (vec![0; head.choices()], vec![WholeText::default(); head.choices()]);
    let run = RequestRun::new(state, sampling);
    let wire = TextWire { run, head, include_usage: text.include_usage, offsets, whole };
    sse::respond(wire, stream).await
}

/// The tokens of each prompt after the first, with their log-probabilities and `most` alternatives. They are computed
/// one after the other, because no engine returns the logits of a prefill.
async fn score(
    state: &AppState,
    prompts: &[Arc<Interaction>],
    user: Option<&str>,
    most: u8,
) -> Result<Vec<Vec<Token>>, ApiError> {
    let scores = prompts.iter().cloned().map(|prompt: Arc<Interaction>| async move {
        let version = assigned_version(state, &prompt, user);
        let (ids, stops) = (&prompt.prompt_ids, state.engine.codec().stop_ids());
        let (mut tokens, mut from) = (Vec::new(), 1);
        while from < ids.len() {
            let stop = ids[from..].iter().position(|id| stops.contains(id));
            let to = stop.map_or(ids.len(), |at| from + at + 1);
            let request = GenerateRequest::score(&ids[..from], &ids[from..to], most);
            let owner = prompt.api_key().map(Arc::from);
            let request = GenerateRequest { owner, version, ..request };
            tokens.extend(state.engine.generate(request).await?.collect().await?.tokens);
            from = to;
        }
        Ok(tokens)
    });
    futures::stream::iter(scores).buffered(SCORED_AT_ONCE).try_collect().await
}

/// The response to a request that samples nothing.
fn scores(head: &TextHead, codec: &Codec, version: PolicyVersion) -> Response {
    let whole = || WholeText { finish: Some(FinishReason::Length), ..WholeText::default() };
    let tokens = head.prompts.iter().map(|prompt| prompt.prompt_ids.len()).sum();
    let whole = (0..head.choices()).map(|_| whole());
    // There is no completion.
    let choices = head.whole(codec, whole).map(|c| TextChoice { completion_id: None, ..c });
    let completion = head.completion(version, choices.collect(), Some(Some(Usage::new(tokens, 0))));
    Json(completion).into_response()
}

async fn tokenize(
    state: &AppState,
    prompt: TextPrompt,
    framed: bool,
) -> Result<(String, Vec<TokenId>), ApiError> {
    match prompt {
        TextPrompt::Text(text) => {
            let size = (text.len(), "bytes");
            let work = move |codec: &Codec| Ok((codec.encode_text(&text, framed)?, text));
            let (ids, text) = encode(state, "prompt", size, work).await?;
            Ok((text, ids))
        }
        TextPrompt::Tokens(ids) => {
            let size = (ids.len(), "ids");
            encode(state, "prompt", size, move |codec| Ok((codec.decode_all(&ids), ids))).await
        }
    }
}

// Streams text completions as server-sent events: for each choice its prompt, if requested, then
// events with text and an event with the finish reason; then usage, if requested; then `[DONE]`. A
// failure after the first byte ends the stream with an `error` event and without `[DONE]`.

struct TextWire {
    run: RequestRun,
    head: TextHead,
    include_usage: bool,
    /// The length of each choice's text so far, in characters.
    offsets: Vec<usize>,
    /// What is kept of each choice for a whole response.
    whole: Vec<WholeText>,
}

#[derive(Clone, Default)]
struct WholeText {
    text: String,
    /// All tokens except the stop token; empty unless log-probabilities are requested.
    tokens: Vec<Token>,
    finish: Option<FinishReason>,
}

impl ToWire for TextWire {
    fn run(&mut self) -> &mut RequestRun {
        &mut self.run
    }

    fn of(&mut self, updates: Vec<ChoiceUpdate>) -> Result<String, ApiError> {
        let Some(&ChoiceUpdate { index, version, finish, .. }) = updates.last() else {
            return Ok(String::new());
        };
        let started = updates.iter().any(|update| update.started);
        let text: String = updates.iter().map(|update| update.text.as_str()).collect();
        let tokens: Vec<Token> = updates.into_iter().flat_map(|update| update.tokens).collect();
        let mut choices = Vec::new();
        let part = |text, logprobs, finish_reason| {
            let completion_id = self.head.own_id(index);
            TextChoice {
                index,
                text,
                logprobs,
                prompt_logprobs: None,
                finish_reason,
                completion_id,
            }
        };
        let codec = self.run.state.engine.codec();
        let mut elsewhere = 0;
        let offset = self.offsets.get_mut(index as usize).unwrap_or(&mut elsewhere);
        if started {
            let prompt_logprobs = self.head.prompt_logprobs(codec, index);
            let echoed = self.head.echoed(index);
            if echoed.is_some() || prompt_logprobs.is_some() {
                let logprobs =
                    echoed.and_then(|_| self.head.logprobs(codec, index, (true, &[]), offset));
                let prompt = part(echoed.unwrap_or_default().to_owned(), logprobs, None);
                choices.push(TextChoice { prompt_logprobs, ..prompt });
            }
        }
        if !text.is_empty() || !tokens.is_empty() {
            let logprobs = self.head.logprobs(codec, index, (false, &tokens), offset);
            choices.push(part(text, logprobs, None));
        }
        if let Some(finish) = finish {
            choices.push(part(String::new(), None, Some(finish.as_str())));
        }
        let usage = self.include_usage.then_some(None);
        let event = |choice| sse::json_event(&self.head.completion(version, vec![choice], usage));
        Ok(choices.into_iter().map(event).collect())
    }

    fn last(&mut self) -> String {
        let mut events = String::new();
        if self.include_usage {
            let usage = Some(Some(self.run.usage()));
            let version = self.run.version().unwrap_or_default();
            events = sse::json_event(&self.head.completion(version, Vec::new(), usage));
        }
        events.push_str(&sse::event(sse::DONE));
        events
    }

    fn keep(&mut self, update: ChoiceUpdate) -> Result<(), ApiError> {
        let own = self.whole.get_mut(update.index as usize).ok_or_else(ApiError::internal)?;
        own.text.push_str(&update.text);
        own.tokens.extend(update.tokens);
        own.finish = update.finish;
        Ok(())
    }

    fn whole(mut self) -> Result<Response, ApiError> {
        let whole = std::mem::take(&mut self.whole).into_iter();
        let choices = self.head.whole(self.run.state.engine.codec(), whole).collect();
        let version = self.run.version().unwrap_or_default();
        let completion = self.head.completion(version, choices, Some(Some(self.run.usage())));
        Ok(Json(completion).into_response())
    }
}

// What the parts of one response have in common.

/// The prompts of a response.
struct TextHead {
    prompts: Vec<Arc<Interaction>>,
    choices_per_prompt: usize,
    echo: bool,
    /// Alternatives of each token in `logprobs`, if the client wants them.
    logprobs: Option<usize>,
    /// Alternatives of each token in `prompt_logprobs`, if the client wants them.
    prompt_logprobs: Option<usize>,
    /// The tokens of each prompt after the first with their log-probabilities; empty if nothing needs them.
    scored: Vec<Vec<Token>>,
}

impl TextHead {
    fn choices(&self) -> usize {
        self.prompts.len() * self.choices_per_prompt
    }

    fn prompt(&self, index: u32) -> Option<&Interaction> {
        self.prompts.get(index as usize / self.choices_per_prompt).map(Arc::as_ref)
    }

    fn whole<'a>(
        &'a self,
        codec: &'a Codec,
        choices: impl Iterator<Item = WholeText> + 'a,
    ) -> impl Iterator<Item = TextChoice> + 'a {
        choices.zip(0..).map(move |(WholeText { text, tokens, finish }, index)| TextChoice {
            index,
            text: self.echoed(index).unwrap_or_default().to_owned() + text.as_str(),
            logprobs: self.logprobs(codec, index, (true, &tokens), &mut 0),
            prompt_logprobs: self.prompt_logprobs(codec, index),
            finish_reason: Some(finish.unwrap_or(FinishReason::Stop).as_str()),
            completion_id: self.own_id(index),
        })
    }

    /// The text of a choice's prompt, if the client wants it before the completion.
    fn echoed(&self, index: u32) -> Option<&str> {
        let prompt = self.prompt(index).filter(|_| self.echo)?;
        prompt.messages.first().map(|message| message.content.as_str())
    }

    /// The log-probabilities of sampled tokens, after those of the prompt if `echoed`.
    fn logprobs(
        &self,
        codec: &Codec,
        index: u32,
        (echoed, sampled): (bool, &[Token]),
        offset: &mut usize,
    ) -> Option<TextLogprobs> {
        let most = self.logprobs?;
        let mut all = TextLogprobs::default();
        if echoed
            && self.echo
            && let Some(first) = self.prompt(index)?.prompt_ids.first()
        {
            all.add(codec, *first, None, most, offset);
            for token in self.scored_of(index) {
                all.add(codec, token.id, Some(token), most, offset);
            }
        }
        for token in sampled {
            all.add(codec, token.id, Some(token), most, offset);
        }
        Some(all)
    }

    /// The tokens of a prompt, if requested. The first has no log-probability.
    fn prompt_logprobs(&self, codec: &Codec, index: u32) -> Option<Vec<PromptLogprobs>> {
        let most = self.prompt_logprobs?;
        let own = |token: &Token| {
            let entry = |id: TokenId, logprob: f32, rank: Option<usize>| {
                let logprob = shown_logprob(logprob);
                (id, PromptLogprob { logprob, rank, decoded_token: shown(codec, id) })
            };
            let ranked = token.top.iter().take(most).zip(1..);
            let rank = token.top.iter().position(|(id, _)| *id == token.id).map(|place| place + 1);
            let ranked = ranked.map(|((id, logprob), rank)| entry(*id, *logprob, Some(rank)));
            Some(ranked.chain([entry(token.id, token.logprob, rank)]).collect())
        };
        Some([None].into_iter().chain(self.scored_of(index).iter().map(own)).collect())
    }

    fn scored_of(&self, index: u32) -> &[Token] {
        self.scored.get(index as usize / self.choices_per_prompt).map_or(&[], Vec::as_slice)
    }

    fn own_id(&self, index: u32) -> Option<String> {
        let prompt = self.prompt(index).filter(|_| self.prompts.len() > 1)?;
        Some(prompt.completion_id())
    }

    fn completion(
        &self,
        version: PolicyVersion,
        choices: Vec<TextChoice>,
        usage: Option<Option<Usage>>,
    ) -> TextCompletion<'_> {
        let first = self.prompts.first();
        TextCompletion {
            id: first.map(|prompt| prompt.completion_id()).unwrap_or_default(),
            object: "text_completion",
            created: first.map_or(0, |prompt| prompt.created / 1000),
            model: first.map_or("", |prompt| &prompt.model),
            system_fingerprint: version.fingerprint(),
            choices,
            usage,
        }
    }
}

// The shapes of OpenAI's older completions.

/// The response, and each event of a stream.
#[derive(Serialize, JsonSchema)]
pub struct TextCompletion<'a> {
    /// That of the first prompt.
    id: String,
    #[schemars(extend("const" = "text_completion"))]
    object: &'static str,
    /// Seconds since 1970.
    created: u64,
    model: &'a str,
    system_fingerprint: String,
    choices: Vec<TextChoice>,
    /// Absent in a stream unless requested; then null in every event except the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<Usage>>,
}

/// A choice, or its new part.
#[derive(Serialize, JsonSchema)]
struct TextChoice {
    index: u32,
    text: String,
    logprobs: Option<TextLogprobs>,
    /// vLLM's form of the prompt's log-probabilities, by token id; only if the request wants it.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<Vec<PromptLogprobs>>,
    #[schemars(extend("enum" = ["stop", "length", null]))]
    finish_reason: Option<&'static str>,
    /// Only if the request has several prompts: the id of this prompt's completion, for feedback.
    #[serde(skip_serializing_if = "Option::is_none")]
    completion_id: Option<String>,
}

/// A token at a place of a prompt.
#[derive(Serialize, JsonSchema)]
struct PromptLogprob {
    logprob: f32,
    /// 1 for the most probable token; null if it is not among the alternatives.
    rank: Option<usize>,
    decoded_token: String,
}

/// A place of a prompt, by token id.
type PromptLogprobs = Option<BTreeMap<TokenId, PromptLogprob>>;

/// Natural-log probabilities of the tokens of a choice, also of an echoed prompt. The stop token is left out, as in
/// the text, unless the prompt is echoed, because clients that echo a prompt drop the last token.
#[derive(Default, Serialize, JsonSchema)]
struct TextLogprobs {
    tokens: Vec<String>,
    /// Null for the first token of a prompt.
    token_logprobs: Vec<Option<f32>>,
    /// The most probable tokens, and the sampled one.
    top_logprobs: Vec<Option<BTreeMap<String, f32>>>,
    /// Where each token begins in the choice's text, in characters.
    text_offset: Vec<usize>,
}

impl TextLogprobs {
    /// Adds a token with at most `most` alternatives, or without scores the first one of a prompt. `offset` is its place
    /// in the choice's text, which the place after it replaces.
    fn add(
        &mut self,
        codec: &Codec,
        id: TokenId,
        scores: Option<&Token>,
        most: usize,
        offset: &mut usize,
    ) {
        let text = shown(codec, id);
        self.text_offset.push(*offset);
        let begins = |byte: &&u8| (**byte & 0xC0) != 0x80;
        *offset += codec.token_bytes(id).iter().filter(begins).count();
        self.token_logprobs.push(scores.map(|token| shown_logprob(token.logprob)));
        self.top_logprobs.push(scores.map(|token| {
            let top = token.top.iter().take(most);
            let top = top.map(|(id, logprob)| (shown(codec, *id), shown_logprob(*logprob)));
            top.chain([(text.clone(), shown_logprob(token.logprob))]).collect()
        }));
        self.tokens.push(text);
    }
}

/// A token's text, or its bytes as OpenAI writes them if they are no whole characters.
fn shown(codec: &Codec, id: TokenId) -> String {
    String::from_utf8(codec.token_bytes(id)).unwrap_or_else(|error| {
        let mut text = "bytes:".to_owned();
        for byte in error.as_bytes() {
            // Writing to a string cannot fail.
            let _written = write!(text, "\\x{byte:02x}");
        }
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::body::testing::assert_agreement;

    #[test]
    fn the_reader_accepts_what_the_schema_does() {
        let base = json!({"model": "default", "prompt": "a", "stream": true, "max_tokens": 256});
        // It must be equal to `n`.
        let except = ["best_of"];
        assert_agreement(FIELDS, &base, &except, |body| from_wire(body, 1000).map(drop));
    }
}
