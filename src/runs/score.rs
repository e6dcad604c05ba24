//! `hone rewards test`: scores completions from a file. Nothing is generated or trained.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail};
use serde_json::{Map, Value};

use hone_core::types::{Message, Role};
use hone_engine::Codec;
use hone_reward::{Route, ScoreInput};

use super::eval_set::score;
use super::table::ScoredSample;

/// Reads JSON lines of `{completion, prompt | messages, ...}`. Other fields are metadata: strings
/// unchanged, other values as JSON.
///
/// # Errors
/// If the file cannot be read or a line is invalid; the error names the file, the line and the field.
pub fn read(path: &Path, codec: &Codec) -> anyhow::Result<Vec<ScoreInput>> {
    let place = path.display();
    let text = std::fs::read_to_string(path).with_context(|| format!("{place}"))?;
    let mut inputs = Vec::new();
    for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let input = input(line, codec).with_context(|| format!("{place}, line {}", index + 1))?;
        inputs.push(input);
    }
    if inputs.is_empty() {
        bail!("{place} contains no completion");
    }
    Ok(inputs)
}

fn input(line: &str, codec: &Codec) -> anyhow::Result<ScoreInput> {
    let mut row: Map<String, Value> = serde_json::from_str(line).context("not a JSON object")?;
    let Some(Value::String(text)) = row.remove("completion") else {
        bail!("`completion` is missing: it must be the completion's text");
    };
    let messages = match (row.remove("messages"), row.remove("prompt")) {
        (Some(messages), _) => serde_json::from_value(messages).context("`messages`")?,
        (None, Some(Value::String(content))) => vec![Message { role: Role::User, content }],
        (None, Some(other)) => bail!("`prompt` is {other}: it must be a text"),
        (None, None) => Vec::new(),
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

/// Scores the completions. Consecutive lines with the same prompt form a group, which matters for
/// judges that compare completions.
pub async fn run(route: &Route, inputs: Vec<ScoreInput>) -> Vec<ScoredSample> {
    let mut scored = Vec::with_capacity(inputs.len());
    let same =
        |a: &ScoreInput, b: &ScoreInput| a.messages == b.messages && a.metadata == b.metadata;
    for group in inputs.chunk_by(same) {
        for (input, (parts, total)) in group.iter().zip(score(route, group).await) {
            let prompt = input.messages.last().map(|m| m.content.clone()).unwrap_or_default();
            let completion = input.text.clone();
            scored.push(ScoredSample { prompt, completion, parts, total });
        }
    }
    scored
}
