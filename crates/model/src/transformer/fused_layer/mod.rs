//! The fused implementation of one decoder layer (CPU, frozen base): the values of
//! [`Block::forward`](super::block::Block::forward) and their gradients, by loops and matrix products
//! over plain slices.
//!
//! A forward pass saves only activations that are expensive to compute. The backward pass recomputes
//! normalized inputs, rotated queries and keys and the MLP's inner product by the same code,
//! bit-identically.

use std::borrow::Cow;
use std::collections::BTreeMap;

use candle_core::{Result, Tensor};

use hone_kernels::float::Real;
use hone_kernels::parallel;

use super::attention::Attention;
use super::block::{Block, Context};
use crate::adapter::weights::{Dropout, LoraWeights, peft_names};
use crate::kernels::linear::{LoraLinear, LowRank};
use crate::kernels::rowwise::{FusedRmsNorm, RotaryEmbedding, add, glu, glu_backward};
use crate::spec::LinearKind;

/// Linear layers that read the same input, each with its number of outputs.
type Projections = &'static [(LinearKind, usize)];

const OUTPUT: Projections = &[(LinearKind::OProj, 1)];
const DOWN: Projections = &[(LinearKind::DownProj, 1)];

/// Results of a forward pass.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Save {
    /// The output.
    Nothing,
    /// The output, and the activations for the backward pass.
    Activations,
    /// The activations. The output is empty, unless it is one of them.
    ActivationsOnly,
}

pub(super) struct FusedLayer<'a> {
    pub block: &'a Block,
    pub index: usize,
    pub context: &'a Context,
    pub lora: Option<&'a LoraWeights>,
}

/// Activations that the attention's backward pass needs, `[tokens, width]` each.
struct AttentionActivations<T> {
    low_rank: Vec<LowRank<T>>,
    /// Queries and keys before their norms and their rotation.
    q: Vec<T>,
    k: Vec<T>,
    v: Vec<T>,
    /// The attention's output, before the output projection.
    attn_out: Vec<T>,
    /// `[tokens, heads]`, natural logarithm of each softmax's sum.
    lse: Vec<T>,
    out_low_rank: Vec<LowRank<T>>,
    /// The output projection's output, if a norm follows it.
    out: Option<Vec<T>>,
}

/// Activations that the MLP's backward pass needs.
struct MlpActivations<T> {
    /// The residual stream after the attention.
    input: Vec<T>,
    low_rank: Vec<LowRank<T>>,
    gate: Vec<T>,
    up: Vec<T>,
    down_low_rank: Vec<LowRank<T>>,
    /// The down projection's output, if a norm follows it.
    out: Option<Vec<T>>,
}

/// Activations that a layer's backward pass needs, in addition to the layer's input.
pub(super) struct LayerActivations<T> {
    attention: AttentionActivations<T>,
    mlp: MlpActivations<T>,
}

impl FusedLayer<'_> {
    /// The output `[tokens, hidden]` for `x` of the same shape, and the activations for
    /// [`Self::backward`], unless [`Save::Nothing`].
    pub fn forward<T: Real>(
        &self,
        x: &[T],
        mut dropout: Option<&mut Dropout>,
        save: Save,
    ) -> Result<(Option<LayerActivations<T>>, Vec<T>)> {
        let (attention, residual) = self.attention(x, dropout.as_deref_mut())?;
        let attention = (save != Save::Nothing).then_some(attention);
        let (mlp, y) = self.mlp(residual, dropout, save != Save::ActivationsOnly)?;
        Ok((attention.map(|attention| LayerActivations { attention, mlp }), y))
    }

    /// Adds the adapter's gradients to `gradients` and replaces `grad`, the gradient of the output, by
    /// that of the input `x`; without `input_gradient` by unspecified values.
    pub fn backward<T: Real>(
        &self,
        x: &[T],
        saved: LayerActivations<T>,
        grad: &mut [T],
        input_gradient: bool,
        gradients: &mut BTreeMap<String, Tensor>,
    ) -> Result<()> {
        self.mlp_backward(saved.mlp, grad, gradients)?;
        self.attention_backward(x, saved.attention, grad, input_gradient, gradients)
    }

    /// The attention and the residual sum.
    fn attention<T: Real>(
        &self,
        x: &[T],
        mut dropout: Option<&mut Dropout>,
    ) -> Result<(AttentionActivations<T>, Vec<T>)> {
        let normed = self.norm(&self.block.norms[0]).forward(x)?;
        let heads = self.context.spec.heads();
        let widths = [heads.queries, heads.keys, heads.keys].map(|count| count * heads.dim);
        let low_rank = self.low_rank(self.qkv(), &normed, dropout.as_deref_mut())?;
        let [q, k, v] = self.outputs(self.qkv(), &normed, &low_rank, widths)?;
        drop(normed);
        let (attn_out, lse) = {
            let [q, k] = self.rotated([&q, &k])?;
            self.kernel()?.forward([&q, &k, &v])
        };
        let out_low_rank = self.low_rank(OUTPUT, &attn_out, dropout)?;
        let width = [self.context.spec.hidden_size];
        let [out] = self.outputs(OUTPUT, &attn_out, &out_low_rank, width)?;
        let (out, sum) = self.residual(x, out, 0)?;
        Ok((AttentionActivations { low_rank, q, k, v, attn_out, lse, out_low_rank, out }, sum))
    }

    fn attention_backward<T: Real>(
        &self,
        x: &[T],
        saved: AttentionActivations<T>,
        grad: &mut [T],
        input_gradient: bool,
        gradients: &mut BTreeMap<String, Tensor>,
    ) -> Result<()> {
        let AttentionActivations { low_rank, q, k, v, attn_out, lse, out_low_rank, out } = saved;
        let [mut dq, mut dk, dv] = {
            let d_out = self.residual_backward(grad, out, 0)?;
            let mut d_attn = Vec::new();
            let dx = Some(&mut d_attn);
            self.project_backward(OUTPUT, &attn_out, out_low_rank, &[&d_out], dx, gradients)?;
            drop(d_out);
            let [q, k] = self.rotated([&q, &k])?;
            self.kernel()?.backward([&q, &k, &v], (&attn_out, &d_attn, &lse))
        };
        drop((v, attn_out));
        self.rotated_backward([(&q, &mut dq), (&k, &mut dk)])?;
        drop((q, k));
        let norm = self.norm(&self.block.norms[0]);
        let normed = norm.forward(x)?;
        let grads: [&[T]; 3] = [&dq, &dk, &dv];
        let mut dx = Vec::new();
        let into = input_gradient.then_some(&mut dx);
        self.project_backward(self.qkv(), &normed, low_rank, &grads, into, gradients)?;
        if input_gradient {
            norm.backward(x, &mut dx)?;
            add(grad, &dx, self.context.spec.hidden_size);
        }
        Ok(())
    }

    /// The MLP and the residual sum; the sum is empty without `output`.
    fn mlp<T: Real>(
        &self,
        input: Vec<T>,
        mut dropout: Option<&mut Dropout>,
        output: bool,
    ) -> Result<(MlpActivations<T>, Vec<T>)> {
        let spec = &self.context.spec;
        let width = spec.intermediate_size;
        let normed = self.norm(&self.block.norms[1]).forward(&input)?;
        let low_rank = self.low_rank(self.gate_up(), &normed, dropout.as_deref_mut())?;
        let [gate, up] = self.outputs(self.gate_up(), &normed, &low_rank, [width; 2])?;
        drop(normed);
        let product = glu(spec.activation, &gate, &up, width);
        let down_low_rank = self.low_rank(DOWN, &product, dropout)?;
        let (out, sum) = if output || spec.output_norms {
            let [out] = self.outputs(DOWN, &product, &down_low_rank, [spec.hidden_size])?;
            self.residual(&input, out, 1)?
        } else {
            (None, Vec::new())
        };
        Ok((MlpActivations { input, low_rank, gate, up, down_low_rank, out }, sum))
    }

    fn mlp_backward<T: Real>(
        &self,
        saved: MlpActivations<T>,
        grad: &mut [T],
        gradients: &mut BTreeMap<String, Tensor>,
    ) -> Result<()> {
        let MlpActivations { input, low_rank, mut gate, mut up, down_low_rank, out } = saved;
        let spec = &self.context.spec;
        let width = spec.intermediate_size;
        {
            let d_out = self.residual_backward(grad, out, 1)?;
            let product = glu(spec.activation, &gate, &up, width);
            let mut d_product = Vec::new();
            let dx = Some(&mut d_product);
            self.project_backward(DOWN, &product, down_low_rank, &[&d_out], dx, gradients)?;
            glu_backward(spec.activation, &mut gate, &mut up, &d_product, width);
        }
        let norm = self.norm(&self.block.norms[1]);
        let normed = norm.forward(&input)?;
        let mut dx = Vec::new();
        let grads: [&[T]; 2] = [&gate, &up];
        self.project_backward(self.gate_up(), &normed, low_rank, &grads, Some(&mut dx), gradients)?;
        norm.backward(&input, &mut dx)?;
        add(grad, &dx, spec.hidden_size);
        Ok(())
    }

    /// `x + out`, or `x + norm(out)` if a norm follows; then also `out`, for the backward pass.
    fn residual<T: Real>(
        &self,
        x: &[T],
        out: Vec<T>,
        half: usize,
    ) -> Result<(Option<Vec<T>>, Vec<T>)> {
        let normed =
            self.block.output_norms.as_ref().map(|norms| self.norm(&norms[half]).forward(&out));
        let (saved, mut sum) = match normed.transpose()? {
            Some(normed) => (Some(out), normed),
            None => (None, out),
        };
        add(&mut sum, x, self.context.spec.hidden_size);
        Ok((saved, sum))
    }

    /// The gradient of `out` in [`Self::residual`] from that of the sum.
    fn residual_backward<'g, T: Real>(
        &self,
        grad: &'g [T],
        out: Option<Vec<T>>,
        half: usize,
    ) -> Result<Cow<'g, [T]>> {
        let mut grad = Cow::Borrowed(grad);
        if let (Some(norms), Some(out)) = (&self.block.output_norms, out) {
            self.norm(&norms[half]).backward(&out, grad.to_mut())?;
        }
        Ok(grad)
    }

    /// Queries and keys after their norms and their rotation, in layers that have either.
    fn rotated<T: Real>(&self, [q, k]: [&[T]; 2]) -> Result<[Vec<T>; 2]> {
        let (mut q, mut k) = match &self.block.head_norms {
            Some([q_norm, k_norm]) => {
                (self.norm(q_norm).forward(q)?, self.norm(k_norm).forward(k)?)
            }
            None => {
                let heads = self.context.spec.heads();
                let copy = |x, count| parallel::copied_rows(x, count * heads.dim);
                (copy(q, heads.queries), copy(k, heads.keys))
            }
        };
        self.rotate(&mut q, &mut k, false)?;
        Ok([q, k])
    }

    /// Replaces gradients of the output of [`Self::rotated`] by gradients of its input; pairs of input
    /// and gradient.
    fn rotated_backward<T: Real>(&self, [(q, dq), (k, dk)]: [(&[T], &mut [T]); 2]) -> Result<()> {
        self.rotate(dq, dk, true)?;
        if let Some([q_norm, k_norm]) = &self.block.head_norms {
            self.norm(q_norm).backward(q, dq)?;
            self.norm(k_norm).backward(k, dk)?;
        }
        Ok(())
    }

    fn rotate<T: Real>(&self, q: &mut [T], k: &mut [T], inverse: bool) -> Result<()> {
        if self.context.has_rope(self.index) {
            let heads = self.context.spec.heads();
            let rope = RotaryEmbedding { head_dim: heads.dim, tables: &self.context.tables };
            rope.apply(q, heads.queries * heads.dim, inverse)?;
            rope.apply(k, heads.keys * heads.dim, inverse)?;
        }
        Ok(())
    }

    fn kernel(&self) -> Result<Attention<'_>> {
        let Context { spec, segments, .. } = self.context;
        Attention::new(segments, spec.heads(), spec.attention_options(self.index))
    }

    fn norm<'a>(&self, weight: &'a Tensor) -> FusedRmsNorm<'a> {
        FusedRmsNorm::new(&self.context.spec, weight)
    }

    fn qkv(&self) -> Projections {
        if self.context.spec.fused {
            return &[(LinearKind::QkvProj, 3)];
        }
        &[(LinearKind::QProj, 1), (LinearKind::KProj, 1), (LinearKind::VProj, 1)]
    }

    fn gate_up(&self) -> Projections {
        if self.context.spec.fused {
            return &[(LinearKind::GateUpProj, 2)];
        }
        &[(LinearKind::GateProj, 1), (LinearKind::UpProj, 1)]
    }

    fn linear(&self, kind: LinearKind) -> Result<LoraLinear<'_>> {
        let Some((weight, bias)) = self.block.linear(kind) else {
            candle_core::bail!("the block has no {}", kind.as_str());
        };
        let pair = self.lora.and_then(|lora| lora.pair(self.index, kind));
        Ok(LoraLinear { weight, bias, pair, compute: self.context.compute })
    }

    fn low_rank<T: Real>(
        &self,
        projections: Projections,
        x: &[T],
        mut dropout: Option<&mut Dropout>,
    ) -> Result<Vec<LowRank<T>>> {
        let one =
            |(kind, _): &(LinearKind, _)| self.linear(*kind)?.low_rank(x, dropout.as_deref_mut());
        projections.iter().map(one).collect()
    }

    /// Outputs of these widths of all projections.
    fn outputs<T: Real, const N: usize>(
        &self,
        projections: Projections,
        x: &[T],
        low_rank: &[LowRank<T>],
        widths: [usize; N],
    ) -> Result<[Vec<T>; N]> {
        let mut outputs = [(); N].map(|()| Vec::new());
        let mut first = 0;
        let x = self.linear(projections[0].0)?.factor(x)?;
        for ((kind, count), low_rank) in projections.iter().zip(low_rank) {
            let places = first..first + count;
            let widths = &widths[places.clone()];
            self.linear(*kind)?.forward(&x, low_rank, widths, &mut outputs[places])?;
            first += count;
        }
        Ok(outputs)
    }

    /// Gradients of the adapters from those of the outputs; the gradient of `x` is added to `dx` as in
    /// [`LoraLinear::backward`].
    fn project_backward<T: Real>(
        &self,
        projections: Projections,
        x: &[T],
        low_rank: Vec<LowRank<T>>,
        mut grads: &[&[T]],
        mut dx: Option<&mut Vec<T>>,
        gradients: &mut BTreeMap<String, Tensor>,
    ) -> Result<()> {
        for ((kind, count), low_rank) in projections.iter().zip(low_rank) {
            let (own, others) = grads.split_at(*count);
            let pair = self.linear(*kind)?.backward(x, low_rank, own, dx.as_deref_mut())?;
            let names = peft_names(self.index, *kind);
            gradients.extend(names.into_iter().zip(pair.into_iter().flatten()));
            grads = others;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
