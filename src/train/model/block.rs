//! One decoder block: attention and gated MLP, each behind an RMSNorm and a residual.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};

use super::attention::Heads;
use super::attention_options::AttentionOptions;
use super::ops;
use super::segments::{Segments, rope_tables};
use super::spec::ModelSpec;
use crate::config::LinearKind;
use crate::train::error::Result;
use crate::train::lora::{Dropout, Lora};

/// What every block of one forward pass shares.
pub(super) struct Context {
    segments: Arc<Segments>,
    heads: Heads,
    attention: AttentionOptions,
    eps: f64,
    /// Cosines and sines of every token, each `[tokens, head_dim / 2]`.
    tables: (Tensor, Tensor),
}

impl Context {
    pub(super) fn new(
        spec: &ModelSpec,
        segments: &Arc<Segments>,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let frequencies: Vec<f32> = (0..spec.head_dim / 2)
            .map(|i| spec.rope_theta.powf(-((2 * i) as f64) / spec.head_dim as f64) as f32)
            .collect();
        Ok(Self {
            segments: Arc::clone(segments),
            heads: Heads { queries: spec.num_heads, keys: spec.num_kv_heads, dim: spec.head_dim },
            attention: AttentionOptions {
                scale: 1.0 / (spec.head_dim as f64).sqrt(),
                softcap: None,
                window: None,
            },
            eps: spec.rms_norm_eps,
            tables: rope_tables(&segments.positions(), &frequencies, dtype, device)?,
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
        let scale = self.lora.map_or(0.0, |lora| lora.scale);
        let dropped = match &mut self.dropout {
            Some(dropout) => Some(dropout.apply(x)?),
            None => None,
        };
        let adapter = (pair.a.as_tensor(), pair.b.as_tensor(), scale);
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

    /// `x` `[tokens, hidden]` to the same shape.
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

/// Causal grouped-query attention with rotary positions; `x` `[tokens, hidden]`.
fn attention(
    x: &Tensor,
    context: &Context,
    linears: &mut Linears<'_>,
) -> candle_core::Result<Tensor> {
    let Context { segments, heads, tables, .. } = context;
    let q = ops::rope(&linears.apply(LinearKind::QProj, x)?, heads.dim, tables)?;
    let k = ops::rope(&linears.apply(LinearKind::KProj, x)?, heads.dim, tables)?;
    let v = linears.apply(LinearKind::VProj, x)?;
    let mixed = super::attention::attention((&q, &k, &v), segments, *heads, context.attention)?;
    linears.apply(LinearKind::OProj, &mixed)
}

/// `down(silu(gate(x)) * up(x))` (Shazeer 2020); `x` `[tokens, hidden]`.
fn mlp(x: &Tensor, linears: &mut Linears<'_>) -> candle_core::Result<Tensor> {
    let gate = linears.apply(LinearKind::GateProj, x)?;
    let up = linears.apply(LinearKind::UpProj, x)?;
    linears.apply(LinearKind::DownProj, &ops::swiglu(&gate, &up)?)
}
