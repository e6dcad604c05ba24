//! What the decoder computes with: the model's own tensors, and a copy of an adapter's factors.

use candle_core::{CpuStorage, DType, Storage, Tensor};

use super::NativeError;
use super::product::{Lanes, Rows, Start, part};
use crate::config::LinearKind;
use crate::train::model::{AttentionOptions, Model, ModelSpec};
use crate::train::{LearnError, Lora};

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
pub struct Weights {
    pub(super) spec: ModelSpec,
    embedding: Tensor,
    head: Tensor,
    pub(super) norm: Vec<f32>,
    pub(super) layers: Vec<Layer>,
}

impl Weights {
    /// Shares a model's weights.
    ///
    /// # Errors
    /// If they are not f32 in main memory, row after row.
    pub fn new(model: &Model) -> Result<Self, NativeError> {
        let spec = model.spec().clone();
        let layers = (0..spec.num_layers).map(|layer| Layer::new(model, layer));
        Ok(Self {
            embedding: usable(model.embedding())?,
            head: usable(model.head())?,
            norm: offset(model.norm(), &spec)?,
            layers: layers.collect::<Result<_, _>>()?,
            spec,
        })
    }

    /// Calls `f` with the embedding's rows.
    pub(super) fn embedding<R>(&self, f: impl FnOnce(Rows<'_>) -> R) -> Result<R, NativeError> {
        rows(&self.embedding, self.spec.hidden_size, f)
    }

    /// Calls `f` with the output layer's rows.
    pub(super) fn head<R>(&self, f: impl FnOnce(Rows<'_>) -> R) -> Result<R, NativeError> {
        rows(&self.head, self.spec.hidden_size, f)
    }

    /// Bytes of the weights that a step reads, the embedding left out unless it is the head.
    pub fn bytes(&self) -> usize {
        let stacks = |l: &Layer| {
            [&l.qkv, &l.o, &l.gate_up, &l.down].iter().map(|s| s.inner * s.outputs()).sum::<usize>()
        };
        let blocks: usize = self.layers.iter().map(stacks).sum();
        (blocks + self.spec.vocab_size * self.spec.hidden_size) * size_of::<f32>()
    }
}

impl Layer {
    fn new(model: &Model, layer: usize) -> Result<Self, NativeError> {
        let spec = model.spec();
        let missing = || NativeError::Weights(format!("layer {layer} is incomplete"));
        let block = model.blocks().get(layer).ok_or_else(missing)?;
        let stack = |kinds: &[LinearKind]| {
            let linear = |kind: &LinearKind| {
                let (weight, bias) = block.linear(*kind).ok_or_else(missing)?;
                let bias = bias.map(values).transpose()?;
                let (out, inner) = weight.dims2()?;
                Ok((*kind, Linear { weight: usable(weight)?, bias, out, inner }))
            };
            let linears = kinds.iter().map(linear).collect::<Result<Vec<_>, NativeError>>()?;
            let inner = linears.first().map_or(0, |(_, linear)| linear.inner);
            Ok::<_, NativeError>(Stack { linears, inner })
        };
        let pair = |pair: Option<&[Tensor; 2]>| match pair {
            Some([a, b]) => Ok::<_, NativeError>(Some([offset(a, spec)?, offset(b, spec)?])),
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
    pub fn part(&self, out: &mut [f32], first: usize, x: Lanes<'_>) -> Result<(), NativeError> {
        let start = match &self.bias {
            None => Start::Zero,
            Some(bias) => {
                let rows = out.chunks_exact_mut(x.width).zip(&bias[first..]);
                rows.for_each(|(row, bias)| row.fill(*bias));
                Start::Output
            }
        };
        rows(&self.weight, self.inner, |w| {
            part(out, Rows { values: &w.values[first * w.inner..], ..w }, x, start);
        })
    }
}

/// A tensor that can be read in place.
fn usable(tensor: &Tensor) -> Result<Tensor, NativeError> {
    if tensor.dtype() == DType::F32 && tensor.device().is_cpu() && tensor.is_contiguous() {
        return Ok(tensor.clone());
    }
    let (dtype, device) = (tensor.dtype(), tensor.device());
    Err(NativeError::Weights(format!("a tensor is {dtype:?} on {device:?}, or not contiguous")))
}

/// Calls `f` with the values of a tensor that is [`usable`].
fn rows<R>(tensor: &Tensor, inner: usize, f: impl FnOnce(Rows<'_>) -> R) -> Result<R, NativeError> {
    let (storage, layout) = tensor.storage_and_layout();
    match (&*storage, layout.contiguous_offsets()) {
        (Storage::Cpu(CpuStorage::F32(values)), Some((start, end))) => {
            Ok(f(Rows { values: &values[start..end], inner }))
        }
        _ => Err(NativeError::Weights("a tensor has changed its place".to_owned())),
    }
}

fn values(tensor: &Tensor) -> Result<Vec<f32>, NativeError> {
    Ok(tensor.flatten_all()?.to_dtype(DType::F32)?.to_vec1()?)
}

/// A norm's weight as it multiplies.
fn offset(weight: &Tensor, spec: &ModelSpec) -> Result<Vec<f32>, NativeError> {
    let mut weight = values(weight)?;
    weight.iter_mut().for_each(|w| *w += spec.norm_offset as f32);
    Ok(weight)
}

/// Factors of one linear layer: `delta(x) = b (a x)`.
pub(super) struct Factor {
    pub r: usize,
    /// `[r, in]`
    pub a: Vec<f32>,
    /// `[out, r]`, the scale multiplied in.
    pub b: Vec<f32>,
}

/// An adapter's factors, copied: what becomes of the adapter changes them no more.
pub struct Factors {
    /// By layer, then by kind in the order of the model's linear layers.
    layers: Vec<Vec<(LinearKind, Factor)>>,
    /// The greatest rank.
    pub(super) rank: usize,
}

impl Factors {
    /// Copies an adapter.
    ///
    /// # Errors
    /// If a factor cannot be read.
    pub fn new(spec: &ModelSpec, lora: &Lora) -> Result<Self, NativeError> {
        let mut layers = Vec::with_capacity(spec.num_layers);
        let mut rank = 0;
        for layer in 0..spec.num_layers {
            let mut factors = Vec::new();
            for (kind, _) in spec.linears(layer) {
                let Some(pair) = lora.pair(layer, kind) else { continue };
                let r = pair.a.dims2()?.0;
                let mut b = values(pair.b.as_tensor())?;
                b.iter_mut().for_each(|b| *b *= pair.scale as f32);
                factors.push((kind, Factor { r, a: values(pair.a.as_tensor())?, b }));
                rank = rank.max(r);
            }
            layers.push(factors);
        }
        Ok(Self { layers, rank })
    }

    /// The factors of one linear layer, if it is adapted.
    pub(super) fn get(&self, layer: usize, kind: LinearKind) -> Option<&Factor> {
        let factors = self.layers.get(layer)?;
        factors.iter().find(|(own, _)| *own == kind).map(|(_, factor)| factor)
    }
}

impl From<LearnError> for NativeError {
    fn from(error: LearnError) -> Self {
        Self::Internal(error.to_string())
    }
}
