//! `tokenizer.json` from the metadata of a GGUF file.

use std::cmp::Reverse;
use std::collections::HashMap;

use serde_json::{Value, json};

use hone_core::gguf::GgufValue;

use super::metadata::Metadata;
use super::vocabulary::{GgufVocabulary, TokenizerParts};
use crate::error::EngineError;

/// The whole `tokenizer.json`. Its post-processor puts the token before a text that the file asks for;
/// chat templates write their own.
///
/// # Errors
/// If the vocabulary is missing, or the tokenizer is of a kind that is not supported.
pub(super) fn tokenizer_json(metadata: &Metadata<'_>) -> Result<Value, EngineError> {
    let tokens = GgufVocabulary::read(metadata)?;
    let kind = metadata.required_text("tokenizer.ggml.model")?;
    let parts = match kind {
        "gpt2" => byte_level(&tokens, metadata)?,
        "llama" => sentence_piece_parts(&tokens, metadata)?,
        other => {
            let reason = "supported are byte-level (gpt2) and SentencePiece (llama) tokenizers";
            return Err(metadata.refuse(&format!("tokenizer.ggml.model is {other:?}; {reason}")));
        }
    };
    let TokenizerParts { normalizer, pre_tokenizer, decoder, model } = parts;
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": tokens.added(),
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": tokens.frame(metadata, kind == "llama")?,
        "decoder": decoder,
        "model": model,
    }))
}

fn byte_level(
    tokens: &GgufVocabulary<'_>,
    metadata: &Metadata<'_>,
) -> Result<TokenizerParts, EngineError> {
    let name = metadata.text("tokenizer.ggml.pre")?.unwrap_or("default");
    let way = PreTokenizer::named(name).ok_or_else(|| {
        metadata.refuse(&format!("tokenizer.ggml.pre is {name:?}, which is not supported"))
    })?;
    let mut merges = Vec::new();
    for merge in metadata.required_texts("tokenizer.ggml.merges")? {
        let Some((left, right)) = merge.split_once(' ') else {
            return Err(metadata.refuse(&format!("the merge {merge:?} is not two tokens")));
        };
        merges.push(json!([left, right]));
    }
    Ok(TokenizerParts {
        normalizer: way.normalizer(),
        pre_tokenizer: way.json(),
        decoder: json!({
            "type": "ByteLevel",
            "add_prefix_space": false,
            "trim_offsets": true,
            "use_regex": false,
        }),
        model: json!({
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": way.ignore_merges,
            "vocab": tokens.vocab(),
            "merges": merges,
        }),
    })
}

// SentencePiece tokenizers of the BPE kind (Llama 2, Mistral, Gemma, Phi-3) as `tokenizer.json`.

/// SentencePiece's sign for a space.
const SPACE: &str = "\u{2581}";

/// The parts of a `tokenizer.json`.
///
/// # Errors
/// If the scores are missing.
pub(super) fn sentence_piece_parts(
    tokens: &GgufVocabulary<'_>,
    metadata: &Metadata<'_>,
) -> Result<TokenizerParts, EngineError> {
    let scores = metadata.list("tokenizer.ggml.scores", |value| match value {
        GgufValue::Float(score) => Some(*score),
        _ => None,
    })?;
    let Some(scores) = scores.filter(|scores| scores.len() == tokens.texts.len()) else {
        return Err(metadata.refuse("there are no tokenizer.ggml.scores for all tokens"));
    };
    let prefixed = metadata.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    let replace = json!({ "type": "Replace", "pattern": { "String": " " }, "content": SPACE });
    let prepend = json!({ "type": "Prepend", "prepend": SPACE });
    let normalizers = if prefixed { vec![prepend, replace] } else { vec![replace] };
    let mut decoders = vec![
        json!({ "type": "Replace", "pattern": { "String": SPACE }, "content": " " }),
        json!({ "type": "ByteFallback" }),
        json!({ "type": "Fuse" }),
    ];
    if prefixed {
        decoders.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
    }
    let unknown = metadata.whole("tokenizer.ggml.unknown_token_id")?.unwrap_or(0);
    let unknown = usize::try_from(unknown).ok().and_then(|id| tokens.texts.get(id));
    Ok(TokenizerParts {
        normalizer: json!({ "type": "Sequence", "normalizers": normalizers }),
        pre_tokenizer: Value::Null,
        decoder: json!({ "type": "Sequence", "decoders": decoders }),
        model: json!({
            "type": "BPE",
            "dropout": null,
            "unk_token": unknown,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": true,
            "byte_fallback": true,
            "ignore_merges": false,
            "vocab": tokens.vocab(),
            "merges": merges(&tokens.texts, &scores),
        }),
    })
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

/// A way to split.
pub(super) struct PreTokenizer {
    /// Expressions whose matches become pieces, one expression after another.
    expressions: &'static [&'static str],
    /// Whether texts are normalized to NFC first.
    nfc: bool,
    /// Whether a piece that is a token is not composed of merges.
    pub ignore_merges: bool,
}

impl PreTokenizer {
    /// The way that llama.cpp's name stands for, if it is known. A file without a name has
    /// `default`.
    pub fn named(name: &str) -> Option<Self> {
        let way = |expressions| Self { expressions, nfc: false, ignore_merges: false };
        Some(match name {
            "default" => way(&DEFAULT),
            "gpt-2" | "phi-2" => way(&[GPT2]),
            "llama3" | "llama-v3" | "llama-bpe" | "falcon3" => {
                Self { ignore_merges: true, ..way(&[LLAMA3]) }
            }
            "dbrx" | "smaug-bpe" => way(&[LLAMA3]),
            "qwen2" | "deepseek-r1-qwen" => Self { nfc: true, ..way(&[QWEN2]) },
            "smollm" | "starcoder" | "refact" => way(&[r"\p{N}", GPT2]),
            "tekken" => Self { ignore_merges: true, ..way(&[TEKKEN]) },
            "gpt-4o" => way(&[GPT4O]),
            _ => return None,
        })
    }

    /// The `normalizer` of a `tokenizer.json`.
    pub fn normalizer(&self) -> Value {
        if self.nfc { json!({ "type": "NFC" }) } else { Value::Null }
    }

    /// The `pre_tokenizer` of a `tokenizer.json`.
    pub fn json(&self) -> Value {
        let split = |expression: &&str| {
            json!({
                "type": "Split",
                "pattern": { "Regex": expression },
                "behavior": "Isolated",
                "invert": false,
            })
        };
        let bytes = json!({
            "type": "ByteLevel",
            "add_prefix_space": false,
            "trim_offsets": true,
            "use_regex": false,
        });
        let parts: Vec<Value> = self.expressions.iter().map(split).chain([bytes]).collect();
        json!({ "type": "Sequence", "pretokenizers": parts })
    }
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
}
