//! Trains the embedded model from a seed:
//!
//! ```text
//! cargo run --release --example pretrain_embedded [DIRECTORY]
//! ```
//!
//! It writes a Hugging Face directory (`models/embedded` by default): a Qwen2 decoder that adds small
//! numbers, trained with Hone's differentiable decoder, and its byte-level BPE tokenizer.
//!
//! Processors round differently, so weights from another machine differ slightly from the committed
//! ones. `tests/demo/embedded_model.rs` checks the properties of both.
//!
//! The model must leave something to learn. It first learns to add, and then its task with controlled
//! errors (`lessons::NOISE`): plain answers without tags, forgotten carries, remarks around the answer.
//! Some of these become the most probable answers, so that training must change what the model believes
//! and not only how sure it is. Pairs of operands that the demo holds out are never used.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, anyhow};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::loss::cross_entropy;
use candle_nn::optim::{AdamW, Optimizer, ParamsAdamW};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::normalizers::NFC;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, SplitDelimiterBehavior, Tokenizer};

use hone_model::transformer::Segments;
use hone_model::{Model, ModelSpec};

#[path = "pretrain_embedded/lessons.rs"]
mod lessons;

use lessons::{Lesson, Opening, conversation, corpus};

const SEED: u64 = 1;
const STEPS: usize = 4800;
const BATCH: usize = 32;
const LEARNING_RATE: f64 = 3e-3;
const WARMUP_STEPS: usize = 50;
/// The share of the steps after which the learning rate falls.
const HOLD: f64 = 0.4;
const INITIAL_DEVIATION: f64 = 0.06;
const MAX_GRAD_NORM: f64 = 1.0;

const END_OF_TEXT: &str = "<|endoftext|>";
const START: &str = "<|im_start|>";
const END: &str = "<|im_end|>";
const TAGS: [&str; 4] = ["<reasoning>", "</reasoning>", "<answer>", "</answer>"];

/// Qwen2's pre-tokenizer: words, single digits, punctuation, white space. transformers always uses it
/// for this model type, so the file must contain the same.
const PRE_TOKENIZER: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// ChatML.
const CHAT_TEMPLATE: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

fn main() -> Result<()> {
    let dir = std::env::args_os().nth(1).map_or_else(|| "models/embedded".into(), PathBuf::from);
    fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let device = Device::Cpu;
    let tokenizer = build_tokenizer().map_err(|e| anyhow!("tokenizer: {e}"))?;
    let config = model_config(&tokenizer)?;
    let spec = ModelSpec::from_config(&config)?;
    let mut rng = ChaCha8Rng::seed_from_u64(SEED);
    let weights = initial_weights(&spec, &mut rng, &device)?;
    let parameters: usize = weights.values().map(|var| var.elem_count()).sum();
    say(&format!("{} tokens, {parameters} parameters", spec.vocab_size));

    pretrain(spec, &weights, &tokenizer, &mut rng, &device)?;
    write(&dir, &tokenizer, &config, &weights)
}

#[expect(clippy::print_stderr, reason = "progress of a command-line tool")]
fn say(line: &str) {
    eprintln!("{line}");
}

// --- The tokenizer -----------------------------------------------------------------------------

/// Byte-level BPE whose merges are the words of the task; any other text falls back to bytes.
fn build_tokenizer() -> tokenizers::Result<Tokenizer> {
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
    tokenizer.train(&mut TrainerWrapper::from(trainer), corpus().into_iter())?;
    let token = |text: &&str, special| AddedToken::from(*text, special).normalized(false);
    tokenizer.add_special_tokens(&[END_OF_TEXT, START, END].map(|t| token(&t, true)));
    // Ordinary tokens, like Qwen3's `<think>`: decoding keeps them as text.
    tokenizer.add_tokens(&TAGS.map(|t| token(&t, false)));
    Ok(tokenizer)
}

fn id_of(tokenizer: &Tokenizer, token: &str) -> Result<u32> {
    tokenizer.token_to_id(token).with_context(|| format!("the tokenizer has no {token}"))
}

fn encode(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>> {
    let encoding = tokenizer.encode(text, false).map_err(|e| anyhow!("{text:?}: {e}"))?;
    Ok(encoding.get_ids().to_vec())
}

// --- Batches -----------------------------------------------------------------------------------

/// One batch, padded on the right.
struct Batch {
    /// `[batch, len]`
    ids: Tensor,
    /// Rows of the flattened batch whose next token is the completion's.
    rows: Tensor,
    /// That token, `[rows]`.
    targets: Tensor,
}

fn batch(
    tokenizer: &Tokenizer,
    lesson: Lesson,
    rng: &mut ChaCha8Rng,
    device: &Device,
) -> Result<Batch> {
    let end = id_of(tokenizer, END)?;
    // One opening for the whole batch, which keeps padding short.
    let opening = match rng.random::<f64>() {
        x if x < 0.8 || lesson == Lesson::Sums => Opening::Nothing,
        x if x < 0.9 => Opening::System,
        _ => Opening::Exchange,
    };
    let mut sequences = Vec::with_capacity(BATCH);
    for _ in 0..BATCH {
        let (prompt, completion) = conversation(lesson, opening, rng);
        let mut ids = encode(tokenizer, &prompt)?;
        let prompt_len = ids.len();
        ids.extend(encode(tokenizer, &completion)?);
        ids.push(end);
        sequences.push((ids, prompt_len));
    }
    let len = sequences.iter().map(|(ids, _)| ids.len()).max().unwrap_or(0);
    let (mut all, mut rows, mut targets) = (Vec::new(), Vec::new(), Vec::new());
    for (sequence, (ids, prompt_len)) in sequences.into_iter().enumerate() {
        for (offset, id) in ids[prompt_len..].iter().enumerate() {
            rows.push((sequence * len + prompt_len + offset - 1) as u32);
            targets.push(*id);
        }
        let padding = len - ids.len();
        all.extend(ids);
        all.extend(std::iter::repeat_n(end, padding));
    }
    let count = rows.len();
    Ok(Batch {
        ids: Tensor::from_vec(all, (BATCH, len), device)?,
        rows: Tensor::from_vec(rows, count, device)?,
        targets: Tensor::from_vec(targets, count, device)?,
    })
}

// --- The model ---------------------------------------------------------------------------------

fn model_config(tokenizer: &Tokenizer) -> Result<Value> {
    Ok(json!({
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": tokenizer.get_vocab_size(true),
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_dropout": 0.0,
        "initializer_range": INITIAL_DEVIATION,
        "use_cache": true,
        "use_sliding_window": false,
        "sliding_window": null,
        "max_window_layers": 2,
        "tie_word_embeddings": false,
        "torch_dtype": "float32",
        "bos_token_id": null,
        "eos_token_id": id_of(tokenizer, END)?,
        "pad_token_id": id_of(tokenizer, END_OF_TEXT)?,
    }))
}

/// Norms at 1, biases at 0, everything else normal with [`INITIAL_DEVIATION`].
fn initial_weights(
    spec: &ModelSpec,
    rng: &mut ChaCha8Rng,
    device: &Device,
) -> Result<BTreeMap<String, Var>> {
    let mut weights = BTreeMap::new();
    for (name, shape) in spec.weight_shapes() {
        let count = shape.iter().product();
        let values: Vec<f32> = if name.ends_with("norm.weight") {
            vec![1.0; count]
        } else if name.ends_with("bias") {
            vec![0.0; count]
        } else {
            (0..count).map(|_| INITIAL_DEVIATION as f32 * normal(rng)).collect()
        };
        weights.insert(name, Var::from_tensor(&Tensor::from_vec(values, shape, device)?)?);
    }
    Ok(weights)
}

/// A standard normal number (Box and Muller 1958).
fn normal(rng: &mut ChaCha8Rng) -> f32 {
    let (u, v): (f64, f64) = (1.0 - rng.random::<f64>(), rng.random());
    ((-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()) as f32
}

/// Trains the weights in place.
fn pretrain(
    spec: ModelSpec,
    weights: &BTreeMap<String, Var>,
    tokenizer: &Tokenizer,
    rng: &mut ChaCha8Rng,
    device: &Device,
) -> Result<()> {
    let tensors = weights.iter().map(|(name, var)| (name.clone(), var.as_tensor().clone()));
    let model = Model::new(spec, tensors.collect())?;
    let vars: Vec<Var> = weights.values().cloned().collect();
    let settings = ParamsAdamW { beta2: 0.98, weight_decay: 0.01, ..ParamsAdamW::default() };
    let mut optimizer = AdamW::new(vars.clone(), settings)?;
    let (start, mut smoothed) = (Instant::now(), None);
    for step in 0..STEPS {
        let batch = batch(tokenizer, Lesson::at(step as f64 / STEPS as f64), rng, device)?;
        let (count, len) = batch.ids.dims2()?;
        let segments = Arc::new(Segments::batch(count, len));
        let hidden = model.hidden(&batch.ids.flatten_all()?, &segments, None, None)?;
        let hidden = hidden.index_select(&batch.rows, 0)?;
        let loss = cross_entropy(&model.logits(&hidden)?, &batch.targets)?;
        let mut gradients = loss.backward()?;
        clip(&mut gradients, &vars)?;
        optimizer.set_learning_rate(learning_rate(step));
        optimizer.step(&gradients)?;

        let loss = loss.to_scalar::<f32>()?;
        let mean = smoothed.map_or(loss, |mean: f32| 0.98 * mean + 0.02 * loss);
        smoothed = Some(mean);
        if (step + 1) % 100 == 0 {
            let seconds = start.elapsed().as_secs();
            say(&format!("step {} of {STEPS}, loss {mean:.4}, {seconds} s", step + 1));
        }
    }
    Ok(())
}

/// Rises over the warm-up, stays constant, then falls linearly to a fiftieth.
fn learning_rate(step: usize) -> f64 {
    let warm = ((step + 1) as f64 / WARMUP_STEPS as f64).min(1.0);
    let done = step as f64 / STEPS as f64;
    let fallen = ((done - HOLD) / (1.0 - HOLD)).max(0.0);
    LEARNING_RATE * warm * (1.0 - 0.98 * fallen)
}

/// Clips the gradients to a joint norm of [`MAX_GRAD_NORM`].
fn clip(gradients: &mut GradStore, vars: &[Var]) -> Result<()> {
    let mut squares = 0.0;
    for gradient in vars.iter().filter_map(|var| gradients.get(var)) {
        squares += f64::from(gradient.sqr()?.sum_all()?.to_dtype(DType::F32)?.to_scalar::<f32>()?);
    }
    let scale = MAX_GRAD_NORM / (squares.sqrt() + 1e-6);
    if scale < 1.0 {
        for var in vars {
            if let Some(gradient) = gradients.remove(var) {
                gradients.insert(var, (gradient * scale)?);
            }
        }
    }
    Ok(())
}

// --- The directory -----------------------------------------------------------------------------

fn write(
    dir: &Path,
    tokenizer: &Tokenizer,
    config: &Value,
    weights: &BTreeMap<String, Var>,
) -> Result<()> {
    let (pad, end) = (id_of(tokenizer, END_OF_TEXT)?, id_of(tokenizer, END)?);
    write_json(&dir.join("config.json"), config)?;
    write_json(
        &dir.join("generation_config.json"),
        &json!({ "do_sample": true, "eos_token_id": [end, pad], "pad_token_id": pad }),
    )?;
    write_json(
        &dir.join("tokenizer_config.json"),
        &json!({
            "tokenizer_class": "Qwen2Tokenizer",
            "model_max_length": config["max_position_embeddings"],
            "add_prefix_space": false,
            "clean_up_tokenization_spaces": false,
            "bos_token": null,
            "eos_token": END,
            "pad_token": END_OF_TEXT,
            "unk_token": null,
            "chat_template": CHAT_TEMPLATE,
        }),
    )?;
    tokenizer.save(dir.join("tokenizer.json"), true).map_err(|e| anyhow!("tokenizer: {e}"))?;
    let tensors = weights.iter().map(|(name, var)| (name.clone(), var.as_tensor().clone()));
    let weights_path = dir.join("model.safetensors");
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    safetensors::serialize_to_file(tensors, Some(metadata), &weights_path)?;
    say(&format!("written to {}", dir.display()));
    Ok(())
}

fn write_json(path: &Path, value: &Value) -> Result<()> {
    let text = serde_json::to_string_pretty(value)? + "\n";
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}
