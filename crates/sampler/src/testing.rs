//! Models, adapters and a decoder harness for the tests of this crate.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use hone_core::types::TokenId;
use hone_model::adapter::weights::LoraWeights;
use hone_model::adapter::{BaseDtype, LoraConfig};
use hone_model::testing::load_model;
use hone_model::{Model, ModelSpec};

use crate::{AdapterWeights, Decoder, PagePool, Scratch, SequencePages, WeightsId};

pub(crate) use hone_model::testing::{FAMILIES, family};

/// Loads the model of a directory.
pub(crate) fn model(dir: &Path) -> Model {
    load_model(dir, BaseDtype::Auto)
}

/// An adapter on every linear layer, which changes every logit.
pub(crate) fn random_lora(spec: &ModelSpec, r: usize, seed: u64) -> LoraWeights {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let config = LoraConfig { r, alpha: 3.0, ..LoraConfig::default() };
    let lora = LoraWeights::fresh(spec, &config, &mut rng, DType::F32, &Device::Cpu).unwrap();
    for (_, var) in lora.parameters() {
        let values: Vec<f32> = (0..var.elem_count()).map(|_| rng.random_range(-0.3..0.3)).collect();
        var.set(&Tensor::from_vec(values, var.shape(), &Device::Cpu).unwrap()).unwrap();
    }
    lora
}

/// Random token ids.
pub(crate) fn ids(len: usize, vocab: usize, seed: u64) -> Vec<TokenId> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..len).map(|_| rng.random_range(0..vocab as TokenId)).collect()
}

/// Logits `[tokens][vocab]` of the trainer's forward pass.
pub(crate) fn trainer_logits(
    model: &Model,
    ids: &[TokenId],
    lora: Option<&LoraWeights>,
) -> Vec<Vec<f32>> {
    let input = Tensor::new(ids, &Device::Cpu).unwrap().unsqueeze(0).unwrap();
    let logits = model.forward(&input, lora, None).unwrap().squeeze(0).unwrap();
    logits.to_vec2().unwrap()
}

/// The token with the greatest logit.
pub(crate) fn best(logits: &[f32]) -> TokenId {
    let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
    best.map_or(0, |(id, _)| id as TokenId)
}

/// Pages of a harness's pool.
pub(crate) const POOL_PAGES: usize = 1000;

/// A decoder with its cache and buffers.
pub(crate) struct DecoderHarness {
    pub decoder: Decoder,
    pub pool: PagePool,
    pub scratch: Scratch,
    pub adapter: Option<AdapterWeights>,
    pub threads: usize,
}

impl DecoderHarness {
    pub fn new(model: &Model, lora: Option<&LoraWeights>) -> Self {
        let mut decoder = Decoder::new(model).unwrap();
        decoder.reserve_positions(64).unwrap();
        Self {
            pool: PagePool::new(decoder.shape(), POOL_PAGES),
            scratch: Scratch::new(model.spec(), 64, 64),
            adapter: lora.map(|lora| AdapterWeights::new(model.spec(), lora).unwrap()),
            decoder,
            threads: 1,
        }
    }

    /// Starts a sequence of up to `limit` tokens and computes its prompt, `chunk` tokens at a time.
    pub fn sequence(&mut self, prompt: &[TokenId], limit: usize, chunk: usize) -> SequencePages {
        let weights = WeightsId::default();
        let mut sequence = SequencePages::new(&mut self.pool, weights, prompt, limit).unwrap();
        while sequence.remaining() > 0 {
            let tokens = sequence.remaining().min(chunk);
            assert!(sequence.ensure_pages(&mut self.pool, tokens));
            let adapter = self.adapter.as_ref();
            self.decoder
                .prefill(&mut sequence, tokens, adapter, &mut self.scratch, self.threads)
                .unwrap();
        }
        sequence.cache_last_page(&mut self.pool);
        sequence
    }

    pub fn step(&mut self, batch: &mut [SequencePages]) {
        for member in batch.iter_mut() {
            assert!(member.ensure_pages(&mut self.pool, 1));
        }
        let adapter = self.adapter.as_ref();
        self.decoder.step(batch, adapter, &mut self.scratch, self.threads).unwrap();
    }

    /// The logits after the prompt and after each token of `ids`, decoded in a batch of one, without
    /// the prefix cache.
    pub fn decode_alone(&mut self, prompt: &[TokenId], ids: &[TokenId]) -> Vec<Vec<f32>> {
        let pool = PagePool::new(self.decoder.shape(), POOL_PAGES).without_reuse();
        let pool = std::mem::replace(&mut self.pool, pool);
        let mut batch = [self.sequence(prompt, ids.len() + 1, 64)];
        let mut logits = Vec::new();
        for next in ids.iter().map(Some).chain([None]) {
            self.step(&mut batch);
            logits.push(self.scratch.logits(0).to_vec());
            batch[0].push(next.copied().unwrap_or_default());
        }
        self.pool = pool;
        logits
    }
}
