//! Makes the tokens of prompts. A conversation goes on from the recorded tokens of a completion that its client
//! returns.
//!
//! The ledger finds a completion by a digest of the messages that led to it and of its own message. The last
//! message of the assistant that is found counts: the longest recorded beginning. Completions of the same
//! session come first, and then the newest. [`Codec::continued_chat`](hone_engine::Codec::continued_chat)
//! decides whether the recorded tokens can be the beginning of the prompt.
//!
//! Invariants: only completions of the same API key are found; what was not recorded, or was erased, is not
//! found; a prompt never depends on the ledger in anything but the tokens that spell its text.

use std::collections::HashMap;
use std::sync::Arc;

use serde_json::Value;

use hone_core::digest::Digest;
use hone_core::types::{
    ChatOptions, Continuation, FinishReason, Interaction, InteractionId, Message, Role, Sample,
    SampleOrigin, TokenId,
};
use hone_engine::{Codec, EngineError, ToolFormat};
use hone_store::{Op, Store, StoreError};

use super::tokenize_apart;
use crate::auth::Caller;
use crate::body::invalid;
use crate::chat::answer::{WholeMessage, recorded, recorded_form};
use crate::error::ApiError;
use crate::state::{AppState, RecentTurns, TurnDigest};

/// Bytes of texts, or ids, for each token of the context. A token has about four bytes: four times the context.
const SIZE_PER_TOKEN: usize = 16;
/// What a request may have whatever the context is.
const LEAST_SIZE: usize = 64 << 10;
/// Bytes of texts that are tokenized on the thread of the request: this takes about a millisecond.
const INLINE_SIZE: usize = 1 << 10;
/// Bytes that count for each message and each call beside their texts, as the chat template marks them.
const MARKS: usize = 16;

/// The size of what a request gives to the tokenizer, and its unit: `bytes` of texts or token `ids`.
pub type TextSize = (usize, &'static str);

/// How the model writes calls of functions.
pub fn tool_format(state: &AppState) -> ToolFormat {
    state.config.tool_format.or(state.engine.codec().tool_format())
}

/// The tokens of a conversation, which the request has in `field`; `generate` adds the generation prompt.
pub async fn tokenize(
    state: &AppState,
    field: &str,
    messages: &[Message],
    options: &ChatOptions,
    generate: bool,
) -> Result<Vec<TokenId>, ApiError> {
    let size = size(messages, options);
    let (messages, options, format) = (messages.to_vec(), options.clone(), tool_format(state));
    let work = move |codec: &Codec| codec.chat(&messages, &options, format, generate);
    encode(state, field, (size, "bytes"), work).await
}

/// The bytes that a chat template may write: texts, names, reasoning, calls, ids, functions, variables and marks.
pub fn size(messages: &[Message], options: &ChatOptions) -> usize {
    let length = |text: &Option<String>| text.as_ref().map_or(0, String::len);
    let said = messages.iter().map(|message| {
        let calls = message.tool_calls.iter();
        let calls = calls.map(|c| MARKS + c.id.len() + c.name.len() + c.arguments.len());
        MARKS
            + message.content.len()
            + length(&message.name)
            + length(&message.tool_call_id)
            + length(&message.reasoning)
            + calls.sum::<usize>()
    });
    let functions = options.tools.iter().map(|tool| {
        let schema = tool.parameters.as_ref().map_or(0, |schema| schema.to_string().len());
        tool.name.len() + length(&tool.description) + schema
    });
    let variables = options.template_variables.iter();
    let variables = variables.map(|(name, value)| name.len() + value.to_string().len());
    said.sum::<usize>() + functions.sum::<usize>() + variables.sum::<usize>()
}

/// Runs `work` on texts of this size, which the request has in `field`, where it delays no other request.
/// Every text of a client that becomes tokens passes here or [`encode_apart`].
pub async fn encode<T: Send + 'static>(
    state: &AppState,
    field: &str,
    size: TextSize,
    work: impl FnOnce(&Codec) -> Result<T, EngineError> + Send + 'static,
) -> Result<T, ApiError> {
    check_size(state, field, size)?;
    match size.0 {
        ..=INLINE_SIZE => Ok(work(state.engine.codec())?),
        _ => encode_apart(state, work).await,
    }
}

/// [`encode`] for texts that were measured before, however short they are: a list may have many of them.
pub async fn encode_apart<T: Send + 'static>(
    state: &AppState,
    work: impl FnOnce(&Codec) -> Result<T, EngineError> + Send + 'static,
) -> Result<T, ApiError> {
    let codec = state.engine.codec().clone();
    let done = tokenize_apart(move || work(&codec)).await;
    Ok(done.map_err(|error| ApiError::logged("the tokenizer panicked", &error))??)
}

/// Refuses a field that has much more than a usual prompt of the model can have, before any work on it.
pub fn check_size(state: &AppState, field: &str, (size, unit): TextSize) -> Result<(), ApiError> {
    let most = state.engine.info().context.saturating_mul(SIZE_PER_TOKEN).max(LEAST_SIZE);
    if size <= most {
        return Ok(());
    }
    Err(ApiError::too_large(field, format!("{field} has {size} {unit}: it may have {most}")))
}

/// The token ids in a list at `path` of a body, each below `vocab`.
pub fn token_ids(path: &str, list: &[Value], vocab: usize) -> Result<Vec<TokenId>, ApiError> {
    let id = |(at, value): (usize, &Value)| {
        let found = value.as_u64().and_then(|id| TokenId::try_from(id).ok());
        let found = found.filter(|id| (*id as usize) < vocab);
        let allowed = format_args!("a token id below {vocab}");
        found.ok_or_else(|| invalid(&format!("{path}[{at}]"), value, allowed))
    };
    list.iter().enumerate().map(id).collect()
}

// Recorded beginnings.

/// Messages of the assistant that are looked up, counted from the last one.
const MAX_LOOKUPS: usize = 64;
/// Recorded completions with the same digest that are compared.
const MAX_TWINS: usize = 8;

/// The prompt of a conversation, from the recorded tokens of its last recorded completion on, if there is one, and how
/// it continues that.
pub async fn chat_prompt(
    state: &AppState,
    caller: &Caller,
    field: &str,
    messages: &[Message],
    options: &ChatOptions,
    session: Option<&str>,
) -> Result<(Vec<TokenId>, Option<Continuation>), ApiError> {
    if !messages.iter().any(|message| message.role == Role::Assistant) {
        let ids = tokenize(state, field, messages, options, true).await?;
        return Ok((ids, None));
    }
    let history = Arc::new(history_of(caller.key_id.as_deref(), messages));
    let look_up = || {
        let (history, session) = (Arc::clone(&history), session.map(str::to_owned));
        state.read_ledger(move |store| find(store, &history, session.as_deref()))
    };
    let mut found = look_up().await?;
    if has_recent_after(&history, &found, &state.recent_turns) {
        state.store.flush().await?;
        found = look_up().await?;
    }
    let Found { turn, edited, .. } = found;
    let (mut outcome, mut prefix_tokens) = (if edited.is_some() { "edited" } else { "unknown" }, 0);
    let mut ids = None;
    if let Some(turn) = &turn {
        let codec = state.engine.codec();
        let was = &turn.interaction;
        if was.template_hash != codec.template_hash() {
            outcome = "template";
        } else if was.chat.callable() != options.callable()
            || was.chat.template_variables != options.template_variables
        {
            outcome = "options";
        } else {
            let known = [&was.prompt_ids[..], &turn.sample.ids].concat();
            let (size, format) = ((size(messages, options), "bytes"), tool_format(state));
            let (messages, options) = (messages.to_vec(), options.clone());
            let work =
                move |codec: &Codec| codec.continued_chat(&known, &messages, &options, format);
            let prompt = encode(state, field, size, work).await?;
            match prompt.kept {
                Err(reason) => outcome = reason.as_str(),
                Ok(kept) => {
                    prefix_tokens = u32::try_from(kept).unwrap_or(u32::MAX);
                    outcome = if edited.is_some() { "edited" } else { "exact" };
                }
            }
            ids = Some(prompt.ids);
        }
    }
    state.metrics.http_continued_prompts.with_label_values(&[outcome]).inc();
    let ids = match ids {
        Some(ids) => ids,
        None => tokenize(state, field, messages, options, true).await?,
    };
    let from = turn.map(|turn| (turn.interaction, turn.sample.choice));
    let is_edited = edited.is_some();
    let continues = from.or(edited.map(|interaction| (interaction, 0))).map(|(from, choice)| {
        let conversation = from.continues.as_ref().map_or(from.id, |first| first.conversation);
        Continuation {
            conversation,
            interaction: from.id,
            choice,
            prefix_tokens,
            edited: is_edited,
        }
    });
    Ok((ids, continues))
}

/// The digests of the messages before each message of the assistant, and with it, in their order.
type History = Vec<[TurnDigest; 2]>;

fn history_of(key: Option<&str>, messages: &[Message]) -> History {
    let mut digest = ConversationDigest::new(key);
    let mut turns = Vec::new();
    for message in messages {
        let before = digest.value();
        digest.add(message);
        if message.role == Role::Assistant {
            turns.push([before, digest.value()]);
        }
    }
    turns.split_off(turns.len().saturating_sub(MAX_LOOKUPS))
}

/// Whether the ledger may soon have more of a conversation than what was found.
fn has_recent_after(history: &History, found: &Found, recent: &RecentTurns) -> bool {
    let mut later = history.iter().skip(found.turns);
    let edited = later.clone().next().filter(|_| found.edited.is_none());
    edited.is_some_and(|[before, _]| recent.contains(before))
        || later.any(|[_, with]| recent.contains(with))
}

/// The digest of a conversation, message by message. Clients need not return what it leaves out: reasoning, white
/// space around an answer and in arguments, and the ids of calls, of which only the order counts.
#[derive(Clone)]
struct ConversationDigest {
    digest: Digest,
    /// The number of each call, by its id.
    calls: HashMap<String, usize>,
}

impl ConversationDigest {
    fn new(key: Option<&str>) -> Self {
        let digest = Digest::new().field(if key.is_some() { "key" } else { "" });
        Self { digest: digest.field(key.unwrap_or_default()), calls: HashMap::new() }
    }

    fn add(&mut self, message: &Message) {
        let is_own = message.role == Role::Assistant;
        let content = if is_own { message.content.trim() } else { &message.content };
        let mut digest = std::mem::take(&mut self.digest)
            .field(message.role.as_str())
            .field(content)
            .field(message.name.as_deref().unwrap_or_default())
            .field((message.tool_calls.len() as u64).to_le_bytes());
        for call in &message.tool_calls {
            let arguments = serde_json::from_str::<serde_json::Value>(&call.arguments);
            let arguments =
                arguments.map_or_else(|_| call.arguments.clone(), |json| json.to_string());
            digest = digest.field(&call.name).field(arguments);
            let next = self.calls.len();
            self.calls.entry(call.id.clone()).or_insert(next);
        }
        if let Some(id) = &message.tool_call_id {
            let call = self.calls.get(id).map_or(u64::MAX, |number| *number as u64);
            digest = digest.field(call.to_le_bytes());
        }
        self.digest = digest;
    }

    fn value(&self) -> TurnDigest {
        self.digest.clone().prefix()
    }
}

/// A recorded completion with its prompt.
#[derive(Clone)]
pub struct RecordedTurn {
    pub interaction: Interaction,
    pub sample: Sample,
}

/// What the ledger has of a conversation.
struct Found {
    /// Number of the looked up turns up to the last recorded one.
    turns: usize,
    /// The last recorded completion among the messages.
    turn: Option<RecordedTurn>,
    /// The prompt whose recorded completion the client replaced by the next message of the assistant.
    edited: Option<Interaction>,
}

fn find(store: &Store, history: &History, session: Option<&str>) -> Result<Found, StoreError> {
    let (mut turn, mut turns) = (None, 0);
    for (number, [_, with]) in history.iter().enumerate().rev() {
        turn = recorded_turn(store, *with, session)?;
        if turn.is_some() {
            turns = number + 1;
            break;
        }
    }
    let mut edited = None;
    if let Some([before, _]) = history.get(turns) {
        // Without a session, a known beginning shows that it is the same conversation.
        let prompts = store.turns(*before, MAX_TWINS)?;
        for (id, _) in prompts.into_iter().filter(|(_, choice)| choice.is_none()) {
            let Some(prompt) = store.interaction(id)? else { continue };
            let same = match session {
                Some(_) => prompt.session() == session,
                None => turn.is_some(),
            };
            if same && is_finished(store, id)? {
                edited = Some(prompt);
                break;
            }
        }
    }
    Ok(Found { turns, turn, edited })
}

/// The completion with a digest: one of the session if there is one, else the newest.
fn recorded_turn(
    store: &Store,
    digest: TurnDigest,
    session: Option<&str>,
) -> Result<Option<RecordedTurn>, StoreError> {
    let mut newest = None;
    for (id, choice) in store.turns(digest, MAX_TWINS)? {
        let Some(interaction) = store.interaction(id)? else { continue };
        let same_session = session.is_none() || interaction.session() == session;
        if newest.is_some() && !same_session {
            continue;
        }
        let is_named = |sample: &Sample| {
            sample.origin == SampleOrigin::Served && Some(sample.choice) == choice
        };
        let Some(sample) = store.samples_of(id)?.into_iter().find(is_named) else { continue };
        newest = Some(RecordedTurn { interaction, sample });
        if same_session {
            break;
        }
    }
    Ok(newest)
}

/// Whether a prompt has a completion that its client got as a whole.
fn is_finished(store: &Store, id: InteractionId) -> Result<bool, StoreError> {
    let is_whole = |sample: &Sample| {
        sample.origin == SampleOrigin::Served && sample.finish != FinishReason::Cancelled
    };
    Ok(store.samples_of(id)?.iter().any(is_whole))
}

/// Makes the operations that let later prompts find a prompt and its completions; none for a text without roles.
pub struct PromptTurns(Option<ConversationDigest>);

impl PromptTurns {
    /// The messages of a prompt.
    pub fn new(interaction: &Interaction) -> Self {
        Self((!interaction.is_text()).then(|| {
            let mut digest = ConversationDigest::new(interaction.api_key());
            interaction.messages.iter().for_each(|message| digest.add(message));
            digest
        }))
    }

    /// The prompt's operation.
    pub fn prompt(&self, state: &AppState, interaction: &Interaction) -> Option<Op> {
        self.0.as_ref().map(|digest| turn(state, interaction, digest, None))
    }

    /// A completion's operation; none for a completion that its client did not get as a whole.
    pub fn completion(
        &self,
        state: &AppState,
        interaction: &Interaction,
        sample: &Sample,
    ) -> Option<Op> {
        let whole = |_: &&ConversationDigest| sample.finish != FinishReason::Cancelled;
        let mut digest = self.0.as_ref().filter(whole)?.clone();
        let codec = state.engine.codec();
        let form = recorded_form(codec, interaction, tool_format(state));
        let message = recorded(codec, form.as_ref(), sample, &interaction.stop);
        let (_, content, calls) = WholeMessage::split(message.items);
        digest.add(&Message { tool_calls: calls, ..Message::new(Role::Assistant, content) });
        Some(turn(state, interaction, &digest, Some(sample.choice)))
    }
}

fn turn(
    state: &AppState,
    interaction: &Interaction,
    digest: &ConversationDigest,
    choice: Option<u32>,
) -> Op {
    let digest = digest.value();
    state.recent_turns.add(digest);
    Op::Turn { digest, interaction: interaction.id, choice }
}
