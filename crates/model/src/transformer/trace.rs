//! Forward and backward passes that go layer by layer.
//!
//! A layer's activations can be dropped after the forward pass and computed again in the backward pass
//! (Chen et al. 2016, "Training deep nets with sublinear memory cost", with one segment a layer), and
//! are freed layer by layer in either case. On the CPU layers run by hand ([`super::saved_activations`]); elsewhere
//! every layer is a graph of its own: its input is a variable, and its output's gradient comes from
//! the layer above.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, CustomOp1, DType, Layout, Shape, Tensor, Var};

use super::block::Context;
use super::saved_activations::Tape;
use super::{Dropout, LoraWeights, Segments};
use crate::{Model, Result};

/// What a forward pass leaves for the backward pass.
pub struct Trace {
    context: Context,
    layers: Layers,
    /// Final hidden states `[tokens, hidden]` after the last norm.
    hidden: Tensor,
}

enum Layers {
    F32(Tape<f32>),
    F64(Tape<f64>),
    Graphs {
        layers: Vec<Graph>,
        /// The last layer's output.
        top: Var,
    },
}

/// One layer as a graph of candle's.
struct Graph {
    input: Tensor,
    /// Absent where the backward pass computes it again.
    output: Option<Tensor>,
    /// The random stream before it.
    dropout: Option<Dropout>,
}

impl Trace {
    /// Final hidden states `[tokens, hidden]` after the last norm: differentiate what is computed
    /// from it with [`Model::backward`].
    pub fn hidden(&self) -> &Tensor {
        &self.hidden
    }
}

/// A scalar whose gradient is given: the start of a backward pass in the middle of a network.
struct Seed(Tensor);

impl CustomOp1 for Seed {
    fn name(&self) -> &'static str {
        "seed"
    }

    fn cpu_fwd(
        &self,
        storage: &CpuStorage,
        _layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let zero = match storage {
            CpuStorage::F64(_) => CpuStorage::F64(vec![0.0]),
            _ => CpuStorage::F32(vec![0.0]),
        };
        Ok((zero, Shape::from(())))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> candle_core::Result<Option<Tensor>> {
        Ok(Some(self.0.clone()))
    }
}

/// Gradients of `y` where its own gradient is `grad`.
fn backward_from(y: &Tensor, grad: &Tensor) -> candle_core::Result<GradStore> {
    if y.device().is_cpu() {
        return y.apply_op1(Seed(grad.detach()))?.backward();
    }
    (y * grad.detach())?.sum_all()?.backward()
}

impl Model {
    /// As [`Model::hidden`], ready for [`Self::backward`]. The activations of the last `keep` layers
    /// are kept; those of the others are computed again.
    ///
    /// # Errors
    /// As [`Model::forward`].
    pub fn trace(
        &self,
        ids: &Tensor,
        segments: &Arc<Segments>,
        lora: &LoraWeights,
        dropout: Option<&mut Dropout>,
        keep: usize,
    ) -> Result<Trace> {
        let context = Context::new(&self.spec, segments, self.dtype(), self.device())?;
        let x = self.embed(ids, &context)?.detach();
        if !self.by_hand {
            return self.trace_graphs(x, context, lora, dropout, keep);
        }
        let (layers, hidden) = if self.dtype() == DType::F64 {
            let (tape, hidden) = self.record(&x, &context, lora, dropout, keep)?;
            (Layers::F64(tape), hidden)
        } else {
            let (tape, hidden) = self.record(&x, &context, lora, dropout, keep)?;
            (Layers::F32(tape), hidden)
        };
        let hidden = Var::from_tensor(&hidden)?.into_inner();
        Ok(Trace { context, layers, hidden })
    }

    fn trace_graphs(
        &self,
        mut x: Tensor,
        context: Context,
        lora: &LoraWeights,
        mut dropout: Option<&mut Dropout>,
        keep: usize,
    ) -> Result<Trace> {
        let mut layers = Vec::with_capacity(self.blocks.len());
        for (index, block) in self.blocks.iter().enumerate() {
            let before = dropout.as_deref().cloned();
            let y = block.forward(&x, index, &context, Some(lora), dropout.as_deref_mut())?;
            let next = Var::from_tensor(&y.detach())?;
            let output = if index + keep < self.blocks.len() { None } else { Some(y) };
            layers.push(Graph { input: x, output, dropout: before });
            x = next.into_inner();
        }
        let top = Var::from_tensor(&x)?;
        let hidden = self.last_norm(top.as_tensor())?;
        Ok(Trace { context, layers: Layers::Graphs { layers, top }, hidden })
    }

    /// Gradients of the adapter, by name, where those of `y`, computed from [`Trace::hidden`], are
    /// `grad`.
    ///
    /// # Errors
    /// If shapes do not fit.
    pub fn backward(
        &self,
        trace: Trace,
        y: &Tensor,
        grad: &Tensor,
        lora: &LoraWeights,
    ) -> Result<BTreeMap<String, Tensor>> {
        let Trace { context, layers, hidden } = trace;
        let mut store = backward_from(y, grad)?;
        let above = match &layers {
            Layers::Graphs { top, .. } => store.remove(top.as_tensor()),
            _ => store.remove(&hidden),
        };
        drop((store, hidden));
        let mut gradients = match (layers, above) {
            (_, None) => BTreeMap::new(),
            (Layers::F32(tape), Some(grad)) => self.rewind(tape, grad, &context, lora)?,
            (Layers::F64(tape), Some(grad)) => self.rewind(tape, grad, &context, lora)?,
            (Layers::Graphs { layers, .. }, Some(grad)) => {
                self.rewind_graphs(layers, grad, &context, lora)?
            }
        };
        for (name, var) in lora.parameters() {
            if let Entry::Vacant(vacant) = gradients.entry(name) {
                vacant.insert(var.zeros_like()?);
            }
        }
        Ok(gradients)
    }

    fn rewind_graphs(
        &self,
        layers: Vec<Graph>,
        grad: Tensor,
        context: &Context,
        lora: &LoraWeights,
    ) -> Result<BTreeMap<String, Tensor>> {
        let mut above = Some(grad);
        let mut parameters = lora.parameters();
        let mut gradients = BTreeMap::new();
        for (index, layer) in layers.into_iter().enumerate().rev() {
            let Some(grad) = above.take() else { break };
            let Graph { input, output, mut dropout } = layer;
            let y = match output {
                Some(y) => y,
                None => self.blocks[index].forward(
                    &input,
                    index,
                    context,
                    Some(lora),
                    dropout.as_mut(),
                )?,
            };
            let mut store = backward_from(&y, &grad)?;
            above = store.remove(&input);
            parameters.retain(|(name, var)| match store.remove(var.as_tensor()) {
                Some(gradient) => {
                    gradients.insert(name.clone(), gradient);
                    false
                }
                None => true,
            });
        }
        Ok(gradients)
    }
}
