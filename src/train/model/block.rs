//! One decoder block: attention and gated MLP, each behind an RMSNorm and a residual.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};

use super::ops::{self, Heads};
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
    /// Cosines and sines, each `[len, head_dim]`.
    tables: (Tensor, Tensor),
}

impl Context {
    pub(super) fn new(
        spec: &ModelSpec,
        batch: usize,
        len: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        Ok(Self {
            batch,
            len,
            heads: spec.num_heads,
            kv_heads: spec.num_kv_heads,
            head_dim: spec.head_dim,
            eps: spec.rms_norm_eps,
            tables: ops::rope_tables(len, spec.head_dim, spec.rope_theta, dtype, device)?,
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
        let frozen = (&linear.weight, linear.bias.as_ref());
        let Some(pair) = self.lora.and_then(|lora| lora.pair(self.layer, kind)) else {
            return ops::linear(x, frozen.0, frozen.1);
        };
        let dropped = match &mut self.dropout {
            Some(dropout) => Some(dropout.apply(x)?),
            None => None,
        };
        let adapter = (pair.a.as_tensor(), pair.b.as_tensor(), pair.scale);
        ops::adapted_linear((x, dropped.as_ref()), frozen, adapter)
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

    /// All weights, biases left out.
    pub(super) fn weights(&self) -> impl Iterator<Item = &Tensor> {
        let norms = [&self.input_norm, &self.post_attention_norm];
        norms.into_iter().chain(self.linears.values().map(|linear| &linear.weight))
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
    let queries = Heads { batch, len, heads, head_dim };
    let keys = Heads { heads: kv_heads, ..queries };
    let q = queries.split(&linears.apply(LinearKind::QProj, x)?, Some(&context.tables))?;
    let k = keys.split(&linears.apply(LinearKind::KProj, x)?, Some(&context.tables))?;
    let v = keys.split(&linears.apply(LinearKind::VProj, x)?, None)?;
    // Query head h looks at key head h / group: the heads of a group become rows of one product.
    let rows = heads / kv_heads * len;
    let q = q.reshape((batch, kv_heads, rows, head_dim))?;
    let scores = q.matmul(&k.t()?)?;
    let weights = ops::causal_softmax(&scores, 1.0 / (head_dim as f64).sqrt())?;
    let mixed = weights.matmul(&v)?.reshape((batch, heads, len, head_dim))?;
    linears.apply(LinearKind::OProj, &queries.merge(&mixed)?)
}

/// `down(silu(gate(x)) * up(x))` (Shazeer 2020); `x` `[batch * len, hidden]`.
fn mlp(x: &Tensor, linears: &mut Linears<'_>) -> candle_core::Result<Tensor> {
    let gate = linears.apply(LinearKind::GateProj, x)?;
    let up = linears.apply(LinearKind::UpProj, x)?;
    linears.apply(LinearKind::DownProj, &ops::swiglu(&gate, &up)?)
}
