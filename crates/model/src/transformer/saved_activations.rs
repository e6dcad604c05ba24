//! The decoder's layers by hand, from the first layer's input to the last one's output and back.

use candle_core::{Device, Tensor};

use super::block::Context;
use super::fused_layer::{Gradients, Kept, Layer};
use super::{Dropout, LoraWeights};
use crate::Model;
use crate::kernels::custom_op::with_values;
use crate::kernels::float::Real;
use crate::kernels::rowwise::Norm;

type Result<T> = candle_core::Result<T>;

/// What a forward pass leaves for the backward pass.
pub(super) struct Tape<T> {
    layers: Vec<Recorded<T>>,
    /// The last layer's output `[tokens, hidden]`.
    top: Vec<T>,
}

struct Recorded<T> {
    /// `[tokens, hidden]`
    input: Vec<T>,
    /// Absent where the backward pass computes it again.
    kept: Option<Kept<T>>,
    /// The random stream before it.
    dropout: Option<Dropout>,
}

/// The values of a contiguous tensor.
fn copied<T: Real>(x: &Tensor) -> Result<Vec<T>> {
    with_values([x], "decoder", |[x]| Ok(x.to_vec()))
}

impl Model {
    fn layer<'a>(
        &'a self,
        index: usize,
        context: &'a Context,
        lora: Option<&'a LoraWeights>,
    ) -> Layer<'a> {
        Layer { block: &self.blocks[index], index, context, lora }
    }

    fn top_norm(&self) -> Norm<'_> {
        let (offset, eps) = (self.spec.norm_offset, self.spec.rms_norm_eps);
        Norm { weight: &self.norm, offset, eps }
    }

    /// Behind the last norm, of what the last layer puts out.
    fn hidden_of<T: Real>(&self, top: &[T]) -> Result<Tensor> {
        let hidden = self.spec.hidden_size;
        let normed = self.top_norm().forward(top)?;
        Tensor::from_vec(normed, (top.len() / hidden, hidden), &Device::Cpu)
    }

    /// Final hidden states of the first layer's input `x`; nothing is kept.
    pub(super) fn run<T: Real>(
        &self,
        x: &Tensor,
        context: &Context,
        lora: Option<&LoraWeights>,
        mut dropout: Option<&mut Dropout>,
    ) -> Result<Tensor> {
        let mut x = copied::<T>(x)?;
        for index in 0..self.blocks.len() {
            x = self.layer(index, context, lora).forward(&x, dropout.as_deref_mut())?;
        }
        self.hidden_of(&x)
    }

    /// As [`Self::run`], with a tape that has the activations of the last `keep` layers.
    pub(super) fn record<T: Real>(
        &self,
        x: &Tensor,
        context: &Context,
        lora: &LoraWeights,
        mut dropout: Option<&mut Dropout>,
        keep: usize,
    ) -> Result<(Tape<T>, Tensor)> {
        let mut layers = Vec::with_capacity(self.blocks.len());
        let mut input = copied::<T>(x)?;
        for index in 0..self.blocks.len() {
            let layer = self.layer(index, context, Some(lora));
            let before = dropout.as_deref().cloned();
            let (kept, output) = if index + keep < self.blocks.len() {
                (None, layer.forward(&input, dropout.as_deref_mut())?)
            } else {
                let (kept, output) = layer.record(&input, dropout.as_deref_mut())?;
                (Some(kept), output)
            };
            layers.push(Recorded { input, kept, dropout: before });
            input = output;
        }
        let hidden = self.hidden_of(&input)?;
        Ok((Tape { layers, top: input }, hidden))
    }

    /// Gradients of the adapter where that of the final hidden states is `grad`.
    pub(super) fn rewind<T: Real>(
        &self,
        tape: Tape<T>,
        grad: Tensor,
        context: &Context,
        lora: &LoraWeights,
    ) -> Result<Gradients> {
        let Tape { layers, top } = tape;
        let mut grad = copied::<T>(&grad.contiguous()?)?;
        self.top_norm().backward(&top, &mut grad)?;
        drop(top);
        let mut gradients = Gradients::new();
        for (index, recorded) in layers.into_iter().enumerate().rev() {
            let layer = self.layer(index, context, Some(lora));
            let Recorded { input, kept, mut dropout } = recorded;
            let kept = match kept {
                Some(kept) => kept,
                None => layer.again(&input, dropout.as_mut())?,
            };
            layer.backward(&input, kept, &mut grad, index > 0, &mut gradients)?;
        }
        Ok(gradients)
    }
}
