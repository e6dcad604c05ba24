//! The tokenizer.

use anyhow::{Context, Result, anyhow};
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::normalizers::NFC;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, SplitDelimiterBehavior, Tokenizer};

use super::{END, END_OF_TEXT, START};

/// Qwen2's pre-tokenizer: words, single digits, punctuation, white space. transformers always uses it
/// for this model type, so the file must contain the same.
const PRE_TOKENIZER: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Byte-level BPE whose merges are the words of `corpus`; any other text falls back to bytes. Each of `tags`
/// is one token, which decoding keeps as text.
///
/// # Errors
///
/// A failure of the library.
pub fn build(corpus: Vec<String>, tags: &[&str]) -> Result<Tokenizer> {
    train(corpus, tags).map_err(|error| anyhow!("tokenizer: {error}"))
}

fn train(corpus: Vec<String>, tags: &[&str]) -> tokenizers::Result<Tokenizer> {
    let mut tokenizer = Tokenizer::new(BPE::default());
    let split = Split::new(
        SplitPattern::Regex(PRE_TOKENIZER.to_owned()),
        SplitDelimiterBehavior::Isolated,
        false,
    )?;
    let bytes = ByteLevel::new(false, false, false);
    tokenizer
        .with_normalizer(Some(NFC))
        .with_pre_tokenizer(Some(Sequence::new(vec![
            PreTokenizerWrapper::Split(split),
            PreTokenizerWrapper::ByteLevel(bytes),
        ])))
        .with_decoder(Some(bytes));
    let trainer = BpeTrainer::builder()
        .vocab_size(480)
        .min_frequency(1)
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .show_progress(false)
        .build();
    tokenizer.train(&mut TrainerWrapper::from(trainer), corpus.into_iter())?;
    let token = |text: &&str, special| AddedToken::from(*text, special).normalized(false);
    tokenizer.add_special_tokens(&[END_OF_TEXT, START, END].map(|t| token(&t, true)));
    // Ordinary tokens, like Qwen3's `<think>`: decoding keeps them as text.
    let tags: Vec<AddedToken> = tags.iter().map(|tag| token(tag, false)).collect();
    tokenizer.add_tokens(&tags);
    Ok(tokenizer)
}

/// The id of a whole token.
///
/// # Errors
///
/// The tokenizer has no such token.
pub fn id_of(tokenizer: &Tokenizer, token: &str) -> Result<u32> {
    tokenizer.token_to_id(token).with_context(|| format!("the tokenizer has no {token}"))
}

/// The ids of a completion: those of its text, and the token that ends it.
///
/// # Errors
///
/// As [`encode`], or the tokenizer has no such token.
pub fn completion(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>> {
    Ok([encode(tokenizer, text)?, vec![id_of(tokenizer, END)?]].concat())
}

/// The ids of a text.
///
/// # Errors
///
/// A failure of the library.
pub fn encode(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>> {
    let encoding = tokenizer.encode(text, false).map_err(|e| anyhow!("{text:?}: {e}"))?;
    Ok(encoding.get_ids().to_vec())
}
