//! One decoder block: attention and gated MLP, each with an RMSNorm before it and a residual sum after
//! it. [`ModelSpec`] selects its options; all families use this block.
//!
//! [`Block::forward`] is a candle graph, for any device and for weights that are trained;
//! [`super::fused_layer`] is the fused implementation for a frozen base on the CPU.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::Tensor;

use super::Segments;
use super::attention::graph_attention;
use crate::adapter::weights::{Dropout, LoraPair, LoraWeights};
use crate::kernels::compute::Compute;
use crate::kernels::ops;
use crate::spec::{Activation, LinearKind, ModelSpec, RopeTables};
use crate::weights::BaseMatrix;
use crate::{ModelError, Result};

/// What all blocks of one forward pass share.
pub(super) struct Context {
    pub spec: ModelSpec,
    pub segments: Arc<Segments>,
    /// Cosines and sines of every token, each `[tokens, rotary_dim / 2]`.
    pub tables: (Tensor, Tensor),
    /// The arithmetic of products with weights in fused layers.
    pub compute: Compute,
}

impl Context {
    pub fn new(
        spec: &ModelSpec,
        segments: &Arc<Segments>,
        rope: &RopeTables,
        compute: Compute,
    ) -> Result<Self> {
        let positions = segments.positions();
        spec.check_length(positions.iter().max().map_or(0, |last| last + 1))?;
        Ok(Self {
            spec: spec.clone(),
            segments: Arc::clone(segments),
            tables: rope.at(&positions)?,
            compute,
        })
    }

    pub fn has_rope(&self, layer: usize) -> bool {
        self.spec.layers.get(layer).is_some_and(|layer| layer.rope)
    }
}

/// RMSNorm over the last dimension, by `weight + norm_offset`.
pub(super) fn norm(spec: &ModelSpec, x: &Tensor, weight: &Tensor) -> candle_core::Result<Tensor> {
    if spec.norm_offset == 0.0 {
        return ops::rms_norm(x, weight, spec.rms_norm_eps);
    }
    ops::rms_norm(x, &(weight + spec.norm_offset)?, spec.rms_norm_eps)
}

#[derive(Clone, Debug)]
struct LinearWeights {
    /// `[out, in]`
    weight: BaseMatrix,
    /// `[out]`
    bias: Option<Tensor>,
}

/// A norm's weight or a bias, which are never quantized.
pub(super) fn unquantized(name: &str, weight: BaseMatrix) -> Result<Tensor> {
    match weight {
        BaseMatrix::Float(tensor) => Ok(tensor),
        BaseMatrix::Quantized(_) => {
            Err(ModelError::weights(format!("`{name}` is quantized, but not a linear layer's")))
        }
    }
}

/// Applies a linear layer of a block, with its adapter.
type ApplyLinear<'a> = &'a mut dyn FnMut(LinearKind, &Tensor) -> candle_core::Result<Tensor>;

/// The weights of one block.
#[derive(Clone, Debug)]
pub struct Block {
    /// Of the norms before the attention and before the MLP, `[hidden]`.
    pub norms: [Tensor; 2],
    /// Of the norms of the outputs of attention and MLP, before the residual sums, `[hidden]`.
    pub output_norms: Option<[Tensor; 2]>,
    /// Of the norms over each head of queries and of keys, `[head_dim]`.
    pub head_norms: Option<[Tensor; 2]>,
    linears: BTreeMap<LinearKind, LinearWeights>,
}

impl Block {
    /// Takes the weights of one layer by their names.
    pub(super) fn new(
        spec: &ModelSpec,
        layer: usize,
        take: &mut impl FnMut(&str) -> Result<BaseMatrix>,
    ) -> Result<Self> {
        let prefix = format!("model.layers.{layer}");
        let mut linears = BTreeMap::new();
        for (kind, _) in spec.linears(layer) {
            let module = kind.module(layer);
            let weight = take(&format!("{module}.weight"))?;
            let bias = spec.has_bias(kind).then(|| {
                let name = format!("{module}.bias");
                unquantized(&name, take(&name)?)
            });
            let bias = bias.transpose()?;
            linears.insert(kind, LinearWeights { weight, bias });
        }
        let mut norm = |name: &str| {
            let name = format!("{prefix}.{name}.weight");
            unquantized(&name, take(&name)?)
        };
        let mut pair = |[a, b]: [&str; 2]| Ok::<_, ModelError>([norm(a)?, norm(b)?]);
        let (inputs, outputs) = spec.norm_names();
        let norms = pair(inputs)?;
        let head_norms = spec.head_norms.then_some(["self_attn.q_norm", "self_attn.k_norm"]);
        Ok(Self {
            norms,
            output_norms: outputs.map(&mut pair).transpose()?,
            head_norms: head_norms.map(&mut pair).transpose()?,
            linears,
        })
    }

    /// Weight `[out, in]` and bias `[out]` of a linear layer.
    pub fn linear(&self, kind: LinearKind) -> Option<(&BaseMatrix, Option<&Tensor>)> {
        self.linears.get(&kind).map(|linear| (&linear.weight, linear.bias.as_ref()))
    }

    pub(super) fn biases(&self) -> impl Iterator<Item = &Tensor> {
        self.linears.values().filter_map(|linear| linear.bias.as_ref())
    }

    pub(super) fn all_norms(&self) -> impl Iterator<Item = &Tensor> {
        let more = [&self.output_norms, &self.head_norms].into_iter().flatten().flatten();
        self.norms.iter().chain(more)
    }

    pub(super) fn matrices(&self) -> impl Iterator<Item = &BaseMatrix> {
        self.linears.values().map(|linear| &linear.weight)
    }

    /// `x` `[tokens, hidden]` to the same shape.
    pub(super) fn forward(
        &self,
        x: &Tensor,
        layer: usize,
        context: &Context,
        lora: Option<&LoraWeights>,
        mut dropout: Option<&mut Dropout>,
    ) -> candle_core::Result<Tensor> {
        let spec = &context.spec;
        let mut linear = |kind, x: &Tensor| {
            self.apply(
                kind,
                x,
                lora.and_then(|lora| lora.pair(layer, kind)),
                dropout.as_deref_mut(),
            )
        };
        let normed = norm(spec, x, &self.norms[0])?;
        let mut out = self.attention(&normed, layer, context, &mut linear)?;
        if let Some([weight, _]) = &self.output_norms {
            out = norm(spec, &out, weight)?;
        }
        let x = (x + out)?;
        let mut out = mlp(&norm(spec, &x, &self.norms[1])?, spec, &mut linear)?;
        if let Some([_, weight]) = &self.output_norms {
            out = norm(spec, &out, weight)?;
        }
        x + out
    }

    /// `[n, in]` to `[n, out]`
    fn apply(
        &self,
        kind: LinearKind,
        x: &Tensor,
        pair: Option<&LoraPair>,
        dropout: Option<&mut Dropout>,
    ) -> candle_core::Result<Tensor> {
        let Some((weight, bias)) = self.linear(kind) else {
            candle_core::bail!("the block has no {}", kind.as_str());
        };
        let y = ops::linear(x, weight.float(kind.as_str())?, bias)?;
        let Some(pair) = pair else { return Ok(y) };
        let x = dropout.map_or(Ok(x.clone()), |dropout| dropout.apply(x))?;
        y + (x.matmul(&pair.a.t()?)?.matmul(&pair.b.t()?)? * pair.scale)?
    }

    /// Causal grouped-query attention; `x` `[tokens, hidden]`.
    fn attention(
        &self,
        x: &Tensor,
        layer: usize,
        context: &Context,
        linear: ApplyLinear<'_>,
    ) -> candle_core::Result<Tensor> {
        let Context { spec, segments, tables, .. } = context;
        let [mut q, mut k, v] = if spec.fused {
            let (q, kv) = (spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim);
            let qkv = linear(LinearKind::QkvProj, x)?;
            let part = |start, len| qkv.narrow(1, start, len)?.contiguous();
            [part(0, q)?, part(q, kv)?, part(q + kv, kv)?]
        } else {
            [
                linear(LinearKind::QProj, x)?,
                linear(LinearKind::KProj, x)?,
                linear(LinearKind::VProj, x)?,
            ]
        };
        if let Some([q_norm, k_norm]) = &self.head_norms {
            let by_head = |x: &Tensor, weight: &Tensor| {
                norm(spec, &x.reshape(((), spec.head_dim))?, weight)?.reshape(x.shape())
            };
            (q, k) = (by_head(&q, q_norm)?, by_head(&k, k_norm)?);
        }
        if context.has_rope(layer) {
            q = ops::rope(&q, spec.head_dim, tables)?;
            k = ops::rope(&k, spec.head_dim, tables)?;
        }
        let options = spec.attention_options(layer);
        let attn_out = graph_attention((&q, &k, &v), segments, spec.heads(), options)?;
        linear(LinearKind::OProj, &attn_out)
    }
}

/// `down(activation(gate(x)) * up(x))` (Shazeer 2020); `x` `[tokens, hidden]`.
fn mlp(x: &Tensor, spec: &ModelSpec, linear: ApplyLinear<'_>) -> candle_core::Result<Tensor> {
    let (gate, up) = if spec.fused {
        let both = linear(LinearKind::GateUpProj, x)?;
        let part = |start| both.narrow(1, start, spec.intermediate_size)?.contiguous();
        (part(0)?, part(spec.intermediate_size)?)
    } else {
        (linear(LinearKind::GateProj, x)?, linear(LinearKind::UpProj, x)?)
    };
    let gate = match spec.activation {
        Activation::Silu => gate.silu()?,
        Activation::GeluTanh => ops::gelu_tanh(&gate)?,
    };
    linear(LinearKind::DownProj, &(gate * up)?)
}
