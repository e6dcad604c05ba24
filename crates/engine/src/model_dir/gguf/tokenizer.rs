//! `tokenizer.json` from the metadata of a GGUF file.

use serde_json::{Value, json};

use super::metadata::Metadata;
use super::pre_tokenizer::PreTokenizer;
use super::sentence_piece;
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
        "llama" => sentence_piece::parts(&tokens, metadata)?,
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
