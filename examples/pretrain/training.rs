//! Training from random weights.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::loss::cross_entropy;
use candle_nn::optim::{AdamW, Optimizer, ParamsAdamW};
use rand::Rng;
use rand_chacha::ChaCha8Rng;

use hone_model::transformer::Segments;
use hone_model::{Model, ModelSpec};

use super::say;

const LEARNING_RATE: f64 = 3e-3;
const WARMUP_STEPS: usize = 50;
/// The share of the steps after which the learning rate falls.
const HOLD: f64 = 0.4;
const MAX_GRAD_NORM: f64 = 1.0;
/// The standard deviation of initial weights.
pub const INITIAL_DEVIATION: f64 = 0.06;

/// A sequence of tokens.
#[derive(Default)]
pub struct Sequence {
    /// The tokens.
    pub ids: Vec<u32>,
    /// The positions of the tokens that the model learns to predict; never 0.
    pub learned: Vec<usize>,
}

impl Sequence {
    /// Appends tokens that the model only reads.
    pub fn read(&mut self, ids: Vec<u32>) {
        self.ids.extend(ids);
    }

    /// Appends tokens that the model learns to predict.
    pub fn learn(&mut self, ids: Vec<u32>) {
        self.learned.extend(self.ids.len()..self.ids.len() + ids.len());
        self.ids.extend(ids);
    }
}

/// One batch, padded on the right.
struct Batch {
    /// `[batch, len]`
    ids: Tensor,
    /// Rows of the flattened batch whose next token is learned.
    rows: Tensor,
    /// That token, `[rows]`.
    targets: Tensor,
}

impl Batch {
    fn new(sequences: Vec<Sequence>, padding: u32, device: &Device) -> Result<Self> {
        let (batch, len) =
            (sequences.len(), sequences.iter().map(|s| s.ids.len()).max().unwrap_or(0));
        let (mut all, mut rows, mut targets) = (Vec::new(), Vec::new(), Vec::new());
        for (index, sequence) in sequences.into_iter().enumerate() {
            for position in sequence.learned {
                rows.push((index * len + position - 1) as u32);
                targets.push(sequence.ids[position]);
            }
            let missing = len - sequence.ids.len();
            all.extend(sequence.ids);
            all.extend(std::iter::repeat_n(padding, missing));
        }
        let count = rows.len();
        Ok(Self {
            ids: Tensor::from_vec(all, (batch, len), device)?,
            rows: Tensor::from_vec(rows, count, device)?,
            targets: Tensor::from_vec(targets, count, device)?,
        })
    }
}

/// Norms at 1, biases at 0, everything else normal with [`INITIAL_DEVIATION`].
///
/// # Errors
///
/// A failure of the library.
pub fn initial_weights(
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

/// Trains the weights in place, on the sequences that `batch` returns for the share of the steps that are done.
/// `padding` is the token that fills short sequences.
///
/// # Errors
///
/// A failure of `batch` or of the library.
pub fn train(
    spec: ModelSpec,
    weights: &BTreeMap<String, Var>,
    steps: usize,
    padding: u32,
    mut batch: impl FnMut(f64) -> Result<Vec<Sequence>>,
) -> Result<()> {
    let tensors = weights.iter().map(|(name, var)| (name.clone(), var.as_tensor().clone()));
    let model = Model::new(spec, tensors.collect())?;
    let vars: Vec<Var> = weights.values().cloned().collect();
    let settings = ParamsAdamW { beta2: 0.98, weight_decay: 0.01, ..ParamsAdamW::default() };
    let mut optimizer = AdamW::new(vars.clone(), settings)?;
    let (start, mut smoothed) = (Instant::now(), None);
    for step in 0..steps {
        let done = step as f64 / steps as f64;
        let batch = Batch::new(batch(done)?, padding, &Device::Cpu)?;
        let (count, len) = batch.ids.dims2()?;
        let segments = Arc::new(Segments::batch(count, len));
        let hidden = model.hidden(&batch.ids.flatten_all()?, &segments, None, None)?;
        let hidden = hidden.index_select(&batch.rows, 0)?;
        let loss = cross_entropy(&model.logits(&hidden)?, &batch.targets)?;
        let mut gradients = loss.backward()?;
        clip(&mut gradients, &vars)?;
        optimizer.set_learning_rate(learning_rate(step, done));
        optimizer.step(&gradients)?;

        let loss = loss.to_scalar::<f32>()?;
        let mean = smoothed.map_or(loss, |mean: f32| 0.98 * mean + 0.02 * loss);
        smoothed = Some(mean);
        if (step + 1) % 100 == 0 {
            let seconds = start.elapsed().as_secs();
            say(&format!("step {} of {steps}, loss {mean:.4}, {seconds} s", step + 1));
        }
    }
    Ok(())
}

/// Rises over the warm-up, stays constant, then falls linearly to a fiftieth.
fn learning_rate(step: usize, done: f64) -> f64 {
    let warm = ((step + 1) as f64 / WARMUP_STEPS as f64).min(1.0);
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
