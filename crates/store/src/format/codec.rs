//! Encodes records: one version byte, then postcard.
//!
//! postcard stores no field names, so the order of fields and variants in `hone_core::types` is the format;
//! `tests/fixtures` holds files in it. An enum may get further variants at its end. A struct that changes
//! gets a new version. [`Interaction`] and what it contains leave fields out of their JSON, so they are
//! stored as tuples of their fields.

use serde_json::{Map, Value};

use hone_core::types::{
    ChatOptions, Group, Interaction, Message, PolicyRecord, Reward, Role, Sample, StepRecord, Tool,
    ToolCall, ToolChoice,
};

use crate::error::StoreError;

pub(crate) const RECORD_VERSION: u8 = 1;

pub(crate) trait LedgerRecord: Sized {
    /// The table, for error messages.
    const TABLE: &'static str;
    /// Appends the stored form to `bytes`.
    fn write(&self, bytes: Vec<u8>) -> postcard::Result<Vec<u8>>;
    /// Reads the stored form. Returns the bytes after it too.
    fn read(bytes: &[u8]) -> postcard::Result<(Self, &[u8])>;
}

macro_rules! stored_as_is {
    ($($record:ident in $table:literal;)+) => {$(
        impl LedgerRecord for $record {
            const TABLE: &'static str = $table;

            fn write(&self, bytes: Vec<u8>) -> postcard::Result<Vec<u8>> {
                postcard::to_extend(self, bytes)
            }

            fn read(bytes: &[u8]) -> postcard::Result<(Self, &[u8])> {
                postcard::take_from_bytes(bytes)
            }
        }
    )+};
}
pub(crate) use stored_as_is;

stored_as_is!(
    Sample in "samples";
    Reward in "rewards";
    Group in "groups";
    PolicyRecord in "policy_versions";
    StepRecord in "steps";
);

impl LedgerRecord for Interaction {
    const TABLE: &'static str = "interactions";

    fn write(&self, bytes: Vec<u8>) -> postcard::Result<Vec<u8>> {
        let messages: Vec<StoredMessage<&str>> = self.messages.iter().map(store_message).collect();
        let tools = self.chat.tools.iter().map(|tool| {
            let parameters = tool.parameters.as_ref().map(Value::to_string);
            (tool.name.as_str(), tool.description.as_deref(), parameters, tool.strict)
        });
        let variables = serde_json::to_string(&self.chat.template_variables).unwrap_or_default();
        let tools: Vec<_> = tools.collect();
        let chat = (tools, &self.chat.tool_choice, self.chat.parallel_tool_calls, variables);
        let asked =
            (&self.id, self.created, &self.source, &self.route, &self.model, &self.endpoint);
        let prompt = (&self.key_id, messages, &self.metadata, &self.params, &self.prompt_ids);
        let rules = (&self.template_hash, &self.stop, self.held_out, chat);
        let row = (asked, prompt, rules, &self.grammar, &self.continues);
        postcard::to_extend(&row, bytes)
    }

    fn read(bytes: &[u8]) -> postcard::Result<(Self, &[u8])> {
        let ((asked, prompt, rules, grammar, continues), rest) = postcard::take_from_bytes(bytes)?;
        let (id, created, source, route, model, endpoint) = asked;
        let (key_id, messages, metadata, params, prompt_ids) = prompt;
        let (template_hash, stop, held_out, chat) = rules;
        let messages: Vec<StoredMessage<String>> = messages;
        let row = Self {
            id,
            created,
            source,
            route,
            model,
            endpoint,
            key_id,
            messages: messages.into_iter().map(load_message).collect(),
            metadata,
            params,
            prompt_ids,
            template_hash,
            stop,
            held_out,
            chat: load_chat(chat),
            grammar,
            continues,
        };
        Ok((row, rest))
    }
}

/// The fields of a [`Message`], of texts `T`, with its calls.
type StoredMessage<T> = (Role, T, Option<T>, Option<T>, Vec<(T, T, T)>, Option<T>);

fn store_message(message: &Message) -> StoredMessage<&str> {
    let calls = message.tool_calls.iter();
    let calls = calls.map(|call| (&call.id[..], &call.name[..], &call.arguments[..])).collect();
    let (name, reasoning) = (message.name.as_deref(), message.reasoning.as_deref());
    (message.role, &message.content, name, reasoning, calls, message.tool_call_id.as_deref())
}

fn load_message(stored: StoredMessage<String>) -> Message {
    let (role, content, name, reasoning, calls, tool_call_id) = stored;
    let calls = calls.into_iter();
    let tool_calls = calls.map(|(id, name, arguments)| ToolCall { id, name, arguments }).collect();
    Message { role, content, name, reasoning, tool_calls, tool_call_id }
}

/// The fields of a [`Tool`]. JSON is stored as text.
type StoredTool = (String, Option<String>, Option<String>, bool);

fn load_chat(stored: (Vec<StoredTool>, ToolChoice, bool, String)) -> ChatOptions {
    let (tools, tool_choice, parallel_tool_calls, variables) = stored;
    let json = |text: String| serde_json::from_str(&text).unwrap_or(Value::String(text));
    let tools = tools.into_iter().map(|(name, description, parameters, strict)| Tool {
        name,
        description,
        parameters: parameters.map(json),
        strict,
    });
    let template_variables: Map<String, Value> =
        serde_json::from_str(&variables).unwrap_or_default();
    let tools = tools.collect();
    ChatOptions { tools, tool_choice, parallel_tool_calls, template_variables }
}

/// A record inside of another value, as bytes of the stored form.
pub(crate) mod as_record {
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de, ser};

    use super::{LedgerRecord, decode, encode};

    #[expect(clippy::borrowed_box, reason = "serde gives the field as it is")]
    pub(crate) fn serialize<R: LedgerRecord, S: Serializer>(
        record: &Box<R>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        encode(&**record).map_err(ser::Error::custom)?.serialize(serializer)
    }

    pub(crate) fn deserialize<'de, R: LedgerRecord, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Box<R>, D::Error> {
        decode(<&[u8]>::deserialize(deserializer)?).map(Box::new).map_err(de::Error::custom)
    }
}

pub(crate) fn encode<R: LedgerRecord>(record: &R) -> Result<Vec<u8>, StoreError> {
    let encoded = record.write(vec![RECORD_VERSION]);
    encoded.map_err(|e| StoreError::Failed(format!("a value cannot be encoded: {e}")))
}

/// Decodes a record. Extra bytes are an error.
pub(crate) fn decode<R: LedgerRecord>(bytes: &[u8]) -> Result<R, StoreError> {
    let reason = match bytes.split_first() {
        Some((&RECORD_VERSION, rest)) => match R::read(rest) {
            Ok((record, [])) => return Ok(record),
            Ok((_, extra)) => format!("{} bytes too many", extra.len()),
            Err(error) => error.to_string(),
        },
        Some((version, _)) => format!("value version {version}"),
        None => "no bytes".to_owned(),
    };
    Err(StoreError::Corrupt { table: R::TABLE, reason })
}
