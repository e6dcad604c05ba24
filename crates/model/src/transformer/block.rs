//! One decoder block: attention and gated MLP, each behind an RMSNorm and a residual. Which of its
//! options are on is in [`ModelSpec`]; there is no other block.
//!
//! [`Block::forward`] is a graph of candle's operations, for any device and for weights that are
//! trained; [`super::fused_layer`] computes the same by hand where that can be.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};

use super::attention::Heads;
use super::segments::Segments;
use crate::Result;
use crate::adapter::LinearKind;
use crate::adapter::weights::{Dropout, LoraWeights};
use crate::kernels::ops;
use crate::spec::rope::{rope_frequencies, rope_tables};
use crate::spec::{Activation, ModelSpec};

/// What every block of one forward pass shares.
pub(super) struct Context {
    pub spec: ModelSpec,
    pub segments: Arc<Segments>,
    pub heads: Heads,
    /// Cosines and sines of every token, each `[tokens, rotary_dim / 2]`.
    pub tables: (Tensor, Tensor),
}

impl Context {
    pub(super) fn new(
        spec: &ModelSpec,
        segments: &Arc<Segments>,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let positions = segments.positions();
        spec.check_length(positions.iter().max().map_or(0, |last| last + 1))?;
        let factor = spec.rope.attention_factor();
        Ok(Self {
            spec: spec.clone(),
            segments: Arc::clone(segments),
            heads: Heads { queries: spec.num_heads, keys: spec.num_kv_heads, dim: spec.head_dim },
            tables: rope_tables(&positions, &rope_frequencies(spec), factor, dtype, device)?,
        })
    }

    /// `x` `[tokens, heads * head_dim]` turned by its positions, in the layers that do.
    fn turned(&self, layer: usize, x: Tensor) -> candle_core::Result<Tensor> {
        match self.spec.layers.get(layer).is_some_and(|layer| layer.rope) {
            true => ops::rope(&x, self.spec.head_dim, &self.tables),
            false => Ok(x),
        }
    }

    /// RMSNorm over the last dimension, by `weight + norm_offset`.
    fn norm(&self, x: &Tensor, weight: &Tensor) -> candle_core::Result<Tensor> {
        norm(&self.spec, x, weight)
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
struct Linear {
    /// `[out, in]`
    weight: Tensor,
    /// `[out]`
    bias: Option<Tensor>,
}

/// The weights of one block.
#[derive(Clone, Debug)]
pub struct Block {
    attention_norm: Tensor,
    mlp_norm: Tensor,
    /// Behind attention and MLP, before the residual sum.
    output_norms: Option<[Tensor; 2]>,
    /// Over each head of queries and of keys, `[head_dim]`.
    head_norms: Option<[Tensor; 2]>,
    linears: BTreeMap<LinearKind, Linear>,
}

/// Applies the linear layers of one block, adapters included.
struct Linears<'a> {
    block: &'a Block,
    layer: usize,
    lora: Option<&'a LoraWeights>,
    dropout: Option<&'a mut Dropout>,
}

impl Linears<'_> {
    /// `[n, in]` to `[n, out]`
    fn apply(&mut self, kind: LinearKind, x: &Tensor) -> candle_core::Result<Tensor> {
        let Some(linear) = self.block.linears.get(&kind) else {
            candle_core::bail!("the block has no {}", kind.as_str());
        };
        let frozen = (&linear.weight, linear.bias.as_ref());
        let Some(pair) = self.lora.and_then(|lora| lora.pair(self.layer, kind)) else {
            return ops::linear(x, frozen.0, frozen.1);
        };
        let dropped = match &mut self.dropout {
            Some(dropout) => Some(dropout.apply(x)?),
            None => None,
        };
        let x_adapter = dropped.as_ref().unwrap_or(x);
        let delta = x_adapter.matmul(&pair.a.t()?)?.matmul(&pair.b.t()?)?;
        ops::linear(x, frozen.0, frozen.1)? + (delta * pair.scale)?
    }
}

impl Block {
    pub(super) fn take(
        spec: &ModelSpec,
        layer: usize,
        take: &mut impl FnMut(&str) -> Result<Tensor>,
    ) -> Result<Self> {
        let prefix = format!("model.layers.{layer}");
        let mut linears = BTreeMap::new();
        for (kind, _) in spec.linears(layer) {
            let module = format!("{prefix}.{}.{}", kind.parent(), kind.as_str());
            let weight = take(&format!("{module}.weight"))?;
            let bias =
                if spec.has_bias(kind) { Some(take(&format!("{module}.bias"))?) } else { None };
            linears.insert(kind, Linear { weight, bias });
        }
        let mut norm = |name: &str| take(&format!("{prefix}.{name}.weight"));
        let (attention_norm, mlp_norm, behind) = spec.norm_names();
        let output_norms = match behind {
            Some([attention, mlp]) => Some([norm(attention)?, norm(mlp)?]),
            None => None,
        };
        let head_norms = if spec.head_norms {
            Some([norm("self_attn.q_norm")?, norm("self_attn.k_norm")?])
        } else {
            None
        };
        Ok(Self {
            attention_norm: norm(attention_norm)?,
            mlp_norm: norm(mlp_norm)?,
            output_norms,
            head_norms,
            linears,
        })
    }

    /// Weights of the norms before the attention and before the MLP, `[hidden]`.
    pub fn norms(&self) -> [&Tensor; 2] {
        [&self.attention_norm, &self.mlp_norm]
    }

    /// Weights of the norms behind attention and MLP, `[hidden]`.
    pub fn output_norms(&self) -> Option<&[Tensor; 2]> {
        self.output_norms.as_ref()
    }

    /// Weights of the norms over each head of queries and of keys, `[head_dim]`.
    pub fn head_norms(&self) -> Option<&[Tensor; 2]> {
        self.head_norms.as_ref()
    }

    /// Weight `[out, in]` and bias `[out]` of a linear layer.
    pub fn linear(&self, kind: LinearKind) -> Option<(&Tensor, Option<&Tensor>)> {
        self.linears.get(&kind).map(|linear| (&linear.weight, linear.bias.as_ref()))
    }

    /// All biases.
    pub(super) fn biases(&self) -> impl Iterator<Item = &Tensor> {
        self.linears.values().filter_map(|linear| linear.bias.as_ref())
    }

    /// All weights, biases left out.
    pub(super) fn weights(&self) -> impl Iterator<Item = &Tensor> {
        let norms = [&self.attention_norm, &self.mlp_norm];
        let more = [&self.output_norms, &self.head_norms].into_iter().flatten().flatten();
        norms.into_iter().chain(more).chain(self.linears.values().map(|linear| &linear.weight))
    }

    /// `x` `[tokens, hidden]` to the same shape.
    pub(super) fn forward(
        &self,
        x: &Tensor,
        layer: usize,
        context: &Context,
        lora: Option<&LoraWeights>,
        dropout: Option<&mut Dropout>,
    ) -> candle_core::Result<Tensor> {
        let mut linears = Linears { block: self, layer, lora, dropout };
        let mut out = attention(&context.norm(x, &self.attention_norm)?, context, &mut linears)?;
        if let Some([norm, _]) = &self.output_norms {
            out = context.norm(&out, norm)?;
        }
        let x = (x + out)?;
        let mut out = mlp(&context.norm(&x, &self.mlp_norm)?, context, &mut linears)?;
        if let Some([_, norm]) = &self.output_norms {
            out = context.norm(&out, norm)?;
        }
        x + out
    }
}

/// Causal grouped-query attention; `x` `[tokens, hidden]`.
fn attention(
    x: &Tensor,
    context: &Context,
    linears: &mut Linears<'_>,
) -> candle_core::Result<Tensor> {
    let layer = linears.layer;
    let [q, k, v] = project(x, &context.spec, linears)?;
    let (q, k) = (context.turned(layer, q)?, context.turned(layer, k)?);
    let options = context.spec.attention_options(layer);
    let mixed = super::attention::chain((&q, &k, &v), &context.segments, context.heads, options)?;
    linears.apply(LinearKind::OProj, &mixed)
}

/// Queries, keys and values `[tokens, heads * head_dim]`, not yet turned.
fn project(
    x: &Tensor,
    spec: &ModelSpec,
    linears: &mut Linears<'_>,
) -> candle_core::Result<[Tensor; 3]> {
    let [mut q, mut k, v] = if spec.fused {
        let (q, kv) = (spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim);
        let qkv = linears.apply(LinearKind::QkvProj, x)?;
        let part = |start, len| qkv.narrow(1, start, len)?.contiguous();
        [part(0, q)?, part(q, kv)?, part(q + kv, kv)?]
    } else {
        [
            linears.apply(LinearKind::QProj, x)?,
            linears.apply(LinearKind::KProj, x)?,
            linears.apply(LinearKind::VProj, x)?,
        ]
    };
    if let Some([q_norm, k_norm]) = &linears.block.head_norms {
        let by_head = |x: &Tensor, weight: &Tensor| {
            norm(spec, &x.reshape(((), spec.head_dim))?, weight)?.reshape(x.shape())
        };
        (q, k) = (by_head(&q, q_norm)?, by_head(&k, k_norm)?);
    }
    Ok([q, k, v])
}

/// `down(activation(gate(x)) * up(x))` (Shazeer 2020); `x` `[tokens, hidden]`.
fn mlp(x: &Tensor, context: &Context, linears: &mut Linears<'_>) -> candle_core::Result<Tensor> {
    let spec = &context.spec;
    let (gate, up) = if spec.fused {
        let both = linears.apply(LinearKind::GateUpProj, x)?;
        let part = |start| both.narrow(1, start, spec.intermediate_size)?.contiguous();
        (part(0)?, part(spec.intermediate_size)?)
    } else {
        (linears.apply(LinearKind::GateProj, x)?, linears.apply(LinearKind::UpProj, x)?)
    };
    let inner = match spec.activation {
        Activation::Silu => (gate.silu()? * up)?,
        Activation::GeluTanh => (ops::gelu_tanh(&gate)? * up)?,
    };
    linears.apply(LinearKind::DownProj, &inner)
}
