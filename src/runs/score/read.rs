//! Reads the rows to score, in Hone's form or in TRL's chat form.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use serde_json::{Map, Value};

use hone_core::types::{Message, Role};
use hone_engine::Codec;
use hone_reward::ScoreInput;

/// Reads JSON lines, or a JSON array, of `{completion, prompt | messages, ...}`. `completion` is a
/// text, a message or a list of messages; without it, the last of `messages` is the completion.
/// `prompt` is a text or a list of messages. Other fields are metadata: strings unchanged, other
/// values as JSON.
///
/// # Errors
/// If the file cannot be read or a row is invalid; the error names the file, the line or item, and the
/// field.
pub fn read(path: &Path, codec: &Codec) -> anyhow::Result<Vec<ScoreInput>> {
    let place = path.display();
    let text = std::fs::read_to_string(path).with_context(|| format!("{place}"))?;
    let rows: Vec<(String, Value)> = if text.trim_start().starts_with('[') {
        let items: Vec<Value> =
            serde_json::from_str(&text).with_context(|| format!("{place}: not a JSON array"))?;
        (1..).map(|item| format!("item {item}")).zip(items).collect()
    } else {
        let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
        let row = |(index, line): (usize, &str)| -> anyhow::Result<(String, Value)> {
            let at = format!("line {}", index + 1);
            let row = serde_json::from_str(line)
                .with_context(|| format!("{place}, {at}: not a JSON object"))?;
            Ok((at, row))
        };
        lines.map(row).collect::<anyhow::Result<_>>()?
    };
    ensure!(!rows.is_empty(), "{place} contains no completion");
    let inputs = rows.into_iter().map(|(at, row)| {
        let Value::Object(row) = row else { bail!("{place}, {at}: not a JSON object") };
        input(row, codec).with_context(|| format!("{place}, {at}"))
    });
    inputs.collect()
}

fn input(mut row: Map<String, Value>, codec: &Codec) -> anyhow::Result<ScoreInput> {
    let completion = row.remove("completion");
    let mut messages = match (row.remove("messages"), row.remove("prompt")) {
        (Some(messages), _) => conversation("messages", messages)?,
        (None, Some(Value::String(content))) => vec![Message::new(Role::User, content)],
        (None, Some(prompt @ Value::Array(_))) => conversation("prompt", prompt)?,
        (None, Some(other)) => {
            bail!("`prompt` is {other}: it must be a text or a list of messages")
        }
        (None, None) => Vec::new(),
    };
    let text = match completion {
        Some(Value::String(text)) => text,
        Some(message @ Value::Object(_)) => {
            answer(conversation("completion", vec![message].into())?)?
        }
        Some(list @ Value::Array(_)) => answer(conversation("completion", list)?)?,
        Some(other) => {
            bail!("`completion` is {other}: it must be a text, a message or a list of messages")
        }
        // The form of datasets for supervised training.
        None => match messages.pop() {
            Some(Message { role: Role::Assistant, content, .. }) => content,
            _ => bail!(
                "`completion` is missing: it must be the completion's text, a message or a list of \
                 messages"
            ),
        },
    };
    let plain = |value: Value| match value {
        Value::String(text) => text,
        other => other.to_string(),
    };
    let columns = row.into_iter().filter(|(_, value)| !value.is_null());
    let metadata: BTreeMap<String, String> =
        columns.map(|(key, value)| (key, plain(value))).collect();
    let ids = codec.encode(&text)?;
    Ok(ScoreInput { messages: Arc::new(messages), metadata: Arc::new(metadata), text, ids })
}

fn conversation(field: &str, value: Value) -> anyhow::Result<Vec<Message>> {
    let context = || format!("`{field}` is no list of {{role, content}}");
    serde_json::from_value(value).with_context(context)
}

/// The text of the assistant's messages, of which a completion normally has one.
fn answer(messages: Vec<Message>) -> anyhow::Result<String> {
    let own = messages.into_iter().filter(|message| message.role == Role::Assistant);
    let texts: Vec<String> = own.map(|message| message.content).collect();
    ensure!(!texts.is_empty(), "`completion` has no message with the role \"assistant\"");
    Ok(texts.join("\n"))
}
