//! SentencePiece tokenizers of the BPE kind (Llama 2, Mistral, Gemma, Phi-3) as `tokenizer.json`.

use std::cmp::Reverse;
use std::collections::HashMap;

use serde_json::{Value, json};

use hone_core::gguf::GgufValue;

use super::metadata::Metadata;
use super::vocabulary::{GgufVocabulary, TokenizerParts};
use crate::error::EngineError;

/// SentencePiece's sign for a space.
const SPACE: &str = "\u{2581}";

/// The parts of a `tokenizer.json`.
///
/// # Errors
/// If the scores are missing.
pub(super) fn parts(
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
