//! The vocabulary of a GGUF file, and its special tokens.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use hone_core::gguf::GgufValue;

use super::metadata::Metadata;
use crate::error::EngineError;

/// Kinds of tokens in `tokenizer.ggml.token_type`.
const UNKNOWN: i64 = 2;
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;

/// Keys of ids that end a completion.
const ENDS: [&str; 3] = ["eos_token_id", "eot_token_id", "eom_token_id"];

/// Control tokens that end a completion by their text, as in llama.cpp: files often name only one.
const END_TEXTS: [&str; 8] = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<EOT>",
];

/// The special tokens that chat templates can name.
const SPECIAL: [(&str, &str); 4] = [
    ("bos_token", "bos_token_id"),
    ("eos_token", "eos_token_id"),
    ("unk_token", "unknown_token_id"),
    ("pad_token", "padding_token_id"),
];

/// The vocabulary.
pub(super) struct GgufVocabulary<'a> {
    /// By id.
    pub texts: Vec<&'a str>,
    /// By id; empty if all are normal.
    kinds: Vec<i64>,
}

impl<'a> GgufVocabulary<'a> {
    /// Reads the vocabulary.
    ///
    /// # Errors
    /// If it is missing or inconsistent.
    pub fn read(metadata: &Metadata<'a>) -> Result<Self, EngineError> {
        let texts = metadata.required_texts("tokenizer.ggml.tokens")?;
        let kinds = metadata.list("tokenizer.ggml.token_type", |value| match value {
            GgufValue::Integer(kind) => Some(*kind),
            _ => None,
        })?;
        let kinds = kinds.unwrap_or_default();
        if !kinds.is_empty() && kinds.len() != texts.len() {
            return Err(metadata.refuse("tokenizer.ggml.token_type is not as long as the tokens"));
        }
        Ok(Self { texts, kinds })
    }

    fn kind(&self, id: usize) -> i64 {
        self.kinds.get(id).copied().unwrap_or(1)
    }

    /// The id that a key of the metadata names.
    fn id(&self, metadata: &Metadata<'_>, key: &str) -> Result<Option<usize>, EngineError> {
        let found = metadata.whole(&format!("tokenizer.ggml.{key}"))?;
        // Old files name ids beyond the vocabulary for tokens that the model does not have.
        Ok(found.and_then(|id| usize::try_from(id).ok()).filter(|id| *id < self.texts.len()))
    }

    /// Tokens that end a completion: those that the file names, then those with a known text.
    ///
    /// # Errors
    /// If there are none.
    pub fn stop_ids(&self, metadata: &Metadata<'_>) -> Result<Vec<u32>, EngineError> {
        let mut found = Vec::new();
        for key in ENDS {
            found.extend(self.id(metadata, key)?);
        }
        let ends = |id: &usize| {
            matches!(self.kind(*id), CONTROL | USER_DEFINED) && END_TEXTS.contains(&self.texts[*id])
        };
        found.extend((0..self.texts.len()).filter(ends));
        let mut seen = BTreeSet::new();
        found.retain(|id| seen.insert(*id));
        if found.is_empty() {
            let reason = "there is no token that ends a completion: no tokenizer.ggml.eos_token_id";
            return Err(metadata.refuse(reason));
        }
        Ok(found.into_iter().filter_map(|id| u32::try_from(id).ok()).collect())
    }

    /// `bos_token`, `eos_token` and so on.
    ///
    /// # Errors
    /// If an id is not a whole number.
    pub fn special(
        &self,
        metadata: &Metadata<'_>,
    ) -> Result<BTreeMap<String, String>, EngineError> {
        let mut found = BTreeMap::new();
        for (name, key) in SPECIAL {
            if let Some(id) = self.id(metadata, key)? {
                found.insert(name.to_owned(), self.texts[id].to_owned());
            }
        }
        Ok(found)
    }

    /// The `post_processor` of a `tokenizer.json`: puts `bos_token` before a text if the file says so, or if
    /// it says nothing and `default` holds.
    ///
    /// # Errors
    /// If a value has the wrong type.
    pub fn frame(&self, metadata: &Metadata<'_>, default: bool) -> Result<Value, EngineError> {
        let framed = metadata.flag("tokenizer.ggml.add_bos_token")?.unwrap_or(default);
        let Some(id) = self.id(metadata, "bos_token_id")?.filter(|_| framed) else {
            return Ok(Value::Null);
        };
        let text = self.texts[id];
        let begin = json!({ "SpecialToken": { "id": text, "type_id": 0 } });
        let sequence = |name| json!({ "Sequence": { "id": name, "type_id": 0 } });
        Ok(json!({
            "type": "TemplateProcessing",
            "single": [begin, sequence("A")],
            "pair": [begin, sequence("A"), sequence("B")],
            "special_tokens": { text: { "id": text, "ids": [id], "tokens": [text] } },
        }))
    }

    /// The `vocab` of a `tokenizer.json`.
    pub fn vocab(&self) -> Map<String, Value> {
        let ids = self.texts.iter().enumerate();
        ids.map(|(id, text)| ((*text).to_owned(), json!(id))).collect()
    }

    /// The `added_tokens`: those that are found in texts before they are split.
    pub fn added(&self) -> Vec<Value> {
        let added = |(id, text): (usize, &&str)| {
            let special = match self.kind(id) {
                UNKNOWN | CONTROL => true,
                USER_DEFINED => false,
                _ => return None,
            };
            Some(json!({
                "id": id,
                "content": text,
                "single_word": false,
                "lstrip": false,
                "rstrip": false,
                "normalized": false,
                "special": special,
            }))
        };
        self.texts.iter().enumerate().filter_map(added).collect()
    }
}

/// The parts of a `tokenizer.json` that depend on its kind.
pub(super) struct TokenizerParts {
    pub normalizer: Value,
    pub pre_tokenizer: Value,
    pub decoder: Value,
    pub model: Value,
}
