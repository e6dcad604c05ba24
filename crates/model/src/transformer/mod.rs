//! A differentiable decoder-only transformer.
//!
//! One block serves every family; [`ModelSpec`] says which of its options are on. Weights are
//! ordinary tensors under Hugging Face names: constants for a frozen base, or `Var`s' tensors, in
//! which case every parameter is trained.
//!
//! Sequences lie end to end, without padding, and sequences that begin alike may share that
//! beginning ([`Segments`]). [`Model::trace`] and [`Model::backward`] go layer by layer, so that what a
//! layer computes need not be kept. Over a frozen base on the CPU they run loops and products of our
//! own (`tape`); everywhere else they run candle's operations.

pub mod attention;
pub mod block;
mod fused_layer;
mod head;
mod saved_activations;
mod segments;
mod token_stats;
mod trace;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use block::{Block, Context};
use candle_core::safetensors::MmapedSafetensors;
use candle_core::{DType, Device, Tensor};
use sha2::{Digest, Sha256};

use crate::adapter::BaseDtype;
use crate::adapter::weights::{Dropout, LoraWeights};
use crate::kernels::custom_op::is_half;
use crate::kernels::{custom_op, ops};
use crate::{ModelError, ModelSpec, Result};

pub use head::head_stats;
pub use head::{head_widened, logits_held};
pub use segments::{Segment, Segments};
pub use token_stats::token_stats;
pub use trace::Trace;

/// Whether a weight of so many dimensions that is stored in `stored` stays so in memory.
pub fn stays(dtype: BaseDtype, stored: DType, rank: usize) -> bool {
    dtype == BaseDtype::Auto && rank == 2 && is_half(stored)
}

/// The decoder and its weights.
#[derive(Clone, Debug)]
pub struct Model {
    spec: ModelSpec,
    /// `[vocab, hidden]`
    embedding: Tensor,
    blocks: Vec<Block>,
    /// `[hidden]`
    norm: Tensor,
    /// `[vocab, hidden]`; the embedding itself where tied.
    head: Tensor,
    /// Whether layers run by hand ([`tape`]) rather than as candle's graph.
    by_hand: bool,
}

impl Model {
    /// Builds the model from named tensors of one device and one float dtype, in which it computes;
    /// matrices may be of less precision. Tensors of `Var`s are trained; names that the model does
    /// not have are ignored.
    ///
    /// # Errors
    /// If a weight is missing or has the wrong shape.
    pub fn new(spec: ModelSpec, mut tensors: HashMap<String, Tensor>) -> Result<Self> {
        for (name, shape) in spec.weight_shapes() {
            let tensor = tensors
                .get(&name)
                .ok_or_else(|| ModelError::Weights(format!("`{name}` is missing")))?;
            if tensor.dims() != shape {
                return Err(ModelError::Weights(format!(
                    "`{name}` has shape {:?}, but config.json asks for {shape:?}",
                    tensor.dims()
                )));
            }
        }
        let mut take = |name: &str| {
            tensors.remove(name).ok_or_else(|| ModelError::Weights(format!("`{name}` is missing")))
        };
        let embedding = take("model.embed_tokens.weight")?;
        let blocks = (0..spec.num_layers)
            .map(|layer| Block::take(&spec, layer, &mut take))
            .collect::<Result<Vec<_>>>()?;
        let norm = take("model.norm.weight")?;
        let head =
            if spec.tie_word_embeddings { embedding.clone() } else { take("lm_head.weight")? };
        let by_hand = blocks
            .iter()
            .flat_map(|block| block.weights().chain(block.biases()))
            .chain([&embedding, &norm, &head])
            .all(custom_op::runs_with);
        Ok(Self { spec, embedding, blocks, norm, head, by_hand })
    }

    /// Reads the weights from safetensors files. It computes in f32; 16-bit matrices stay as they are
    /// with [`BaseDtype::Auto`].
    ///
    /// # Errors
    /// If a file cannot be read, or as [`Self::new`].
    pub fn load(
        spec: ModelSpec,
        weight_files: &[PathBuf],
        dtype: BaseDtype,
        device: &Device,
    ) -> Result<Self> {
        // SAFETY: the mapping is read and dropped within this function; a file that is changed
        // meanwhile could at worst give wrong numbers, as any read of it would.
        let files = unsafe { MmapedSafetensors::multi(weight_files) }?;
        let mut tensors = HashMap::new();
        for (name, _) in spec.weight_shapes() {
            let tensor = files
                .load(&name, device)
                .map_err(|e| ModelError::Weights(format!("`{name}`: {e}")))?;
            let stays = stays(dtype, tensor.dtype(), tensor.rank());
            tensors.insert(name, if stays { tensor } else { tensor.to_dtype(DType::F32)? });
        }
        Self::new(spec, tensors)
    }

    /// Its shape.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// SHA-256, in hex, of its shape and of the first values of every weight of its blocks: tells one
    /// base model from another without reading all of it.
    ///
    /// # Errors
    /// If a weight cannot be read.
    pub fn digest(&self) -> Result<String> {
        const VALUES: usize = 64;
        let mut hasher = Sha256::new();
        hasher.update(format!("{:?}", self.spec));
        let weights = self.blocks.iter().flat_map(Block::weights);
        for weight in [&self.embedding, &self.norm, &self.head].into_iter().chain(weights) {
            let flat = weight.flatten_all()?;
            let first = flat.narrow(0, 0, flat.elem_count().min(VALUES))?;
            for value in first.to_dtype(DType::F64)?.to_vec1::<f64>()? {
                hasher.update(value.to_le_bytes());
            }
        }
        Ok(hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// What it computes in.
    pub fn dtype(&self) -> DType {
        self.norm.dtype()
    }

    /// `[vocab, hidden]`
    pub fn embedding(&self) -> &Tensor {
        &self.embedding
    }

    /// Weights of the blocks, from the first.
    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// Weight of the last norm, `[hidden]`.
    pub fn norm(&self) -> &Tensor {
        &self.norm
    }

    /// `[vocab, hidden]`
    pub fn head(&self) -> &Tensor {
        &self.head
    }

    /// Where its weights are.
    pub fn device(&self) -> &Device {
        self.embedding.device()
    }

    /// Logits `[batch, len, vocab]` of `ids` `[batch, len]` (u32, padded on the right): position t
    /// predicts token t + 1. `lora` switches the adapter on, `dropout` is for training only.
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
    /// carry no gradient, unless weights are trained: see [`Self::trace`].
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn hidden(
        &self,
        ids: &Tensor,
        segments: &Arc<Segments>,
        lora: Option<&LoraWeights>,
        mut dropout: Option<&mut Dropout>,
    ) -> Result<Tensor> {
        let context = Context::new(&self.spec, segments, self.dtype(), self.device())?;
        let mut x = self.embed(ids, &context)?;
        match (self.by_hand, self.dtype()) {
            (true, DType::F64) => return Ok(self.run::<f64>(&x, &context, lora, dropout)?),
            (true, _) => return Ok(self.run::<f32>(&x, &context, lora, dropout)?),
            (false, _) => {}
        }
        for (layer, block) in self.blocks.iter().enumerate() {
            x = block.forward(&x, layer, &context, lora, dropout.as_deref_mut())?;
        }
        self.last_norm(&x)
    }

    /// The first layer's input `[tokens, hidden]`.
    fn embed(&self, ids: &Tensor, context: &Context) -> candle_core::Result<Tensor> {
        let tokens = context.segments.tokens();
        if ids.dims() != [tokens] {
            candle_core::bail!(
                "ids of shape {:?} do not fit segments of {tokens} tokens",
                ids.dims()
            );
        }
        let x = self.embedding.index_select(ids, 0)?.to_dtype(self.dtype())?;
        let Some(scale) = self.spec.embedding_scale else { return Ok(x) };
        // Rounded to the weights' type first, as transformers does.
        let scale = Tensor::new(scale, x.device())?.to_dtype(x.dtype())?;
        x.broadcast_mul(&scale)
    }

    fn last_norm(&self, x: &Tensor) -> Result<Tensor> {
        Ok(block::norm(&self.spec, x, &self.norm)?)
    }

    /// Logits `[n, vocab]` of hidden states `[n, hidden]`.
    ///
    /// # Errors
    /// If the shapes do not fit.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        let logits = ops::linear(hidden, &self.head, None)?;
        match self.spec.final_softcap {
            Some(cap) => Ok(ops::softcap(&logits, cap)?),
            None => Ok(logits),
        }
    }

    /// `[n, 2]`: natural-log probability of each target and the entropy, both at the row's temperature,
    /// where `rows` (u32) of `hidden` predict; see [`head_stats`].
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
        Ok(head_stats(&x, &self.head, self.spec.final_softcap, targets, temperatures)?)
    }
}

#[cfg(test)]
mod tests;
