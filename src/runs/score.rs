//! `hone rewards test`: scores completions from a file. Nothing is generated or trained.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use serde::Deserialize;
use serde::de::IntoDeserializer;
use serde::de::value::Error;
use serde_json::{Map, Value};
use toml::Table;

use hone_core::types::{Message, Role};
use hone_engine::Codec;
use hone_reward::routes::{Preset, RewardConfig, RouteConfig};
use hone_reward::{Route, ScoreInput};

use super::eval_set::score;
use super::table::ScoredSample;

/// Scores the completions, and shows the answer that each of `parts` finds. Consecutive rows with the
/// same prompt form a group, which matters for parts that compare completions.
pub async fn run(
    route: &Route,
    parts: &[RewardConfig],
    inputs: Vec<ScoreInput>,
) -> Vec<ScoredSample> {
    let mut scored = Vec::with_capacity(inputs.len());
    let same =
        |a: &ScoreInput, b: &ScoreInput| a.messages == b.messages && a.metadata == b.metadata;
    for group in inputs.chunk_by(same) {
        for (input, (values, total)) in group.iter().zip(score(route, group).await) {
            let found = parts.iter().map(|part| (&part.name, part.kind.answer(&input.text)));
            scored.push(ScoredSample {
                prompt: input.messages.last().map(|m| m.content.clone()).unwrap_or_default(),
                completion: input.text.clone(),
                parts: values,
                total,
                extracted: found.filter_map(|(name, found)| Some((name.clone(), found?))).collect(),
            });
        }
    }
    scored
}

// The route of `hone rewards test` without a configuration.

/// A route with the parts of a preset and of `kinds`, each the name of a kind or a part as an inline
/// table of TOML. Without any, it has the three rewards that guides to GRPO begin with.
pub fn route(name: &str, preset: Option<&str>, kinds: &[String]) -> anyhow::Result<RouteConfig> {
    let preset = match preset {
        Some(preset) => Some(named(preset)?),
        None => kinds.is_empty().then_some(Preset::Guides),
    };
    let rewards: Vec<RewardConfig> = kinds
        .iter()
        .map(|text| part(text).with_context(|| format!("--kind {text}")))
        .collect::<anyhow::Result<_>>()?;
    for (index, part) in rewards.iter().enumerate() {
        ensure!(
            rewards[..index].iter().all(|other| other.name != part.name),
            "--kind is given twice for a part named {}: set `name` in a table",
            part.name
        );
    }
    Ok(RouteConfig { name: name.to_owned(), preset, rewards, ..RouteConfig::default() })
}

fn named(preset: &str) -> anyhow::Result<Preset> {
    let deserializer = IntoDeserializer::<Error>::into_deserializer(preset);
    Preset::deserialize(deserializer).context("--preset")
}

/// A part, whose name is that of its kind unless the table contains another.
fn part(text: &str) -> anyhow::Result<RewardConfig> {
    let mut table = if text.trim_start().starts_with('{') {
        let mut document: Table = format!("part = {text}").parse().context("not TOML")?;
        match document.remove("part") {
            Some(toml::Value::Table(table)) => table,
            _ => Table::new(),
        }
    } else {
        Table::from_iter([("kind".to_owned(), toml::Value::String(text.to_owned()))])
    };
    if let (false, Some(kind)) = (table.contains_key("name"), table.get("kind").cloned()) {
        table.insert("name".to_owned(), kind);
    }
    let part = RewardConfig::try_from(table).map_err(anyhow::Error::msg)?;
    part.check().map_err(|problem| anyhow::Error::msg(problem.sentence()))?;
    Ok(part)
}

// Reads the rows to score, in Hone's form or in TRL's chat form.

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

#[cfg(test)]
mod tests {
    use super::*;

    fn names(preset: Option<&str>, kinds: &[&str]) -> Result<String, String> {
        let kinds: Vec<String> = kinds.iter().map(|kind| (*kind).to_owned()).collect();
        let route = route("default", preset, &kinds).map_err(|error| format!("{error:#}"))?;
        let parts = route.parts();
        let shown = parts.iter().map(|p| format!("{} {} {}", p.name, p.kind.name(), p.weight));
        Ok(shown.collect::<Vec<_>>().join(", "))
    }

    #[test]
    fn parts_are_named_by_their_kind() {
        let guides = "tags format_incremental 0.5, format format_soft 0.5, correct exact_match 2";
        assert_eq!(names(None, &[]).unwrap(), guides);
        let kinds = ["exact_match", "{ kind = 'length', ideal = 20, spread = 20, weight = 0.5 }"];
        assert_eq!(names(None, &kinds).unwrap(), "exact_match exact_match 1, length length 0.5");
        let parts = names(Some("question_answering"), &["exact_match"]).unwrap();
        assert!(parts.ends_with(", exact_match exact_match 1"), "{parts}");
    }

    #[test]
    fn wrong_parts_are_refused_by_name() {
        for (kind, start) in [
            ("exact_mach", "--kind exact_mach: kind is \"exact_mach\": it must be "),
            ("length", "--kind length: "),
            ("{ kind = 'length', ideal = }", "--kind { kind = 'length', ideal = }: not TOML"),
            ("{ weight = 1 }", "--kind { weight = 1 }: kind is missing: it must be "),
        ] {
            let error = names(None, &[kind]).unwrap_err();
            assert!(error.starts_with(start), "{error}");
        }
        let range = names(None, &["{ kind = 'numeric_match', tolerance = -1 }"]).unwrap_err();
        assert!(range.contains(": tolerance is -1: it must be "), "{range}");
        let twice = names(None, &["exact_match", "exact_match"]).unwrap_err();
        assert!(twice.starts_with("--kind is given twice for a part named exact_match"), "{twice}");
        let preset = names(Some("guide"), &[]).unwrap_err();
        assert!(preset.starts_with("--preset: unknown variant `guide`"), "{preset}");
    }
}
