//! What the decoder computes with: the model's own tensors, and a copy of an adapter's factors.

use candle_core::{CpuStorage, DType, Storage, Tensor};

use hone_model::adapter::LinearKind;
use hone_model::adapter::weights::LoraWeights;
use hone_model::kernels::storage::{is_16_bit, with_upcast};
use hone_model::spec::AttentionOptions;
use hone_model::{Model, ModelError, ModelSpec};

use super::SamplerError;
use crate::matmul::{Half, Lanes, Rows, Start, by_outputs, half_part, part};

/// For error messages.
const NAME: &str = "decoder";

/// Rows of a 16-bit weight that are widened at a time: few enough for a processor's own cache, and a
/// multiple of every tile.
const WIDENED_ROWS: usize = 48;

/// A linear layer. The weight is the model's own tensor, shared.
pub(super) struct Linear {
    weight: Tensor,
    /// `[out]`
    bias: Option<Vec<f32>>,
    pub out: usize,
    pub inner: usize,
}

/// Linear layers side by side on one input, whose outputs lie one behind the other.
pub(super) struct Stack {
    pub linears: Vec<(LinearKind, Linear)>,
    pub inner: usize,
}

/// One block.
pub(super) struct Layer {
    /// Before the attention and before the MLP; the model's offset is added.
    pub norms: [Vec<f32>; 2],
    /// Behind attention and MLP.
    pub output_norms: Option<[Vec<f32>; 2]>,
    /// Over each head of queries and of keys.
    pub head_norms: Option<[Vec<f32>; 2]>,
    /// Queries, keys, values.
    pub qkv: Stack,
    pub o: Stack,
    /// Gate, then up.
    pub gate_up: Stack,
    pub down: Stack,
    pub rope: bool,
    pub options: AttentionOptions,
}

/// The model's weights, shared with it; only norms and biases are copied.
pub struct BaseWeights {
    pub(super) spec: ModelSpec,
    embedding: Tensor,
    head: Tensor,
    pub(super) norm: Vec<f32>,
    pub(super) layers: Vec<Layer>,
    bytes: usize,
}

impl BaseWeights {
    /// Shares a model's weights.
    ///
    /// # Errors
    /// If they are not f32, f16 or bf16 in main memory, row after row.
    pub fn new(model: &Model) -> Result<Self, SamplerError> {
        let spec = model.spec().clone();
        let layers = (0..spec.num_layers).map(|layer| Layer::new(model, layer));
        let layers: Vec<Layer> = layers.collect::<Result<_, _>>()?;
        let head = usable(model.head())?;
        let stacks = layers.iter().flat_map(|l| [&l.qkv, &l.o, &l.gate_up, &l.down]);
        let linears = stacks.flat_map(|stack| &stack.linears).map(|(_, linear)| &linear.weight);
        let size = |weight: &Tensor| weight.elem_count() * weight.dtype().size_in_bytes();
        Ok(Self {
            bytes: linears.chain([&head]).map(size).sum(),
            embedding: usable(model.embedding())?,
            head,
            norm: offset(model.norm(), &spec)?,
            layers,
            spec,
        })
    }

    /// A token's row of the embedding into `out` `[hidden]`, times `scale`.
    pub(super) fn embed(
        &self,
        token: usize,
        out: &mut [f32],
        scale: f32,
    ) -> Result<(), SamplerError> {
        let (vocab, hidden) = (self.spec.vocab_size, self.spec.hidden_size);
        if token >= vocab {
            return Err(SamplerError::Internal(format!(
                "token {token} is outside the vocabulary of {vocab}"
            )));
        }
        let range = token * hidden..(token + 1) * hidden;
        Ok(with_upcast(&self.embedding, range, NAME, |row: &[f32]| {
            out.iter_mut().zip(row).for_each(|(out, x)| *out = x * scale);
            Ok(())
        })?)
    }

    /// Logits from `first` on, on up to `threads` threads: as many as `out` `[outputs, width]` has.
    pub(super) fn head(
        &self,
        out: &mut [f32],
        first: usize,
        x: Lanes<'_>,
        threads: usize,
    ) -> Result<(), SamplerError> {
        by_outputs(out, x.width, self.spec.hidden_size, threads, |from, out| {
            stored(&self.head, out, first + from, x, Start::Zero)
        })
    }

    /// Bytes of the weights that a step reads, the embedding left out unless it is the head.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Layer {
    fn new(model: &Model, layer: usize) -> Result<Self, SamplerError> {
        let spec = model.spec();
        let missing = || SamplerError::Weights(format!("layer {layer} is incomplete"));
        let block = model.blocks().get(layer).ok_or_else(missing)?;
        let stack = |kinds: &[LinearKind]| {
            let linear = |kind: &LinearKind| {
                let (weight, bias) = block.linear(*kind).ok_or_else(missing)?;
                let bias = bias.map(values).transpose()?;
                let (out, inner) = weight.dims2()?;
                Ok((*kind, Linear { weight: usable(weight)?, bias, out, inner }))
            };
            let linears = kinds.iter().map(linear).collect::<Result<Vec<_>, SamplerError>>()?;
            let inner = linears.first().map_or(0, |(_, linear)| linear.inner);
            Ok::<_, SamplerError>(Stack { linears, inner })
        };
        let pair = |pair: Option<&[Tensor; 2]>| match pair {
            Some([a, b]) => Ok::<_, SamplerError>(Some([offset(a, spec)?, offset(b, spec)?])),
            None => Ok(None),
        };
        let [attention, mlp] = block.norms();
        let (qkv, gate_up): (&[_], &[_]) = if spec.fused {
            (&[LinearKind::QkvProj], &[LinearKind::GateUpProj])
        } else {
            let qkv = &[LinearKind::QProj, LinearKind::KProj, LinearKind::VProj];
            (qkv, &[LinearKind::GateProj, LinearKind::UpProj])
        };
        Ok(Self {
            norms: [offset(attention, spec)?, offset(mlp, spec)?],
            output_norms: pair(block.output_norms())?,
            head_norms: pair(block.head_norms())?,
            qkv: stack(qkv)?,
            o: stack(&[LinearKind::OProj])?,
            gate_up: stack(gate_up)?,
            down: stack(&[LinearKind::DownProj])?,
            rope: spec.layers.get(layer).is_some_and(|layer| layer.rope),
            options: spec.attention_options(layer),
        })
    }
}

impl Stack {
    /// Outputs of all its layers.
    pub fn outputs(&self) -> usize {
        self.linears.iter().map(|(_, linear)| linear.out).sum()
    }
}

impl Linear {
    /// Its outputs from `first` on, with the bias: as many as `out` `[outputs, width]` has.
    pub fn part(&self, out: &mut [f32], first: usize, x: Lanes<'_>) -> Result<(), SamplerError> {
        let start = match &self.bias {
            None => Start::Zero,
            Some(bias) => {
                let rows = out.chunks_exact_mut(x.width).zip(&bias[first..]);
                rows.for_each(|(row, bias)| row.fill(*bias));
                Start::Output
            }
        };
        stored(&self.weight, out, first, x, start)
    }
}

/// A tensor that [`stored`] reads.
fn usable(tensor: &Tensor) -> Result<Tensor, SamplerError> {
    let read = tensor.dtype() == DType::F32 || is_16_bit(tensor.dtype());
    if read && tensor.device().is_cpu() && tensor.is_contiguous() {
        return Ok(tensor.clone());
    }
    let (dtype, device) = (tensor.dtype(), tensor.device());
    Err(SamplerError::Weights(format!("a tensor is {dtype:?} on {device:?}, or not contiguous")))
}

/// The product with rows from `first` on of a weight `[outputs, inner]` on this thread: as many as
/// `out` `[outputs, width]` has.
fn stored(
    weight: &Tensor,
    out: &mut [f32],
    first: usize,
    x: Lanes<'_>,
    start: Start,
) -> Result<(), SamplerError> {
    let (inner, outputs) = (weight.dim(1)?, out.len() / x.width.max(1));
    let (storage, layout) = weight.storage_and_layout();
    let from = layout.start_offset() + first * inner;
    let range = from..from + outputs * inner;
    let half = match &*storage {
        Storage::Cpu(CpuStorage::F16(values)) => Some(Half::F16(&values[range])),
        Storage::Cpu(CpuStorage::BF16(values)) => Some(Half::Bf16(&values[range])),
        _ => None,
    };
    if half.is_some_and(|half| half_part(out, (half, inner), x, start)) {
        return Ok(());
    }
    let at_once = if half.is_none() { outputs.max(1) } else { WIDENED_ROWS };
    drop(storage);
    for (i, out) in out.chunks_mut(at_once * x.width).enumerate() {
        let first = first + i * at_once;
        let range = first * inner..(first + out.len() / x.width) * inner;
        with_upcast(weight, range, NAME, |values| {
            part(out, Rows { values, inner }, x, start);
            Ok(())
        })?;
    }
    Ok(())
}

fn values(tensor: &Tensor) -> Result<Vec<f32>, SamplerError> {
    Ok(tensor.flatten_all()?.to_dtype(DType::F32)?.to_vec1()?)
}

/// A norm's weight as it multiplies.
fn offset(weight: &Tensor, spec: &ModelSpec) -> Result<Vec<f32>, SamplerError> {
    let mut weight = values(weight)?;
    weight.iter_mut().for_each(|w| *w += spec.norm_offset as f32);
    Ok(weight)
}

/// AdapterWeights of one linear layer: `delta(x) = b (a x)`.
pub(super) struct AdapterPair {
    pub r: usize,
    /// `[r, in]`
    pub a: Vec<f32>,
    /// `[out, r]`, the scale multiplied in.
    pub b: Vec<f32>,
}

/// An adapter's factors, copied: what becomes of the adapter changes them no more.
pub struct AdapterWeights {
    /// By layer, then by kind in the order of the model's linear layers.
    layers: Vec<Vec<(LinearKind, AdapterPair)>>,
    /// The greatest rank.
    pub(super) rank: usize,
}

impl AdapterWeights {
    /// Copies an adapter.
    ///
    /// # Errors
    /// If a factor cannot be read.
    pub fn new(spec: &ModelSpec, lora: &LoraWeights) -> Result<Self, SamplerError> {
        let mut layers = Vec::with_capacity(spec.num_layers);
        let mut rank = 0;
        for layer in 0..spec.num_layers {
            let mut factors = Vec::new();
            for (kind, _) in spec.linears(layer) {
                let Some(pair) = lora.pair(layer, kind) else { continue };
                let r = pair.a.dims2()?.0;
                let mut b = values(pair.b.as_tensor())?;
                b.iter_mut().for_each(|b| *b *= pair.scale as f32);
                factors.push((kind, AdapterPair { r, a: values(pair.a.as_tensor())?, b }));
                rank = rank.max(r);
            }
            layers.push(factors);
        }
        Ok(Self { layers, rank })
    }

    /// The factors of one linear layer, if it is adapted.
    pub(super) fn get(&self, layer: usize, kind: LinearKind) -> Option<&AdapterPair> {
        let factors = self.layers.get(layer)?;
        factors.iter().find(|(own, _)| *own == kind).map(|(_, factor)| factor)
    }
}

impl From<ModelError> for SamplerError {
    fn from(error: ModelError) -> Self {
        Self::Internal(error.to_string())
    }
}
