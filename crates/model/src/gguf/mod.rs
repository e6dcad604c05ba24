//! GGUF: the model files of llama.cpp, with metadata, tokenizer and quantized tensors.

mod config;
mod file;
mod tokenizer;

pub(crate) use config::config_json;
pub(crate) use file::{GgufFile, GgufTensor, decimal, is_gguf};
pub(crate) use tokenizer::{GgufVocabulary, tokenizer_json};
