//! A dataset of prompts: JSONL with `messages` and `answer`, read whole and checked at start.
//!
//! Every column but `messages` becomes an entry of the interaction's metadata, where the rewards
//! look for it.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use rand::seq::SliceRandom;
use rand_chacha::ChaCha12Rng;
use serde_json::Value;

use super::Shared;
use super::queue::Job;
use crate::reward::Route;
use crate::types::{
    Interaction, InteractionId, Message, PromptSource, Role, SamplingParams, now_ms,
};

/// One line.
#[derive(Debug, PartialEq)]
struct Prompt {
    line: usize,
    messages: Vec<Message>,
    metadata: BTreeMap<String, String>,
}

/// The prompts, drawn in an order that is shuffled anew each time round.
pub(super) struct Dataset {
    route: Arc<Route>,
    prompts: Vec<Prompt>,
    next: usize,
}

impl Dataset {
    /// Reads and checks the file; the error names the line.
    pub fn load(path: &Path, route: Arc<Route>, rng: &mut ChaCha12Rng) -> Result<Self, String> {
        let place = path.display();
        let text = std::fs::read_to_string(path).map_err(|error| format!("`{place}`: {error}"))?;
        let mut prompts = parse(&text).map_err(|error| format!("`{place}`, {error}"))?;
        if prompts.is_empty() {
            return Err(format!("`{place}` holds no prompt"));
        }
        prompts.shuffle(rng);
        Ok(Self { route, prompts, next: 0 })
    }

    pub fn len(&self) -> usize {
        self.prompts.len()
    }

    /// The next prompt as a job. Prompts that the model cannot take are left out for good.
    pub fn next_job(&mut self, shared: &Shared, rng: &mut ChaCha12Rng) -> Option<Job> {
        while !self.prompts.is_empty() {
            if self.next >= self.prompts.len() {
                self.prompts.shuffle(rng);
                self.next = 0;
            }
            let prompt = &self.prompts[self.next];
            match interaction(shared, &self.route.name, prompt) {
                Ok(interaction) => {
                    self.next += 1;
                    return Some(Job::fresh(Arc::new(interaction), Arc::clone(&self.route)));
                }
                Err(reason) => {
                    tracing::warn!(line = prompt.line, %reason, "a dataset prompt is left out");
                    shared.skip("dataset_prompt");
                    self.prompts.swap_remove(self.next);
                }
            }
        }
        None
    }
}

fn interaction(shared: &Shared, route: &str, prompt: &Prompt) -> Result<Interaction, String> {
    let codec = shared.engine.codec();
    let info = shared.engine.info();
    let prompt_ids = codec.prompt(&prompt.messages).map_err(|error| error.to_string())?;
    if prompt_ids.len() >= info.context {
        let (length, context) = (prompt_ids.len(), info.context);
        return Err(format!("it has {length} tokens; the model's context holds {context}"));
    }
    Ok(Interaction {
        id: InteractionId::new(),
        created: now_ms(),
        source: PromptSource::Dataset,
        route: route.to_owned(),
        model: info.name.clone(),
        key_id: None,
        messages: prompt.messages.clone(),
        metadata: prompt.metadata.clone(),
        params: SamplingParams {
            temperature: shared.config.temperature,
            max_tokens: shared.config.max_tokens,
            ..SamplingParams::default()
        },
        prompt_ids,
        template_hash: codec.template_hash().to_owned(),
    })
}

fn parse(text: &str) -> Result<Vec<Prompt>, String> {
    let mut prompts = Vec::new();
    for (index, text) in text.lines().enumerate() {
        if !text.trim().is_empty() {
            let line = index + 1;
            prompts.push(parse_line(line, text).map_err(|error| format!("line {line}: {error}"))?);
        }
    }
    Ok(prompts)
}

fn parse_line(line: usize, text: &str) -> Result<Prompt, String> {
    let value: Value = serde_json::from_str(text).map_err(|error| format!("not JSON: {error}"))?;
    let Value::Object(mut columns) = value else {
        return Err("not a JSON object".to_owned());
    };
    let messages = columns.remove("messages").ok_or("`messages` is missing")?;
    let messages: Vec<Message> =
        serde_json::from_value(messages).map_err(|error| format!("`messages`: {error}"))?;
    match messages.last() {
        None => return Err("`messages` is empty".to_owned()),
        Some(last) if last.role == Role::Assistant => {
            return Err("`messages` ends with the assistant's turn; nothing is left to say".into());
        }
        Some(_) => {}
    }
    if columns.get("answer").is_none_or(Value::is_null) {
        return Err("`answer` is missing".to_owned());
    }
    let metadata = columns
        .into_iter()
        .filter(|(_, value)| !value.is_null())
        .map(|(key, value)| (key, plain(value)))
        .collect();
    Ok(Prompt { line, messages, metadata })
}

/// Strings as they are, anything else as JSON.
fn plain(value: Value) -> String {
    match value {
        Value::String(text) => text,
        other => other.to_string(),
    }
}

impl fmt::Debug for Dataset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dataset").field("prompts", &self.prompts.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error_of(text: &str) -> String {
        parse(text).err().unwrap_or_default()
    }

    #[test]
    fn columns_become_metadata() {
        let text = concat!(
            r#"{"messages":[{"role":"system","content":"Add."},{"role":"user","content":"1+1="}],"#,
            r#""answer":2,"level":"easy","tags":["a","b"],"hard":false,"note":null}"#,
            "\n\n",
            r#"{"messages":[{"role":"user","content":"é"}],"answer":" x "}"#,
            "\n",
        );
        let prompts = parse(text).unwrap();
        assert_eq!((prompts.len(), prompts[0].line, prompts[1].line), (2, 1, 3));
        assert_eq!(prompts[0].messages[1].content, "1+1=");
        let metadata: Vec<(&str, &str)> =
            prompts[0].metadata.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
        let expected =
            [("answer", "2"), ("hard", "false"), ("level", "easy"), ("tags", r#"["a","b"]"#)];
        assert_eq!(metadata, expected);
        assert_eq!(prompts[1].metadata["answer"], " x ");
    }

    #[test]
    fn errors_name_the_line() {
        let good = r#"{"messages":[{"role":"user","content":"x"}],"answer":"y"}"#;
        for (bad, wanted) in [
            ("{", "line 2: not JSON"),
            ("[1]", "line 2: not a JSON object"),
            (r#"{"answer":"y"}"#, "line 2: `messages` is missing"),
            (r#"{"messages":[],"answer":"y"}"#, "line 2: `messages` is empty"),
            (r#"{"messages":"x","answer":"y"}"#, "line 2: `messages`: invalid type"),
            (
                r#"{"messages":[{"role":"owner","content":"x"}],"answer":"y"}"#,
                "line 2: `messages`: unknown variant `owner`",
            ),
            (
                r#"{"messages":[{"role":"assistant","content":"x"}],"answer":"y"}"#,
                "line 2: `messages` ends with the assistant's turn",
            ),
            (r#"{"messages":[{"role":"user","content":"x"}]}"#, "line 2: `answer` is missing"),
        ] {
            let error = error_of(&format!("{good}\n{bad}\n{good}\n"));
            assert!(error.starts_with(wanted), "{bad}\nsays: {error}");
        }
    }
}
