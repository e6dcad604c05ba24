//! AdamW over named variables, with moments in 32 or 8 bits, and gradient clipping.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use candle_core::{DType, Device, Tensor, Var};
use rayon::prelude::*;

use hone_model::ModelError;

use crate::config::{OptimizerConfig, OptimizerKind, TrainConfig};
use crate::error::{LearnError, Result};

/// Variables that one thread handles at least: those of a small model take less time than to wake a thread.
const VARIABLES_PER_TASK: usize = 8;

#[derive(Clone, Debug)]
enum Moment {
    /// With the shape and type of the variable.
    Full(Tensor),
    Quantized(QuantizedBlocks),
}

impl Moment {
    /// The moment with the shape, type and device of `like`.
    fn tensor(&self, like: &Tensor, book: &CodeBook) -> Result<Tensor> {
        Ok(match self {
            Self::Full(tensor) => tensor.clone(),
            Self::Quantized(blocks) => {
                Tensor::from_vec(blocks.decode(book), like.shape(), like.device())?
                    .to_dtype(like.dtype())?
            }
        })
    }
}

/// First moment `m`, the running mean of the gradient, and second moment `v`, that of its square.
#[derive(Clone, Debug)]
struct AdamMoments {
    first: Moment,
    second: Moment,
}

struct Updated<'v> {
    name: String,
    variable: &'v Var,
    value: Tensor,
    moments: AdamMoments,
    /// Whether the value and the second moment are.
    is_finite: bool,
}

/// AdamW (Loshchilov & Hutter 2019), with the order of operations of `torch.optim.AdamW`:
///
/// ```text
/// p <- p (1 - lr decay)
/// m <- beta1 m + (1 - beta1) g        v <- beta2 v + (1 - beta2) g^2
/// p <- p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
/// ```
///
/// With eight bits, m and v of variables with at least [`MIN_VALUES`] values are quantized after the update.
#[derive(Clone, Debug, Default)]
pub(crate) struct AdamW {
    pub updates: u64,
    moments: BTreeMap<String, AdamMoments>,
}

impl AdamW {
    /// The moments under the names `NAME.first` and `NAME.second`, or, if quantized,
    /// `NAME.first.codes`, `NAME.first.maxima` and so on.
    pub fn tensors(&self) -> Result<BTreeMap<String, Tensor>> {
        let mut tensors = BTreeMap::new();
        for (name, moments) in &self.moments {
            for (suffix, moment) in [("first", &moments.first), ("second", &moments.second)] {
                let name = format!("{name}.{suffix}");
                match moment {
                    Moment::Full(tensor) => drop(tensors.insert(name, tensor.clone())),
                    Moment::Quantized(QuantizedBlocks { codes, maxima }) => {
                        let codes = Tensor::new(codes.as_slice(), &Device::Cpu)?;
                        let maxima = Tensor::new(maxima.as_slice(), &Device::Cpu)?;
                        tensors.insert(format!("{name}.codes"), codes);
                        tensors.insert(format!("{name}.maxima"), maxima);
                    }
                }
            }
        }
        Ok(tensors)
    }

    /// Restores the result of [`Self::tensors`]. If `train.optimizer` has changed since, the next update converts
    /// the moments.
    pub fn restore(
        &mut self,
        updates: u64,
        variables: &[(String, &Var)],
        mut tensors: BTreeMap<String, Tensor>,
    ) -> Result<()> {
        let mut moments = BTreeMap::new();
        for (name, variable) in variables {
            let first = take(&mut tensors, &format!("{name}.first"), variable)?;
            let second = take(&mut tensors, &format!("{name}.second"), variable)?;
            match (first, second) {
                (Some(first), Some(second)) => {
                    moments.insert(name.clone(), AdamMoments { first, second });
                }
                (None, None) => {}
                _ => return Err(misfit(name)),
            }
        }
        if let Some(name) = tensors.keys().next() {
            return Err(misfit(name));
        }
        (self.updates, self.moments) = (updates, moments);
        Ok(())
    }

    /// Updates every variable that has a gradient, on the threads of the current pool. Returns `false`, and
    /// changes nothing, if a value or moment would not be finite.
    pub fn update<'v>(
        &mut self,
        config: &TrainConfig,
        variables: &[(String, &'v Var)],
        gradients: &BTreeMap<String, Tensor>,
        learning_rate: f64,
    ) -> Result<bool> {
        let OptimizerConfig { kind, beta1, beta2, eps } = config.optimizer;
        let eight_bit = kind == OptimizerKind::AdamW8bit;
        let t = i32::try_from(self.updates + 1).unwrap_or(i32::MAX);
        let step_size = learning_rate / (1.0 - beta1.powi(t));
        let root = (1.0 - beta2.powi(t)).sqrt();
        let updated = |(name, variable): &(String, &'v Var)| -> Result<Option<Updated<'v>>> {
            let Some(gradient) = gradients.get(name) else { return Ok(None) };
            let (first, second) = match self.moments.get(name) {
                Some(m) => {
                    (m.first.tensor(gradient, &SIGNED)?, m.second.tensor(gradient, &UNSIGNED)?)
                }
                None => (gradient.zeros_like()?, gradient.zeros_like()?),
            };
            let first = ((first * beta1)? + (gradient * (1.0 - beta1))?)?;
            let second = ((second * beta2)? + (gradient.sqr()? * (1.0 - beta2))?)?;
            let denominator = ((second.sqrt()? / root)? + eps)?;
            let decayed =
                (variable.as_detached_tensor() * (1.0 - learning_rate * config.weight_decay))?;
            let value = (decayed - ((&first / denominator)? * step_size)?)?;
            let is_finite = is_finite(&value)? && is_finite(&second)?;
            let moments = if eight_bit && is_finite && variable.elem_count() >= MIN_VALUES {
                let first = QuantizedBlocks::encode(&values(&first)?, &SIGNED, false);
                let second = QuantizedBlocks::encode(&values(&second)?, &UNSIGNED, true);
                AdamMoments { first: Moment::Quantized(first), second: Moment::Quantized(second) }
            } else {
                AdamMoments { first: Moment::Full(first), second: Moment::Full(second) }
            };
            Ok(Some(Updated { name: name.clone(), variable, value, moments, is_finite }))
        };
        let updated = variables.par_iter().with_min_len(VARIABLES_PER_TASK).map(updated);
        let updated: Vec<_> = updated.collect::<Result<_>>()?;
        if updated.iter().flatten().any(|updated| !updated.is_finite) {
            return Ok(false);
        }
        for Updated { name, variable, value, moments, .. } in updated.into_iter().flatten() {
            variable.set(&value)?;
            self.moments.insert(name, moments);
        }
        self.updates += 1;
        Ok(true)
    }
}

/// Removes a moment, full or quantized, from saved tensors; `None` if it is not saved.
fn take(
    tensors: &mut BTreeMap<String, Tensor>,
    name: &str,
    variable: &Var,
) -> Result<Option<Moment>> {
    if let Some(full) = tensors.remove(name) {
        let fits = full.dims() == variable.dims() && full.dtype() == variable.dtype();
        return if fits { Ok(Some(Moment::Full(full))) } else { Err(misfit(name)) };
    }
    let parts = ["codes", "maxima"].map(|part| tensors.remove(&format!("{name}.{part}")));
    let (codes, maxima) = match parts {
        [Some(codes), Some(maxima)] => (codes, maxima),
        [None, None] => return Ok(None),
        _ => return Err(misfit(name)),
    };
    let count = variable.elem_count();
    if codes.dims() != [count] || maxima.dims() != [count.div_ceil(BLOCK)] {
        return Err(misfit(name));
    }
    let blocks = QuantizedBlocks { codes: codes.to_vec1()?, maxima: maxima.to_vec1()? };
    Ok(Some(Moment::Quantized(blocks)))
}

fn misfit(name: &str) -> LearnError {
    ModelError::weights(format!("the optimizer's moments of `{name}` do not fit")).into()
}

fn values(tensor: &Tensor) -> Result<Vec<f32>> {
    Ok(tensor.flatten_all()?.to_dtype(DType::F32)?.to_vec1()?)
}

fn is_finite(tensor: &Tensor) -> Result<bool> {
    // 0 times any other value is no number.
    let zero = (tensor * 0.0)?.sum_all()?.to_dtype(DType::F64)?.to_scalar::<f64>()?;
    Ok(zero == 0.0)
}

/// Scales all gradients by `limit / (norm + 1e-6)` if that is below 1, as `torch.nn.utils.clip_grad_norm_`; a
/// limit of 0 does not scale. Returns their Euclidean norm before clipping.
pub(crate) fn clip_global_norm(
    gradients: &mut BTreeMap<String, Tensor>,
    limit: f64,
) -> Result<f64> {
    let square = |gradient: &&Tensor| -> Result<f64> {
        Ok(gradient.sqr()?.sum_all()?.to_dtype(DType::F64)?.to_scalar::<f64>()?)
    };
    let all: Vec<_> = gradients.values().collect();
    let squares = all.par_iter().with_min_len(VARIABLES_PER_TASK).map(square);
    // In the same order for any number of threads.
    let norm = squares.collect::<Result<Vec<f64>>>()?.iter().sum::<f64>().sqrt();
    let factor = limit / (norm + 1e-6);
    if limit > 0.0 && factor < 1.0 {
        for gradient in gradients.values_mut() {
            *gradient = (&*gradient * factor)?;
        }
    }
    Ok(norm)
}

// Block-wise dynamic quantization of moments to eight bits (Dettmers et al. 2021, "8-bit Optimizers via
// Block-wise Quantization"), with the code books of bitsandbytes: each of [`BLOCK`] values is divided by their
// largest magnitude and replaced by the index of the nearest of 256 values, which are densest near 0.

const BLOCK: usize = 256;
/// Tensors with fewer values keep 32 bits, as in bitsandbytes.
const MIN_VALUES: usize = 4096;

/// 256 ascending values from -1 (or 0) to 1.
struct CodeBook {
    values: [f32; 256],
    /// The midpoint of each value and the next.
    midpoints: [f32; 255],
}

/// For first moments, which have both signs.
static SIGNED: LazyLock<CodeBook> = LazyLock::new(|| CodeBook::new(true));
/// For second moments, which are not negative.
static UNSIGNED: LazyLock<CodeBook> = LazyLock::new(|| CodeBook::new(false));

impl CodeBook {
    /// Dynamic tree quantization: 0, 1, and in decade `e` of seven, from `10^-6` to `1`, `2^e` values (twice
    /// as many without a sign), the midpoints of equal parts of `[0.1, 1]` times the decade.
    fn new(signed: bool) -> Self {
        let mut all = vec![0.0, 1.0];
        for decade in 0..7_i32 {
            let parts = 1_u32 << (decade + i32::from(!signed));
            for part in 0..parts {
                let middle = 0.1 + 0.9 * (f64::from(part) + 0.5) / f64::from(parts);
                let value = (middle * 10_f64.powi(decade - 6)) as f32;
                all.push(value);
                if signed {
                    all.push(-value);
                }
            }
        }
        all.sort_unstable_by(f32::total_cmp);
        let mut values = [0.0; 256];
        values.copy_from_slice(&all);
        let midpoints = std::array::from_fn(|i| f32::midpoint(values[i], values[i + 1]));
        Self { values, midpoints }
    }

    fn nearest(&self, x: f32) -> u8 {
        self.midpoints.partition_point(|midpoint| *midpoint < x) as u8
    }
}

/// Quantized values: one byte per value, and four per block.
#[derive(Clone, Debug, PartialEq)]
struct QuantizedBlocks {
    pub codes: Vec<u8>,
    pub maxima: Vec<f32>,
}

impl QuantizedBlocks {
    /// Quantizes finite values. With `positive`, values above 0 do not become 0, for which AdamW would divide
    /// by epsilon alone. bitsandbytes rounds them to 0; the difference only makes steps shorter.
    fn encode(values: &[f32], book: &CodeBook, positive: bool) -> Self {
        let zero = book.nearest(0.0);
        let mut codes = Vec::with_capacity(values.len());
        let mut maxima = Vec::with_capacity(values.len().div_ceil(BLOCK));
        for block in values.chunks(BLOCK) {
            let max = block.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
            maxima.push(max);
            codes.extend(block.iter().map(|x| {
                let code = if max > 0.0 { book.nearest(x / max) } else { zero };
                if positive && *x > 0.0 && code == zero { zero + 1 } else { code }
            }));
        }
        Self { codes, maxima }
    }

    fn decode(&self, book: &CodeBook) -> Vec<f32> {
        let blocks = self.codes.chunks(BLOCK).zip(&self.maxima);
        blocks
            .flat_map(|(codes, max)| codes.iter().map(|c| book.values[usize::from(*c)] * *max))
            .collect()
    }
}

#[cfg(test)]
mod tests;
