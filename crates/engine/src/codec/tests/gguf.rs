//! GGUF files against the directories that they were made from
//! (`tests/reference/gguf/make_gguf.py`).

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hone_core::types::{Message, Role};

use crate::codec::{Codec, TextStream};
use crate::ModelDir;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures")
}

fn gguf(name: &str) -> PathBuf {
    fixtures().join("gguf").join(format!("{name}.gguf"))
}

fn error(path: &Path) -> String {
    ModelDir::open(path).unwrap_err().to_string().replace(&path.display().to_string(), "PATH")
}

const TEXTS: [&str; 7] = [
    "",
    "What is the answer?",
    "What is 3 plus 4? The answer is 7.",
    "<|im_start|>user\nWhat's 12 plus 19?<|im_end|>\n<|im_start|>assistant\n",
    "  two  spaces,\n\n\ttabs and 12345 digits ",
    "it's WE'LL don't",
    "<|im_end|><|endoftext|>",
];

#[test]
fn tokenizer_template_and_stop_tokens_equal_those_of_the_directory() {
    for (file, dir) in [
        ("llama2-f32", "families/llama2"),
        ("qwen2-q8_0", "qwen2-tiny"),
        ("gemma2-f32", "families/gemma2"),
    ] {
        let (model, original) =
            (ModelDir::open(&gguf(file)).unwrap(), ModelDir::open(&fixtures().join(dir)).unwrap());
        assert_eq!(model.stop_ids, original.stop_ids, "{file}");
        assert_eq!(model.chat_template, original.chat_template, "{file}");
        assert_eq!(model.special_tokens["eos_token"], original.special_tokens["eos_token"]);
        assert_eq!((model.vocab(), model.context()), (original.vocab(), original.context()));
        let (codec, expected) = (Codec::load(&model).unwrap(), Codec::load(&original).unwrap());
        for text in TEXTS {
            let ids = expected.encode(text).unwrap();
            assert_eq!(codec.encode(text).unwrap(), ids, "{file}: {text:?}");
            assert_eq!(codec.decode(&ids).unwrap(), expected.decode(&ids).unwrap(), "{text:?}");
        }
        assert_eq!(codec.turn_end(), expected.turn_end());
    }
}

#[test]
fn a_directory_with_one_file_stands_for_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny-Q8_0.GGUF");
    fs::copy(gguf("qwen2-q8_0"), &path).unwrap();
    let model = ModelDir::open(dir.path()).unwrap();
    assert_eq!((&model.path, model.name.as_str()), (&path, "tiny-Q8_0"));
    assert_eq!(model.weights, std::slice::from_ref(&path));
    assert!(model.is_gguf() && !ModelDir::open(&fixtures().join("qwen2-tiny")).unwrap().is_gguf());
    assert_eq!(model.config_json().unwrap(), model.config.to_string());

    fs::copy(gguf("llama2-f32"), dir.path().join("other.gguf")).unwrap();
    let two = ModelDir::open(dir.path()).unwrap_err().to_string();
    assert!(two.ends_with("holds 2 GGUF files; name the one to be served"), "{two}");
    // Safetensors files are preferred.
    fs::write(dir.path().join("model.safetensors"), "").unwrap();
    let error = ModelDir::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("config.json: No such file"), "{error}");
}

/// A fixture with some bytes replaced by as many others.
fn changed(from: &str, to: &str) -> (tempfile::TempDir, PathBuf) {
    let mut bytes = fs::read(gguf("qwen2-q8_0")).unwrap();
    let at = bytes.windows(from.len()).position(|window| window == from.as_bytes()).unwrap();
    bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    fs::write(&path, bytes).unwrap();
    (dir, path)
}

#[test]
fn errors_name_the_key_and_the_value() {
    for (from, to, expected) in [
        (
            "general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0qwen2",
            "general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0mamba",
            "PATH: general.architecture is \"mamba\"; supported is one of llama, qwen2, qwen3, \
             gemma2, phi3, smollm3",
        ),
        (
            "qwen2.block_count",
            "qwen2.block_COUNT",
            "PATH: there is no qwen2.block_count in the file",
        ),
        (
            "tokenizer.chat_template",
            "tokenizer.chat_TEMPLATE",
            "PATH: there is no tokenizer.chat_template in the file",
        ),
        ("GGUF", "GGUG", "PATH: it is not a GGUF file"),
    ] {
        let (_dir, path) = changed(from, to);
        assert_eq!(error(&path), expected);
    }
    for (from, to, expected) in [
        ("gpt-2", "gpt-x", "tokenizer.ggml.pre is \"gpt-x\", which is not supported"),
        (
            "gpt2",
            "bert",
            "tokenizer.ggml.model is \"bert\"; supported are byte-level (gpt2) and SentencePiece \
             (llama) tokenizers",
        ),
    ] {
        let (_dir, path) = changed(from, to);
        let error = Codec::load(&ModelDir::open(&path).unwrap()).err().unwrap().to_string();
        assert_eq!(error.replace(&path.display().to_string(), "PATH"), format!("PATH: {expected}"));
    }
}

/// `tests/reference/gguf/gguf_cases.json`.
#[derive(serde::Deserialize)]
struct SentencePieceCases {
    sentence_piece: Vec<SentencePieceCase>,
}

#[derive(serde::Deserialize)]
struct SentencePieceCase {
    text: String,
    ids: Vec<u32>,
    decoded: String,
}

#[test]
fn a_sentence_piece_tokenizer_encodes_and_decodes_as_the_library() {
    let path = fixtures().join("../reference/gguf/gguf_cases.json");
    let cases: SentencePieceCases = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    let model = ModelDir::open(&gguf("llama-spm")).unwrap();
    assert_eq!(model.stop_ids, [2]);
    assert_eq!(model.special_tokens["bos_token"], "<s>");
    let codec = Arc::new(Codec::load(&model).unwrap());
    for SentencePieceCase { text, ids, decoded } in cases.sentence_piece {
        assert_eq!(codec.encode(&text).unwrap(), ids, "{text:?}");
        assert_eq!(codec.decode(&ids).unwrap(), decoded);
        let mut stream = TextStream::new(Arc::clone(&codec), &[]);
        let mut pieces: String = ids.iter().map(|id| stream.push(*id).text).collect();
        pieces += &stream.finish().text;
        assert_eq!(pieces, decoded);
    }
    let message = Message::new(Role::User, "The dog");
    let dog = codec.encode("The dog").unwrap();
    assert_eq!(codec.encode_text("The dog", true).unwrap(), [vec![1], dog.clone()].concat());
    assert_eq!(codec.prompt(&[message]).unwrap(), [vec![1, 3], dog].concat());
}
