//! The model: its weights, forward and backward passes.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor, Var};

use hone_core::digest::Digest;

use super::Segments;
use super::block::{Block, Context, unquantized};
use super::graph_head::graph_stats;
use super::head::{OutputLayer, head_stats};
use super::layers::{Layers, SavedLayers, graph_gradients};
use crate::adapter::weights::{Dropout, LoraWeights};
use crate::kernels::compute::{Compute, available};
use crate::kernels::ops;
use crate::kernels::storage::is_frozen_cpu_weight;
use crate::spec::RopeTables;
use crate::weights::{BaseMatrix, LoadOptions, WeightFiles};
use crate::{ModelError, ModelSpec, Result};

/// The decoder and its weights.
#[derive(Clone, Debug)]
pub struct Model {
    spec: ModelSpec,
    /// `[vocab, hidden]`
    embedding: BaseMatrix,
    blocks: Vec<Block>,
    /// `[hidden]`
    norm: Tensor,
    /// `[vocab, hidden]`; the embedding itself where tied.
    head: BaseMatrix,
    rope: Arc<RopeTables>,
    /// Whether layers and output layer run by the fused kernels rather than as candle graphs.
    pub(crate) fused: bool,
    /// The arithmetic of products with weights in the fused kernels.
    compute: Compute,
}

/// What [`Model::forward_saving`] saves for [`Model::backward`].
pub struct SavedActivations {
    context: Context,
    layers: SavedLayers,
    /// `[tokens, hidden]`, a variable.
    hidden: Tensor,
}

impl SavedActivations {
    /// Final hidden states `[tokens, hidden]` after the last norm. [`Model::backward`] differentiates a
    /// value that is computed from them.
    pub fn hidden(&self) -> &Tensor {
        &self.hidden
    }
}

impl Model {
    /// A model from named weights on one device. It computes in the float type of the norms; matrices
    /// may be of lower precision. Tensors of `Var`s are trained. Names that the model does not have are
    /// ignored.
    ///
    /// # Errors
    /// If a weight is missing or has the wrong shape, or a matrix is quantized and the fused kernels
    /// cannot run, because a weight is trained or not on the CPU.
    pub fn new<W: Into<BaseMatrix>>(spec: ModelSpec, weights: HashMap<String, W>) -> Result<Self> {
        let mut weights: HashMap<String, BaseMatrix> =
            weights.into_iter().map(|(name, weight)| (name, weight.into())).collect();
        let missing = |name: &str| ModelError::weights(format!("`{name}` is missing"));
        for (name, shape) in spec.weight_shapes() {
            let found = weights.get(&name).ok_or_else(|| missing(&name))?.shape();
            if found != shape {
                return Err(ModelError::weights(format!(
                    "`{name}` has shape {found:?}, but config.json requires {shape:?}"
                )));
            }
        }
        let mut take = |name: &str| weights.remove(name).ok_or_else(|| missing(name));
        let embedding = take("model.embed_tokens.weight")?;
        let blocks = (0..spec.num_layers)
            .map(|layer| Block::new(&spec, layer, &mut take))
            .collect::<Result<Vec<_>>>()?;
        let norm = unquantized("model.norm.weight", take("model.norm.weight")?)?;
        let head =
            if spec.tie_word_embeddings { embedding.clone() } else { take("lm_head.weight")? };
        let matrices = || blocks.iter().flat_map(Block::matrices).chain([&embedding, &head]);
        let vectors = blocks.iter().flat_map(|block| block.all_norms().chain(block.biases()));
        let fused = vectors.chain([&norm]).all(is_frozen_cpu_weight)
            && matrices().all(|matrix| match matrix {
                BaseMatrix::Float(tensor) => is_frozen_cpu_weight(tensor),
                BaseMatrix::Quantized(_) => true,
            });
        let is_quantized = |matrix: &BaseMatrix| matches!(matrix, BaseMatrix::Quantized(_));
        if !fused && matrices().any(is_quantized) {
            let reason = "quantized weights can be used on the CPU only, and with no weight of the \
                          base trained";
            return Err(ModelError::Unsupported(reason.to_owned()));
        }
        let compute = Compute::default();
        let rope = Arc::new(RopeTables::new(&spec.rope, norm.dtype(), norm.device()));
        Ok(Self { spec, embedding, blocks, norm, head, rope, fused, compute })
    }

    /// Reads the weights from safetensors files or a GGUF file, one after another, in the types that
    /// `options` choose. The model computes in f32.
    ///
    /// # Errors
    /// If a file cannot be read, or as [`Self::new`].
    pub fn load(
        spec: ModelSpec,
        weight_files: &[PathBuf],
        options: impl Into<LoadOptions>,
        device: &Device,
    ) -> Result<Self> {
        let weights = WeightFiles::open(&spec, weight_files)?;
        let weights = weights.load_all(&spec, &options.into(), device)?;
        weights.values().for_each(BaseMatrix::use_huge_pages);
        Self::new(spec, weights)
    }

    /// The model with another arithmetic of products with its weights, which it shares. Without the fused
    /// kernels, and where [`available`] is f32, it computes in its own float type.
    #[must_use]
    pub fn with_compute(self, compute: Compute) -> Self {
        let fused = self.fused && self.dtype() == DType::F32;
        let compute = if fused { available(compute) } else { Compute::F32 };
        Self { compute, ..self }
    }

    /// The arithmetic of products with the weights in [`Self::hidden`], [`Self::forward_saving`],
    /// [`Self::backward`] and [`Self::stats`]. [`Self::logits`] is not affected.
    pub fn compute(&self) -> Compute {
        self.compute
    }

    /// The shape of the model.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// SHA-256, in hex, of the shape and of the first values of every weight: distinguishes base models
    /// without reading them whole. Values of quantized blocks count as in f32. Biases are left out.
    ///
    /// # Errors
    /// If a weight cannot be read.
    pub fn digest(&self) -> Result<String> {
        const VALUES: usize = 64;
        let matrix = BaseMatrix::first_values;
        let vector = |weight: &Tensor, count| matrix(&weight.clone().into(), count);
        let mut first = vec![
            matrix(&self.embedding, VALUES)?,
            vector(&self.norm, VALUES)?,
            matrix(&self.head, VALUES)?,
        ];
        for block in &self.blocks {
            for norm in block.all_norms() {
                first.push(vector(norm, VALUES)?);
            }
            for weight in block.matrices() {
                first.push(matrix(weight, VALUES)?);
            }
        }
        let digest = Digest::new().bytes(format!("{:?}", self.spec));
        let values = first.iter().flatten();
        Ok(values.fold(digest, |digest, value| digest.bytes(value.to_le_bytes())).hex())
    }

    /// Every weight by its Hugging Face name, in the order of [`ModelSpec::weight_shapes`].
    pub fn weights(&self) -> impl Iterator<Item = (String, BaseMatrix)> {
        let mut weights = vec![self.embedding.clone()];
        for (layer, block) in self.blocks.iter().enumerate() {
            for (weight, bias) in self.spec.linears(layer).filter_map(|(kind, _)| block.linear(kind)) {
                weights.push(weight.clone());
                weights.extend(bias.cloned().map(BaseMatrix::from));
            }
            let norms = [&block.head_norms, &Some(block.norms.clone()), &block.output_norms];
            weights.extend(norms.into_iter().flatten().flatten().cloned().map(BaseMatrix::from));
        }
        weights.extend([self.norm.clone().into(), self.head.clone()]);
        // A tied output layer has no name.
        self.spec.weight_shapes().into_iter().map(|(name, _)| name).zip(weights)
    }

    /// Cosines and sines of the angles of the positions from 0 on, each `[positions, rotary_dim / 2]`.
    ///
    /// # Errors
    /// If a tensor operation fails.
    pub(crate) fn angles(&self, positions: usize) -> Result<(Tensor, Tensor)> {
        Ok(self.rope.at(&(0..positions).collect::<Vec<_>>())?)
    }

    /// The float type that the model computes in.
    pub fn dtype(&self) -> DType {
        self.norm.dtype()
    }

    /// `[vocab, hidden]`
    pub fn embedding(&self) -> &BaseMatrix {
        &self.embedding
    }

    /// Weights of the blocks, from the first.
    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// Weight of the final norm, `[hidden]`.
    pub fn norm(&self) -> &Tensor {
        &self.norm
    }

    /// Weight of the output layer, `[vocab, hidden]`.
    pub fn head(&self) -> &BaseMatrix {
        &self.head
    }

    /// The device of the weights.
    pub fn device(&self) -> &Device {
        self.norm.device()
    }

    /// Logits `[batch, len, vocab]` of `ids` `[batch, len]` (u32, padded on the right): position t
    /// predicts token t + 1. `lora` is the adapter to use; `dropout` is for training only.
    ///
    /// # Errors
    /// If `ids` is not a matrix of ids below the vocabulary's size.
    pub fn forward(
        &self,
        ids: &Tensor,
        lora: Option<&LoraWeights>,
        dropout: Option<&mut Dropout>,
    ) -> Result<Tensor> {
        let (batch, len) = ids.dims2()?;
        let segments = Arc::new(Segments::batch(batch, len));
        let hidden = self.hidden(&ids.flatten_all()?, &segments, lora, dropout)?;
        Ok(self.logits(&hidden)?.reshape((batch, len, self.spec.vocab_size))?)
    }

    /// Final hidden states `[tokens, hidden]` after the last norm, of `ids` `[tokens]` (u32). They
    /// carry no gradient unless weights are trained; [`Self::forward_saving`] is for gradients of the
    /// adapter.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn hidden(
        &self,
        ids: &Tensor,
        segments: &Arc<Segments>,
        lora: Option<&LoraWeights>,
        dropout: Option<&mut Dropout>,
    ) -> Result<Tensor> {
        let context = self.context(segments)?;
        let x = self.embed(ids, &context)?;
        Ok(self.layers(&context, lora).forward(x, dropout)?)
    }

    /// As [`Self::hidden`], ready for [`Self::backward`]. The activations of the last `keep` layers are
    /// kept; those of the others are recomputed.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn forward_saving(
        &self,
        ids: &Tensor,
        segments: &Arc<Segments>,
        lora: &LoraWeights,
        dropout: Option<&mut Dropout>,
        keep: usize,
    ) -> Result<SavedActivations> {
        let context = self.context(segments)?;
        let x = self.embed(ids, &context)?.detach();
        let (layers, hidden) =
            self.layers(&context, Some(lora)).forward_saving(x, dropout, keep)?;
        // The start of a new graph.
        let hidden = Var::from_tensor(&hidden.detach())?.into_inner();
        Ok(SavedActivations { context, layers, hidden })
    }

    /// The adapter's gradients by PEFT name, where `grad` is the gradient of `y` and `y` is computed
    /// from [`SavedActivations::hidden`].
    ///
    /// # Errors
    /// If shapes do not fit.
    pub fn backward(
        &self,
        saved: SavedActivations,
        y: &Tensor,
        grad: &Tensor,
        lora: &LoraWeights,
    ) -> Result<BTreeMap<String, Tensor>> {
        let SavedActivations { context, layers, hidden } = saved;
        let grad = graph_gradients(y, grad)?.remove(&hidden);
        drop(hidden);
        let mut gradients = match grad {
            Some(grad) => self.layers(&context, Some(lora)).backward(layers, &grad)?,
            None => BTreeMap::new(),
        };
        for (name, var) in lora.parameters() {
            if let Entry::Vacant(vacant) = gradients.entry(name) {
                vacant.insert(var.zeros_like()?);
            }
        }
        Ok(gradients)
    }

    fn context(&self, segments: &Arc<Segments>) -> Result<Context> {
        Context::new(&self.spec, segments, &self.rope, self.compute)
    }

    fn layers<'a>(&'a self, context: &'a Context, lora: Option<&'a LoraWeights>) -> Layers<'a> {
        let Self { blocks, norm, fused, .. } = self;
        Layers { blocks, norm, context, lora, fused: *fused }
    }

    /// The first layer's input `[tokens, hidden]`.
    fn embed(&self, ids: &Tensor, context: &Context) -> candle_core::Result<Tensor> {
        let (tokens, shape) = (context.segments.tokens(), ids.dims());
        if shape != [tokens] {
            candle_core::bail!("ids of shape {shape:?} do not fit segments of {tokens} tokens");
        }
        let x = self.embedding.select_rows(ids, self.dtype())?;
        let Some(scale) = self.spec.embedding_scale else { return Ok(x) };
        // Rounded to the weights' type first, as in transformers.
        let scale = Tensor::new(scale, x.device())?.to_dtype(x.dtype())?;
        x.broadcast_mul(&scale)
    }

    /// Logits `[n, vocab]` of hidden states `[n, hidden]`.
    ///
    /// # Errors
    /// If the shapes do not fit.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        let logits = ops::linear(hidden, &self.head.to_float()?, None)?;
        Ok(ops::softcap(logits, self.spec.final_softcap)?)
    }

    /// Log-probability and entropy of target tokens, in nats, `[n, 2]`: for the logits of each of `rows` (u32) of
    /// `hidden`, a target and a temperature T, with `p = softmax(logits / T)`, column 0 is `ln p[target]` and
    /// column 1 `-sum p ln p`. Differentiable in `hidden`. Logits are computed a chunk at a time.
    ///
    /// # Errors
    /// If the shapes do not fit or a target is outside the vocabulary.
    pub fn stats(
        &self,
        hidden: &Tensor,
        rows: &Tensor,
        targets: &[u32],
        temperatures: &[f32],
    ) -> Result<Tensor> {
        let x = hidden.index_select(rows, 0)?;
        let head = OutputLayer {
            weight: self.head.clone(),
            softcap: self.spec.final_softcap,
            compute: self.compute,
        };
        let stats = if self.fused { head_stats } else { graph_stats };
        Ok(stats(&x, head, targets, temperatures)?)
    }
}
