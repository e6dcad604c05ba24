//! How byte-level tokenizers split a text before merging, by llama.cpp's name (`tokenizer.ggml.pre`).

use serde_json::{Value, json};

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
