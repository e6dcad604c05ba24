//! The decoder's layers one after another, forward and backward.
//!
//! A frozen base on the CPU uses [`FusedLayer`]; otherwise a layer is a candle graph. [`Layers::forward`]
//! joins these to one graph, which can be differentiated as such; [`Layers::forward_saving`] keeps one graph
//! a layer.
//!
//! The activations of a layer can be dropped in the forward pass and recomputed in the backward pass
//! (Chen et al. 2016, "Training deep nets with sublinear memory cost", with one segment a layer). The
//! recomputation starts from the same dropout stream, so the gradients are bit-identical.

use std::collections::BTreeMap;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Tensor, Var};

use hone_kernels::float::Real;

use super::block::{self, Block, Context};
use super::fused_layer::{FusedLayer, LayerActivations, Save};
use crate::adapter::weights::{Dropout, LoraWeights, peft_names};
use crate::kernels::rowwise::FusedRmsNorm;
use crate::kernels::storage::with_values;
use crate::kernels::with_float;

const NAME: &str = "decoder";

/// The layers and the final norm in one pass. Hidden states are `[tokens, hidden]`.
pub(super) struct Layers<'a> {
    pub blocks: &'a [Block],
    /// Weight of the final norm, `[hidden]`.
    pub norm: &'a Tensor,
    pub context: &'a Context,
    pub lora: Option<&'a LoraWeights>,
    pub fused: bool,
}

/// What [`Layers::forward_saving`] saves for [`Layers::backward`].
pub(super) struct SavedLayers {
    layers: Vec<SavedLayer>,
    output: Tensor,
}

struct SavedLayer {
    input: Tensor,
    /// `None` if the backward pass recomputes them.
    activations: Option<Activations>,
    /// The random stream before the layer.
    dropout: Option<Dropout>,
}

enum Activations {
    F32(LayerActivations<f32>),
    F64(LayerActivations<f64>),
    /// The output, with the graph from the input on.
    Graph(Tensor),
}

impl<'a> Layers<'a> {
    /// Final hidden states from the embeddings.
    pub fn forward(&self, mut x: Tensor, mut dropout: Option<&mut Dropout>) -> Result<Tensor> {
        for (index, block) in self.blocks.iter().enumerate() {
            let dropout = dropout.as_deref_mut();
            x = if self.fused {
                self.layer(index, &x, dropout, Save::Nothing)?.1
            } else {
                block.forward(&x, index, self.context, self.lora, dropout)?
            };
        }
        self.final_norm(&x)
    }

    /// As [`Self::forward`], with the activations of the last `keep` layers.
    pub fn forward_saving(
        &self,
        x: Tensor,
        mut dropout: Option<&mut Dropout>,
        keep: usize,
    ) -> Result<(SavedLayers, Tensor)> {
        let mut layers = Vec::with_capacity(self.blocks.len());
        let mut input = x;
        for index in 0..self.blocks.len() {
            let before = dropout.as_deref().cloned();
            let kept = index + keep >= self.blocks.len();
            let save = if kept { Save::Activations } else { Save::Nothing };
            let (activations, output) = self.layer(index, &input, dropout.as_deref_mut(), save)?;
            layers.push(SavedLayer { input, activations, dropout: before });
            input = self.start(output)?;
        }
        let hidden = self.final_norm(&input)?;
        Ok((SavedLayers { layers, output: input }, hidden))
    }

    /// The adapter's gradients by PEFT name from the gradient of the final hidden states. Frees each
    /// layer's activations after use.
    pub fn backward(&self, saved: SavedLayers, grad: &Tensor) -> Result<BTreeMap<String, Tensor>> {
        let SavedLayers { layers, output } = saved;
        let mut grad = self.final_norm_backward(&output, grad)?;
        drop(output);
        let mut gradients = BTreeMap::new();
        for (index, layer) in layers.into_iter().enumerate().rev() {
            let SavedLayer { input, activations, mut dropout } = layer;
            let activations = match activations {
                None => self.layer(index, &input, dropout.as_mut(), Save::ActivationsOnly)?.0,
                saved => saved,
            };
            grad = match activations {
                Some(Activations::F32(saved)) => {
                    self.layer_backward(index, &input, saved, grad, &mut gradients)?
                }
                Some(Activations::F64(saved)) => {
                    self.layer_backward(index, &input, saved, grad, &mut gradients)?
                }
                Some(Activations::Graph(output)) => {
                    self.graph_backward(index, &input, &output, grad, &mut gradients)?
                }
                None => candle_core::bail!("{NAME}: layer {index} has no activations"),
            };
        }
        Ok(gradients)
    }

    /// A layer's activations, as `save` requires, and output.
    fn layer(
        &self,
        index: usize,
        x: &Tensor,
        dropout: Option<&mut Dropout>,
        save: Save,
    ) -> Result<(Option<Activations>, Tensor)> {
        if !self.fused {
            let y = self.blocks[index].forward(x, index, self.context, self.lora, dropout)?;
            let saved = (save != Save::Nothing).then(|| Activations::Graph(y.clone()));
            return Ok((saved, y.detach()));
        }
        let layer = self.fused_layer(index);
        if x.dtype() == DType::F64 {
            let (saved, y) = with_values([x], NAME, |[x]| layer.forward(x, dropout, save))?;
            return Ok((saved.map(Activations::F64), self.tensor(y)?));
        }
        let (saved, y) = with_values([x], NAME, |[x]| layer.forward(x, dropout, save))?;
        Ok((saved.map(Activations::F32), self.tensor(y)?))
    }

    /// The gradient of a layer's input from that of its output; unspecified values for the first layer.
    fn layer_backward<T: Real>(
        &self,
        index: usize,
        x: &Tensor,
        saved: LayerActivations<T>,
        grad: Tensor,
        gradients: &mut BTreeMap<String, Tensor>,
    ) -> Result<Tensor> {
        let mut dx = values::<T>(&grad)?;
        drop(grad);
        with_values([x], NAME, |[x]| {
            self.fused_layer(index).backward(x, saved, &mut dx, index > 0, gradients)
        })?;
        self.tensor(dx)
    }

    /// As [`Self::layer_backward`], for the graph of the output `y`.
    fn graph_backward(
        &self,
        index: usize,
        x: &Tensor,
        y: &Tensor,
        grad: Tensor,
        gradients: &mut BTreeMap<String, Tensor>,
    ) -> Result<Tensor> {
        let mut found = graph_gradients(y, &grad)?;
        for (kind, _) in self.context.spec.linears(index) {
            let Some(pair) = self.lora.and_then(|lora| lora.pair(index, kind)) else { continue };
            for (name, var) in peft_names(index, kind).into_iter().zip([&pair.a, &pair.b]) {
                gradients.extend(found.remove(var).map(|gradient| (name, gradient)));
            }
        }
        Ok(found.remove(x).unwrap_or(grad))
    }

    /// `x` as the input of a layer or of the final norm, at which the backward pass of a graph ends.
    fn start(&self, x: Tensor) -> Result<Tensor> {
        if self.fused { Ok(x) } else { Ok(Var::from_tensor(&x)?.into_inner()) }
    }

    fn fused_layer(&self, index: usize) -> FusedLayer<'a> {
        let Self { blocks, context, lora, .. } = *self;
        FusedLayer { block: &blocks[index], index, context, lora }
    }

    fn fused_norm(&self) -> FusedRmsNorm<'a> {
        FusedRmsNorm::new(&self.context.spec, self.norm)
    }

    fn final_norm(&self, x: &Tensor) -> Result<Tensor> {
        if !self.fused {
            return block::norm(&self.context.spec, x, self.norm);
        }
        with_float!(x.dtype(), T => {
            self.tensor::<T>(with_values([x], NAME, |[x]| self.fused_norm().forward(x))?)
        })
    }

    /// The gradient of the final norm's input `x` from that of its output.
    fn final_norm_backward(&self, x: &Tensor, grad: &Tensor) -> Result<Tensor> {
        if !self.fused {
            let gradient = graph_gradients(&self.final_norm(x)?, grad)?.remove(x);
            return gradient.map_or_else(|| x.zeros_like(), Ok);
        }
        with_float!(grad.dtype(), T => {
            let mut dx = values::<T>(&grad.contiguous()?)?;
            with_values([x], NAME, |[x]| self.fused_norm().backward(x, &mut dx))?;
            self.tensor(dx)
        })
    }

    /// `[tokens, hidden]`
    fn tensor<T: Real>(&self, values: Vec<T>) -> Result<Tensor> {
        Tensor::from_vec(values, ((), self.context.spec.hidden_size), &Device::Cpu)
    }
}

/// The gradients of the variables that `y` is computed from, where `grad` is that of `y`.
pub(super) fn graph_gradients(y: &Tensor, grad: &Tensor) -> Result<GradStore> {
    (y * grad.detach())?.sum_all()?.backward()
}

fn values<T: Real>(x: &Tensor) -> Result<Vec<T>> {
    with_values([x], NAME, |[x]| Ok(x.to_vec()))
}
