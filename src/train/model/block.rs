//! One decoder block: attention and gated MLP, each behind an RMSNorm and a residual.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};

use super::ops;
use super::spec::ModelSpec;
use crate::config::LinearKind;
use crate::train::error::Result;
use crate::train::lora::{Dropout, Lora};

/// What every block of one forward pass shares.
pub(super) struct Context {
    batch: usize,
    len: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    eps: f64,
    /// `[len, head_dim]`
    cos: Tensor,
    /// `[len, head_dim]`
    sin: Tensor,
    /// `[heads / kv_heads * len, len]`: 0 where a query may look, minus infinity elsewhere.
    mask: Tensor,
}

impl Context {
    pub(super) fn new(
        spec: &ModelSpec,
        batch: usize,
        len: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let (cos, sin) = ops::rope_tables(len, spec.head_dim, spec.rope_theta, dtype, device)?;
        let group = spec.num_heads / spec.num_kv_heads;
        let mask: Vec<f32> = (0..group * len)
            .flat_map(|row| {
                (0..len).map(move |key| if key > row % len { f32::NEG_INFINITY } else { 0.0 })
            })
            .collect();
        let mask = Tensor::from_vec(mask, (group * len, len), device)?.to_dtype(dtype)?;
        Ok(Self {
            batch,
            len,
            heads: spec.num_heads,
            kv_heads: spec.num_kv_heads,
            head_dim: spec.head_dim,
            eps: spec.rms_norm_eps,
            cos,
            sin,
            mask,
        })
    }
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
pub(super) struct Block {
    input_norm: Tensor,
    post_attention_norm: Tensor,
    linears: BTreeMap<LinearKind, Linear>,
}

/// Applies the linear layers of one block, adapters included.
struct Linears<'a> {
    block: &'a Block,
    layer: usize,
    lora: Option<&'a Lora>,
    dropout: Option<&'a mut Dropout>,
}

impl Linears<'_> {
    /// `[n, in]` to `[n, out]`
    fn apply(&mut self, kind: LinearKind, x: &Tensor) -> candle_core::Result<Tensor> {
        let Some(linear) = self.block.linears.get(&kind) else {
            candle_core::bail!("the block has no {}", kind.as_str());
        };
        let mut y = ops::linear(x, &linear.weight)?;
        if let Some(bias) = &linear.bias {
            y = y.broadcast_add(bias)?;
        }
        let delta = match self.lora {
            Some(lora) => lora.delta(self.layer, kind, x, self.dropout.as_deref_mut())?,
            None => None,
        };
        delta.map_or(Ok(y.clone()), |delta| y + delta)
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
        for kind in LinearKind::ALL {
            let module = format!("{prefix}.{}.{}", kind.parent(), kind.as_str());
            let weight = take(&format!("{module}.weight"))?;
            let bias =
                if spec.has_bias(kind) { Some(take(&format!("{module}.bias"))?) } else { None };
            linears.insert(kind, Linear { weight, bias });
        }
        Ok(Self {
            input_norm: take(&format!("{prefix}.input_layernorm.weight"))?,
            post_attention_norm: take(&format!("{prefix}.post_attention_layernorm.weight"))?,
            linears,
        })
    }

    /// `x` `[batch * len, hidden]` to the same shape.
    pub(super) fn forward(
        &self,
        x: &Tensor,
        layer: usize,
        context: &Context,
        lora: Option<&Lora>,
        dropout: Option<&mut Dropout>,
    ) -> candle_core::Result<Tensor> {
        let mut linears = Linears { block: self, layer, lora, dropout };
        let normed = ops::rms_norm(x, &self.input_norm, context.eps)?;
        let x = (x + attention(&normed, context, &mut linears)?)?;
        let normed = ops::rms_norm(&x, &self.post_attention_norm, context.eps)?;
        &x + mlp(&normed, &mut linears)?
    }
}

/// Causal grouped-query attention with rotary positions; `x` `[batch * len, hidden]`.
fn attention(
    x: &Tensor,
    context: &Context,
    linears: &mut Linears<'_>,
) -> candle_core::Result<Tensor> {
    let Context { batch, len, heads, kv_heads, head_dim, .. } = *context;
    let split = |y: Tensor, heads: usize| {
        y.reshape((batch, len, heads, head_dim))?.transpose(1, 2)?.contiguous()
    };
    let q = split(linears.apply(LinearKind::QProj, x)?, heads)?;
    let k = split(linears.apply(LinearKind::KProj, x)?, kv_heads)?;
    let v = split(linears.apply(LinearKind::VProj, x)?, kv_heads)?;
    let q = ops::rope(&q, &context.cos, &context.sin)?;
    let k = ops::rope(&k, &context.cos, &context.sin)?;
    // Query head h looks at key head h / group: the heads of a group become rows of one product.
    let rows = heads / kv_heads * len;
    let q = q.reshape((batch, kv_heads, rows, head_dim))?;
    let scores = (q.matmul(&k.t()?)? / (head_dim as f64).sqrt())?;
    let weights = ops::softmax(&scores.broadcast_add(&context.mask)?)?;
    weights
        .matmul(&v)?
        .reshape((batch, heads, len, head_dim))?
        .transpose(1, 2)?
        .reshape((batch * len, heads * head_dim))
        .and_then(|y| linears.apply(LinearKind::OProj, &y))
}

/// `down(silu(gate(x)) * up(x))` (Shazeer 2020); `x` `[batch * len, hidden]`.
fn mlp(x: &Tensor, linears: &mut Linears<'_>) -> candle_core::Result<Tensor> {
    let gate = linears.apply(LinearKind::GateProj, x)?.silu()?;
    let up = linears.apply(LinearKind::UpProj, x)?;
    linears.apply(LinearKind::DownProj, &(gate * up)?)
}
