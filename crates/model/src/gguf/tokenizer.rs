//! The vocabulary and the `tokenizer.json` of a GGUF file, from its metadata.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde_json::{Map, Value, json};

use super::file::{GgufFile, GgufValue};
use crate::Result;

/// The whole `tokenizer.json`. Its post-processor puts the token before a text that the file asks for;
/// chat templates write their own.
pub(crate) fn tokenizer_json(file: &GgufFile) -> Result<Value> {
    let tokens = GgufVocabulary::read(file)?;
    let kind = file.required("tokenizer.ggml.model", GgufFile::text)?;
    let mut json = match kind {
        "gpt2" => byte_level(&tokens)?,
        "llama" => sentence_piece(&tokens)?,
        other => {
            let reason = "supported are byte-level (gpt2) and SentencePiece (llama) tokenizers";
            return Err(file.refuse(&format!("tokenizer.ggml.model is {other:?}; {reason}")));
        }
    };
    json["version"] = json!("1.0");
    json["truncation"] = Value::Null;
    json["padding"] = Value::Null;
    json["added_tokens"] = Value::Array(tokens.added());
    json["post_processor"] = tokens.frame(kind == "llama")?;
    let model = &mut json["model"];
    model["type"] = json!("BPE");
    model["vocab"] = Value::Object(tokens.vocab());
    Ok(json)
}

/// What depends on the kind of the tokenizer, for a byte-level one.
fn byte_level(tokens: &GgufVocabulary<'_>) -> Result<Value> {
    let file = tokens.file;
    let name = file.text("tokenizer.ggml.pre")?.unwrap_or("default");
    let (normalizer, pre_tokenizer, ignore_merges) = pre_tokenizer(name).ok_or_else(|| {
        file.refuse(&format!("tokenizer.ggml.pre is {name:?}, which is not supported"))
    })?;
    let mut merges = Vec::new();
    for merge in file.required("tokenizer.ggml.merges", GgufFile::texts)? {
        let Some((left, right)) = merge.split_once(' ') else {
            return Err(file.refuse(&format!("the merge {merge:?} is not two tokens")));
        };
        merges.push([left, right]);
    }
    Ok(json!({
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "decoder": bytes(),
        "model": { "ignore_merges": ignore_merges, "merges": merges },
    }))
}

/// The pre-tokenizer and decoder of bytes.
fn bytes() -> Value {
    json!({
        "type": "ByteLevel",
        "add_prefix_space": false,
        "trim_offsets": true,
        "use_regex": false,
    })
}

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

pub(crate) struct GgufVocabulary<'a> {
    file: &'a GgufFile,
    /// By id.
    texts: Vec<&'a str>,
    /// By id; empty if all are normal.
    kinds: Vec<i64>,
}

impl<'a> GgufVocabulary<'a> {
    pub fn read(file: &'a GgufFile) -> Result<Self> {
        let texts = file.required("tokenizer.ggml.tokens", GgufFile::texts)?;
        let kinds = file.list("tokenizer.ggml.token_type", |value| match value {
            GgufValue::Integer(kind) => Some(*kind),
            _ => None,
        })?;
        let kinds = kinds.unwrap_or_default();
        if !kinds.is_empty() && kinds.len() != texts.len() {
            return Err(file.refuse("tokenizer.ggml.token_type is not as long as the tokens"));
        }
        Ok(Self { file, texts, kinds })
    }

    fn kind(&self, id: usize) -> i64 {
        self.kinds.get(id).copied().unwrap_or(1)
    }

    /// The id that a key of the metadata names.
    fn id(&self, key: &str) -> Result<Option<usize>> {
        let found = self.file.whole(&format!("tokenizer.ggml.{key}"))?;
        // Old files name ids beyond the vocabulary for tokens that the model does not have.
        Ok(found.and_then(|id| usize::try_from(id).ok()).filter(|id| *id < self.texts.len()))
    }

    /// Tokens that end a completion: those that the file names, then those with a known text.
    pub fn stop_ids(&self) -> Result<Vec<u32>> {
        let mut found = Vec::new();
        for key in ENDS {
            found.extend(self.id(key)?);
        }
        let ends = |id: &usize| {
            matches!(self.kind(*id), CONTROL | USER_DEFINED) && END_TEXTS.contains(&self.texts[*id])
        };
        found.extend((0..self.texts.len()).filter(ends));
        let mut seen = BTreeSet::new();
        found.retain(|id| seen.insert(*id));
        if found.is_empty() {
            let reason = "there is no token that ends a completion: no tokenizer.ggml.eos_token_id";
            return Err(self.file.refuse(reason));
        }
        Ok(found.into_iter().filter_map(|id| u32::try_from(id).ok()).collect())
    }

    /// `bos_token`, `eos_token` and so on.
    pub fn special(&self) -> Result<BTreeMap<String, String>> {
        let mut found = BTreeMap::new();
        for (name, key) in SPECIAL {
            if let Some(id) = self.id(key)? {
                found.insert(name.to_owned(), self.texts[id].to_owned());
            }
        }
        Ok(found)
    }

    /// The `post_processor`: puts `bos_token` before a text if the file says so, or if it says nothing and
    /// `default` holds.
    fn frame(&self, default: bool) -> Result<Value> {
        let framed = self.file.flag("tokenizer.ggml.add_bos_token")?.unwrap_or(default);
        let Some(id) = self.id("bos_token_id")?.filter(|_| framed) else {
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

    fn vocab(&self) -> Map<String, Value> {
        let ids = self.texts.iter().enumerate();
        ids.map(|(id, text)| ((*text).to_owned(), json!(id))).collect()
    }

    /// The `added_tokens`: those that are found in texts before they are split.
    fn added(&self) -> Vec<Value> {
        let added = |(id, text): (usize, &&str)| {
            let kind = self.kind(id);
            matches!(kind, UNKNOWN | CONTROL | USER_DEFINED).then(|| {
                json!({
                    "id": id,
                    "content": text,
                    "single_word": false,
                    "lstrip": false,
                    "rstrip": false,
                    "normalized": false,
                    "special": kind != USER_DEFINED,
                })
            })
        };
        self.texts.iter().enumerate().filter_map(added).collect()
    }
}

/// SentencePiece's sign for a space.
const SPACE: &str = "\u{2581}";

/// What depends on the kind of the tokenizer, for one of SentencePiece's BPE kind (Llama 2, Mistral, Gemma,
/// Phi-3).
fn sentence_piece(tokens: &GgufVocabulary<'_>) -> Result<Value> {
    let file = tokens.file;
    let scores = file.list("tokenizer.ggml.scores", |value| match value {
        GgufValue::Float(score) => Some(*score),
        _ => None,
    })?;
    let Some(scores) = scores.filter(|scores| scores.len() == tokens.texts.len()) else {
        return Err(file.refuse("there are no tokenizer.ggml.scores for all tokens"));
    };
    let mut normalizers =
        vec![json!({ "type": "Replace", "pattern": { "String": " " }, "content": SPACE })];
    let mut decoders = vec![
        json!({ "type": "Replace", "pattern": { "String": SPACE }, "content": " " }),
        json!({ "type": "ByteFallback" }),
        json!({ "type": "Fuse" }),
    ];
    if file.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true) {
        normalizers.insert(0, json!({ "type": "Prepend", "prepend": SPACE }));
        decoders.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
    }
    let unknown = file.whole("tokenizer.ggml.unknown_token_id")?.unwrap_or(0);
    let unknown = usize::try_from(unknown).ok().and_then(|id| tokens.texts.get(id));
    Ok(json!({
        "normalizer": { "type": "Sequence", "normalizers": normalizers },
        "pre_tokenizer": null,
        "decoder": { "type": "Sequence", "decoders": decoders },
        "model": {
            "unk_token": unknown,
            "fuse_unk": true,
            "byte_fallback": true,
            "merges": merges(&tokens.texts, &scores),
        },
    }))
}

/// The merges, in order. SentencePiece has none: it joins the neighbours whose union has the highest
/// score. So every way to compose a token of two others is a merge, in the order of the token's score,
/// then of the parts' ids. The order is that of transformers' converter.
fn merges<'a>(texts: &[&'a str], scores: &[f64]) -> Vec<[&'a str; 2]> {
    let ids: HashMap<&str, usize> =
        texts.iter().enumerate().map(|(id, text)| (*text, id)).collect();
    let mut found = Vec::new();
    for (whole, text) in texts.iter().enumerate() {
        let mut ways = Vec::new();
        for (at, _) in text.char_indices().skip(1) {
            let (left, right) = text.split_at(at);
            if let (Some(a), Some(b)) = (ids.get(left), ids.get(right)) {
                ways.push((*a, *b, [left, right]));
            }
        }
        ways.sort_by_key(|way| (way.0, way.1));
        found.extend(ways.into_iter().map(|way| (scores[whole], way.2)));
    }
    let length = |part: &str| part.chars().count();
    found.sort_by(|(a_score, a), (b_score, b)| {
        let lengths = |parts: &[&str; 2]| Reverse(parts.map(length));
        b_score.total_cmp(a_score).then_with(|| lengths(a).cmp(&lengths(b)))
    });
    found.into_iter().map(|(_, parts)| parts).collect()
}

// How byte-level tokenizers split a text before merging, by llama.cpp's name (`tokenizer.ggml.pre`).

/// GPT-2's words, as in the `ByteLevel` pre-tokenizer.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// Llama 3's words: up to three digits, contractions in either case.
const LLAMA3: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// Qwen 2's words: as Llama 3's, with single digits.
const QWEN2: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// Words of Mistral's Tekken: split where lower case is followed by upper case.
const TEKKEN: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// GPT-4o's words: as Tekken's, with contractions and up to three digits.
const GPT4O: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// Files of before llama.cpp named the pre-tokenizers: runs of punctuation, then GPT-2's words, then
/// digits in threes.
const DEFAULT: [&str; 4] = [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"];

/// The normalizer and the pre-tokenizer that llama.cpp's name stands for, if it is known, and whether a piece that
/// is a token is not composed of merges. A file without a name has `default`.
fn pre_tokenizer(name: &str) -> Option<(Value, Value, bool)> {
    // The matches of one expression after another become pieces.
    let (expressions, nfc, ignore_merges): (&[&str], _, _) = match name {
        "default" => (&DEFAULT, false, false),
        "gpt-2" | "phi-2" => (&[GPT2], false, false),
        "llama3" | "llama-v3" | "llama-bpe" | "falcon3" => (&[LLAMA3], false, true),
        "dbrx" | "smaug-bpe" => (&[LLAMA3], false, false),
        "qwen2" | "deepseek-r1-qwen" => (&[QWEN2], true, false),
        "smollm" | "starcoder" | "refact" => (&[r"\p{N}", GPT2], false, false),
        "tekken" => (&[TEKKEN], false, true),
        "gpt-4o" => (&[GPT4O], false, false),
        _ => return None,
    };
    let split = |expression: &&str| {
        json!({
            "type": "Split",
            "pattern": { "Regex": expression },
            "behavior": "Isolated",
            "invert": false,
        })
    };
    let parts: Vec<Value> = expressions.iter().map(split).chain([bytes()]).collect();
    let normalizer = if nfc { json!({ "type": "NFC" }) } else { Value::Null };
    Some((normalizer, json!({ "type": "Sequence", "pretokenizers": parts }), ignore_merges))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merges_come_in_the_order_of_scores() {
        let texts = ["a", "b", "c", "ab", "bc", "abc"];
        let scores = [0.0, 0.0, 0.0, -1.0, -2.0, -3.0];
        let expected = [["a", "b"], ["b", "c"], ["ab", "c"], ["a", "bc"]];
        assert_eq!(merges(&texts, &scores), expected);
    }
    /// The pieces of a text, by the tokenizer of a file with another pre-tokenizer.
    fn pieces(name: &str, text: &str) -> Vec<String> {
        let (normalizer, pre_tokenizer, _) = pre_tokenizer(name).unwrap();
        let json = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
            "normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "post_processor": null,
            "decoder": null, "model": { "type": "WordLevel", "vocab": { "?": 0 }, "unk_token": "?" },
        });
        let tokenizer = tokenizers::Tokenizer::from_bytes(json.to_string()).unwrap();
        let encoding = tokenizer.encode(text, false).unwrap();
        encoding.get_offsets().iter().map(|(start, end)| text[*start..*end].to_owned()).collect()
    }

    #[test]
    fn texts_are_split_as_the_named_models_split_them() {
        let text = "It's 1234 camelCase...\n\n  Done";
        for (name, expected) in [
            ("gpt-2", vec!["It", "'s", " 1234", " camelCase", "...", "\n\n ", " Done"]),
            ("llama-bpe", vec!["It", "'s", " ", "123", "4", " camelCase", "...\n\n", " ", " Done"]),
            (
                "qwen2",
                vec!["It", "'s", " ", "1", "2", "3", "4", " camelCase", "...\n\n", " ", " Done"],
            ),
            (
                "smollm",
                vec!["It", "'s", " ", "1", "2", "3", "4", " camelCase", "...", "\n\n ", " Done"],
            ),
            (
                "tekken",
                vec![
                    "It", "'s", " ", "1", "2", "3", "4", " camel", "Case", "...\n\n", " ", " Done",
                ],
            ),
            ("gpt-4o", vec!["It's", " ", "123", "4", " camel", "Case", "...\n\n", " ", " Done"]),
            (
                "default",
                vec!["It", "'", "s", " ", "123", "4", " camelCase", "...", "\n\n ", " Done"],
            ),
        ] {
            assert_eq!(pieces(name, text), expected, "{name}");
        }
    }
}
