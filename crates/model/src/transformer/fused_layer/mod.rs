//! One decoder block by hand: what [`Block::forward`](super::block::Block::forward) computes, and its
//! gradients, in loops and products over plain slices (CPU, frozen base).
//!
//! Only what is costly to compute again is kept for the backward pass. Normalised inputs, turned
//! queries and keys and the MLP's inner product are made anew there, by the same loops, so to the bit.

use std::borrow::Cow;
use std::collections::BTreeMap;

use candle_core::Tensor;

use super::attention::Attention;
use super::block::{Block, Context};
use crate::adapter::LinearKind;
use crate::adapter::weights::{Dropout, LoraWeights, peft_names};
use crate::kernels::float::Real;
use crate::kernels::linear::{Inner, Linear};
use crate::kernels::rowwise::{Norm, Rope, add, gated, gated_backward};

type Result<T> = candle_core::Result<T>;

/// Linear layers that read the same input, each with how many outputs it gives.
type Fan = &'static [(LinearKind, usize)];

const OUTPUT: Fan = &[(LinearKind::OProj, 1)];
const DOWN: Fan = &[(LinearKind::DownProj, 1)];

/// The adapter's gradients by name.
pub(super) type Gradients = BTreeMap<String, Tensor>;

/// One block of one pass.
pub(super) struct Layer<'a> {
    pub block: &'a Block,
    pub index: usize,
    pub context: &'a Context,
    pub lora: Option<&'a LoraWeights>,
}

/// What the attention leaves for its backward pass, `[tokens, width]` each.
pub(super) struct Attended<T> {
    inners: Vec<Inner<T>>,
    /// Queries and keys before their norms and turns; values.
    q: Vec<T>,
    k: Vec<T>,
    v: Vec<T>,
    mixed: Vec<T>,
    /// `[tokens, heads]`, natural logarithm of each softmax's sum.
    lse: Vec<T>,
    out_inner: Vec<Inner<T>>,
    /// The output, where a norm is behind it.
    out: Option<Vec<T>>,
}

/// What the MLP leaves for its backward pass.
pub(super) struct Gated<T> {
    /// Its input, the residual stream behind the attention.
    input: Vec<T>,
    inners: Vec<Inner<T>>,
    gate: Vec<T>,
    up: Vec<T>,
    down_inner: Vec<Inner<T>>,
    /// As in [`Attended`].
    out: Option<Vec<T>>,
}

/// Either half of a block.
pub(super) struct Kept<T> {
    attended: Attended<T>,
    gated: Gated<T>,
}

impl Layer<'_> {
    /// `x` `[tokens, hidden]` to the same shape; nothing is kept.
    pub fn forward<T: Real>(&self, x: &[T], mut dropout: Option<&mut Dropout>) -> Result<Vec<T>> {
        let (_, mid) = self.attend(x, dropout.as_deref_mut())?;
        self.mlp(mid, dropout, true).map(|(_, y)| y)
    }

    /// As [`Self::forward`], with what the backward pass needs.
    pub fn record<T: Real>(
        &self,
        x: &[T],
        mut dropout: Option<&mut Dropout>,
    ) -> Result<(Kept<T>, Vec<T>)> {
        let (attended, mid) = self.attend(x, dropout.as_deref_mut())?;
        let (gated, y) = self.mlp(mid, dropout, true)?;
        Ok((Kept { attended, gated }, y))
    }

    /// What [`Self::record`] keeps, without the output.
    pub fn again<T: Real>(&self, x: &[T], mut dropout: Option<&mut Dropout>) -> Result<Kept<T>> {
        let (attended, mid) = self.attend(x, dropout.as_deref_mut())?;
        let (gated, _) = self.mlp(mid, dropout, false)?;
        Ok(Kept { attended, gated })
    }

    /// Turns the output's gradient into that of the input `x`, or, unless `wanted`, into something
    /// of no meaning.
    pub fn backward<T: Real>(
        &self,
        x: &[T],
        kept: Kept<T>,
        grad: &mut [T],
        wanted: bool,
        gradients: &mut Gradients,
    ) -> Result<()> {
        self.mlp_backward(kept.gated, grad, gradients)?;
        self.attend_backward(x, kept.attended, grad, wanted, gradients)
    }

    /// The attention and the residual sum.
    fn attend<T: Real>(
        &self,
        x: &[T],
        mut dropout: Option<&mut Dropout>,
    ) -> Result<(Attended<T>, Vec<T>)> {
        let normed = self.norm(self.block.norms()[0]).forward(x)?;
        let heads = self.context.heads;
        let widths = [heads.queries, heads.keys, heads.keys].map(|count| count * heads.dim);
        let inners = self.inners(self.projections(), &normed, dropout.as_deref_mut())?;
        let [q, k, v] = self.outputs(self.projections(), &normed, &inners, widths)?;
        drop(normed);
        let (mixed, lse) = {
            let [q, k] = self.placed([&q, &k])?;
            self.kernel()?.forward([&q, &k, &v])
        };
        let out_inner = self.inners(OUTPUT, &mixed, dropout)?;
        let [out] = self.outputs(OUTPUT, &mixed, &out_inner, [self.context.spec.hidden_size])?;
        let (out, sum) = self.residual(x, out, 0)?;
        Ok((Attended { inners, q, k, v, mixed, lse, out_inner, out }, sum))
    }

    fn attend_backward<T: Real>(
        &self,
        x: &[T],
        kept: Attended<T>,
        grad: &mut [T],
        wanted: bool,
        gradients: &mut Gradients,
    ) -> Result<()> {
        let Attended { inners, q, k, v, mixed, lse, out_inner, out } = kept;
        let [mut dq, mut dk, dv] = {
            let d_out = self.behind(grad, out, 0)?;
            let mut d_mixed = Vec::new();
            let into = Some(&mut d_mixed);
            self.fan_backward(OUTPUT, &mixed, out_inner, &[&d_out], into, gradients)?;
            drop(d_out);
            let [q, k] = self.placed([&q, &k])?;
            self.kernel()?.backward([&q, &k, &v], (&mixed, &d_mixed, &lse))
        };
        drop((v, mixed));
        self.unplaced([(&q, &mut dq), (&k, &mut dk)])?;
        drop((q, k));
        let norm = self.norm(self.block.norms()[0]);
        let normed = norm.forward(x)?;
        let grads: [&[T]; 3] = [&dq, &dk, &dv];
        let mut dx = Vec::new();
        let into = wanted.then_some(&mut dx);
        self.fan_backward(self.projections(), &normed, inners, &grads, into, gradients)?;
        if !wanted {
            return Ok(());
        }
        norm.backward(x, &mut dx)?;
        add(grad, &dx, self.context.spec.hidden_size);
        Ok(())
    }

    /// The MLP and the residual sum, which is left out where it is not wanted.
    fn mlp<T: Real>(
        &self,
        input: Vec<T>,
        mut dropout: Option<&mut Dropout>,
        wanted: bool,
    ) -> Result<(Gated<T>, Vec<T>)> {
        let spec = &self.context.spec;
        let width = spec.intermediate_size;
        let normed = self.norm(self.block.norms()[1]).forward(&input)?;
        let inners = self.inners(self.gates(), &normed, dropout.as_deref_mut())?;
        let [gate, up] = self.outputs(self.gates(), &normed, &inners, [width; 2])?;
        drop(normed);
        let product = gated(spec.activation, &gate, &up, width);
        let down_inner = self.inners(DOWN, &product, dropout)?;
        let (out, sum) = if wanted || spec.output_norms {
            let [out] = self.outputs(DOWN, &product, &down_inner, [spec.hidden_size])?;
            self.residual(&input, out, 1)?
        } else {
            (None, Vec::new())
        };
        Ok((Gated { input, inners, gate, up, down_inner, out }, sum))
    }

    fn mlp_backward<T: Real>(
        &self,
        kept: Gated<T>,
        grad: &mut [T],
        gradients: &mut Gradients,
    ) -> Result<()> {
        let Gated { input, inners, mut gate, mut up, down_inner, out } = kept;
        let spec = &self.context.spec;
        let width = spec.intermediate_size;
        {
            let d_out = self.behind(grad, out, 1)?;
            let product = gated(spec.activation, &gate, &up, width);
            let mut d_product = Vec::new();
            let into = Some(&mut d_product);
            self.fan_backward(DOWN, &product, down_inner, &[&d_out], into, gradients)?;
            gated_backward(spec.activation, &mut gate, &mut up, &d_product, width);
        }
        let norm = self.norm(self.block.norms()[1]);
        let normed = norm.forward(&input)?;
        let mut dx = Vec::new();
        let grads: [&[T]; 2] = [&gate, &up];
        self.fan_backward(self.gates(), &normed, inners, &grads, Some(&mut dx), gradients)?;
        norm.backward(&input, &mut dx)?;
        add(grad, &dx, spec.hidden_size);
        Ok(())
    }

    /// `x + out`, with `out` behind its norm if there is one; then also `out` as it was.
    fn residual<T: Real>(
        &self,
        x: &[T],
        out: Vec<T>,
        half: usize,
    ) -> Result<(Option<Vec<T>>, Vec<T>)> {
        let (kept, mut sum) = match self.block.output_norms() {
            Some(norms) => {
                let normed = self.norm(&norms[half]).forward(&out)?;
                (Some(out), normed)
            }
            None => (None, out),
        };
        add(&mut sum, x, self.context.spec.hidden_size);
        Ok((kept, sum))
    }

    /// The gradient of `out` in [`Self::residual`] from that of the sum.
    fn behind<'g, T: Real>(
        &self,
        grad: &'g [T],
        out: Option<Vec<T>>,
        half: usize,
    ) -> Result<Cow<'g, [T]>> {
        match (self.block.output_norms(), out) {
            (Some(norms), Some(out)) => {
                let mut grad = grad.to_vec();
                self.norm(&norms[half]).backward(&out, &mut grad)?;
                Ok(Cow::Owned(grad))
            }
            _ => Ok(Cow::Borrowed(grad)),
        }
    }

    /// Queries and keys behind their norms, turned by their positions; where a layer has either.
    fn placed<T: Real>(&self, [q, k]: [&[T]; 2]) -> Result<[Vec<T>; 2]> {
        let (mut q, mut k) = match self.block.head_norms() {
            Some([of_q, of_k]) => (self.norm(of_q).forward(q)?, self.norm(of_k).forward(k)?),
            None => (q.to_vec(), k.to_vec()),
        };
        self.turn(&mut q, &mut k, false)?;
        Ok([q, k])
    }

    /// Turns gradients of what [`Self::placed`] gives into those of what it takes, which come first.
    fn unplaced<T: Real>(&self, [(q, dq), (k, dk)]: [(&[T], &mut [T]); 2]) -> Result<()> {
        self.turn(dq, dk, true)?;
        if let Some([of_q, of_k]) = self.block.head_norms() {
            self.norm(of_q).backward(q, dq)?;
            self.norm(of_k).backward(k, dk)?;
        }
        Ok(())
    }

    fn turn<T: Real>(&self, q: &mut [T], k: &mut [T], back: bool) -> Result<()> {
        let Context { spec, heads, tables, .. } = self.context;
        if spec.layers.get(self.index).is_some_and(|layer| layer.rope) {
            let turn = Rope { head_dim: heads.dim, tables };
            turn.apply(q, heads.queries * heads.dim, back)?;
            turn.apply(k, heads.keys * heads.dim, back)?;
        }
        Ok(())
    }

    fn kernel(&self) -> Result<Attention<'_>> {
        let options = self.context.spec.attention_options(self.index);
        Attention::new(&self.context.segments, self.context.heads, options)
    }

    fn norm<'a>(&self, weight: &'a Tensor) -> Norm<'a> {
        let spec = &self.context.spec;
        Norm { weight, offset: spec.norm_offset, eps: spec.rms_norm_eps }
    }

    fn projections(&self) -> Fan {
        if self.context.spec.fused {
            return &[(LinearKind::QkvProj, 3)];
        }
        &[(LinearKind::QProj, 1), (LinearKind::KProj, 1), (LinearKind::VProj, 1)]
    }

    fn gates(&self) -> Fan {
        if self.context.spec.fused {
            return &[(LinearKind::GateUpProj, 2)];
        }
        &[(LinearKind::GateProj, 1), (LinearKind::UpProj, 1)]
    }

    fn linear(&self, kind: LinearKind) -> Result<Linear<'_>> {
        let Some((weight, bias)) = self.block.linear(kind) else {
            candle_core::bail!("the block has no {}", kind.as_str());
        };
        let pair = self.lora.and_then(|lora| lora.pair(self.index, kind));
        Ok(Linear { weight, bias, pair })
    }

    fn inners<T: Real>(
        &self,
        fan: Fan,
        x: &[T],
        mut dropout: Option<&mut Dropout>,
    ) -> Result<Vec<Inner<T>>> {
        let inner =
            |(kind, _): &(LinearKind, _)| self.linear(*kind)?.inner(x, dropout.as_deref_mut());
        fan.iter().map(inner).collect()
    }

    /// Outputs of these widths of all linears of a fan.
    fn outputs<T: Real, const N: usize>(
        &self,
        fan: Fan,
        x: &[T],
        inners: &[Inner<T>],
        widths: [usize; N],
    ) -> Result<[Vec<T>; N]> {
        let mut outputs = [(); N].map(|()| Vec::new());
        let mut first = 0;
        for ((kind, count), inner) in fan.iter().zip(inners) {
            let places = first..first + count;
            let widths = &widths[places.clone()];
            self.linear(*kind)?.outer(x, inner, widths, &mut outputs[places])?;
            first += count;
        }
        Ok(outputs)
    }

    /// The gradient of a fan's input, added to `dx` as in [`Linear::backward`], and of its adapters.
    fn fan_backward<T: Real>(
        &self,
        fan: Fan,
        x: &[T],
        inners: Vec<Inner<T>>,
        grads: &[&[T]],
        mut dx: Option<&mut Vec<T>>,
        gradients: &mut Gradients,
    ) -> Result<()> {
        let mut rest = grads;
        for ((kind, count), inner) in fan.iter().zip(inners) {
            let (own, others) = rest.split_at(*count);
            let pair = self.linear(*kind)?.backward(x, inner, own, dx.as_deref_mut())?;
            let names = peft_names(self.index, *kind);
            gradients.extend(names.into_iter().zip(pair.into_iter().flatten()));
            rest = others;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
