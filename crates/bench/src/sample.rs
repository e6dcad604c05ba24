//! `hone-bench sample`: the speed of the native sampler, and of its decoder step relative to the
//! machine's memory bandwidth and arithmetic.

use std::sync::Arc;
use std::time::Instant;

use anyhow::Context as _;
use candle_core::{DType, Device};
use clap::Args;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;
use serde_json::{Value, json};

use hone_core::config::Compute;
use hone_core::metrics::Metrics;
use hone_core::types::{PolicyVersion, SamplingParams, TokenId};
use hone_engine::{Codec, Engine as _, GenerateRequest, ModelDir, Priority};
use hone_model::adapter::LoraConfig;
use hone_model::adapter::weights::LoraWeights;
use hone_model::{Model, ModelSpec};
use hone_sampler::{
    AdapterWeights, BatchedEngine, Decoder, PagePool, SamplerConfig, Scratch, SequencePages,
    WeightsId,
};

use super::measure::{Peak, threads_or_cores};
use super::train::Subject;
use hone_config::flags::{compute, count};

/// Minimum bytes read to measure the memory bandwidth.
const READ: usize = 512 << 20;

#[derive(Clone, Debug, Args)]
pub struct SampleOptions {
    /// `embedded`, `100m` or `100m-bf16` (random weights), or a Hugging Face directory
    #[arg(long, value_name = "MODEL", default_value = "embedded")]
    pub model: Subject,
    /// Number of concurrent sequences
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = count(1..=4096))]
    pub batch: usize,
    /// Sequences per prompt
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub group: usize,
    /// Tokens per prompt
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub prompt: usize,
    /// Tokens per completion
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub tokens: usize,
    /// Rank of an adapter on all linear layers; 0 for the base alone
    #[arg(long, value_name = "R", default_value_t = 0)]
    pub rank: usize,
    /// Number of measurements
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub runs: usize,
    /// Number of threads [default: one per core]
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    pub threads: usize,
    /// Arithmetic of products with weights in bf16
    #[arg(long, value_name = "TYPE", default_value = "f32", value_parser = compute())]
    pub compute: Compute,
}

/// Prompt number `number`; `benches/peers/peer.py` uses the same prompts.
pub fn prompt(number: usize, len: usize) -> Vec<TokenId> {
    (0..len).map(|i| 3 + ((number * 31 + i * 7) % 370) as TokenId).collect()
}

/// The measurements: the best of the runs. A step is one of the decoder with logits, without sampling, and its
/// time the median of a run's steps.
pub(crate) fn run(options: &SampleOptions) -> anyhow::Result<Value> {
    let folder;
    let path = match &options.model {
        Subject::Dir(path) => path.clone(),
        other => {
            folder = tempfile::tempdir()?;
            other.write(folder.path())?;
            folder.path().to_owned()
        }
    };
    let dir = ModelDir::open(&path)?;
    let model = options.model.load()?.with_compute(options.compute);
    let threads = threads_or_cores(options.threads);
    let lora = adapter(&model, options.rank)?;
    let whole = SamplerBench::new(&dir, &model, lora.as_ref(), options, threads)?;
    let mut step = StepBench::new(&model, lora.as_ref(), options)?;
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
    let (mut peak, mut memory, mut rates) = (Peak::default(), 0.0_f64, Vec::new());
    let mut seconds = f64::INFINITY;
    let block = vec![1.0_f32; step.weight_bytes / size_of::<f32>()];
    whole.run(0)?;
    for run in 0..options.runs.max(1) {
        // In turns, so that other processes affect all measurements.
        memory = memory.max(pool.install(|| read_rate(&block, threads)));
        pool.install(|| peak.measure(threads));
        seconds = seconds.min(pool.install(|| step.median(options, threads))?);
        let (drawn, elapsed) = whole.run(run + 1)?;
        rates.push(drawn as f64 / elapsed);
    }
    let step_flop = 2.0 * (multiplications(model.spec()) * options.batch) as f64;
    let (by_memory, by_products) =
        (step.weight_bytes as f64 / memory, step_flop / (peak.wall * 1e9));
    Ok(json!({
        "batch": options.batch,
        "prompt": options.prompt,
        "tokens": options.tokens,
        "rank": options.rank,
        "threads": threads,
        "dtype": whole.engine.dtype(),
        "load": super::measure::machine_load(),
        // With prefill, sampling and detokenization.
        "tokens_per_second": rates,
        "best_tokens_per_second": rates.iter().copied().fold(0.0, f64::max),
        "step_seconds": seconds,
        "weight_bytes": step.weight_bytes,
        "memory_bytes_per_second": memory,
        "step_flop": step_flop,
        "product_flop_per_second": peak.wall * 1e9,
        // The resource whose lower bound is longer.
        "bound": if by_memory > by_products { "memory" } else { "products" },
        "share_of_bound": by_memory.max(by_products) / seconds,
    }))
}

/// Multiplications with weights for a token, whose logits are computed.
fn multiplications(spec: &ModelSpec) -> usize {
    let layers = (0..spec.num_layers).flat_map(|layer| spec.linears(layer));
    let linears: usize = layers.map(|(_, (out, inner))| out * inner).sum();
    linears + spec.vocab_size * spec.hidden_size
}

/// A fresh adapter; `None` for rank 0.
fn adapter(model: &Model, rank: usize) -> anyhow::Result<Option<LoraWeights>> {
    if rank == 0 {
        return Ok(None);
    }
    let config = LoraConfig { r: rank, ..LoraConfig::default() };
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    Ok(Some(LoraWeights::fresh(model.spec(), &config, &mut rng, DType::F32, &Device::Cpu)?))
}

/// Memory bandwidth in bytes per second, the best of three measurements.
fn read_rate(block: &[f32], threads: usize) -> f64 {
    let part = block.len().div_ceil(threads).next_multiple_of(64);
    let passes = READ.div_ceil(size_of_val(block).max(1));
    let measure = || {
        let began = Instant::now();
        let sums = block.par_chunks(part).map(|part| {
            let mut sums = [0.0_f32; 64];
            for _ in 0..passes {
                for values in std::hint::black_box(part).chunks_exact(64) {
                    for (sum, value) in sums.iter_mut().zip(values) {
                        *sum += value;
                    }
                }
            }
            sums.iter().sum::<f32>()
        });
        std::hint::black_box(sums.sum::<f32>());
        (passes * size_of_val(block)) as f64 / began.elapsed().as_secs_f64()
    };
    (0..3).map(|_| measure()).fold(0.0, f64::max)
}

/// Measures the whole sampler.
struct SamplerBench {
    engine: Arc<BatchedEngine>,
    runtime: tokio::runtime::Runtime,
    requests: Vec<GenerateRequest>,
    /// Tokens of every completion.
    tokens: usize,
}

impl SamplerBench {
    fn new(
        dir: &ModelDir,
        model: &Model,
        lora: Option<&LoraWeights>,
        options: &SampleOptions,
        threads: usize,
    ) -> anyhow::Result<Self> {
        let codec = Arc::new(Codec::load(dir)?);
        let runtime = tokio::runtime::Builder::new_current_thread().build()?;
        // Completions never end early.
        let stops = codec.stop_ids().iter();
        let params = SamplingParams {
            logit_bias: stops.map(|id| (*id, -1e4)).collect(),
            max_tokens: u32::try_from(options.tokens)?,
            ..SamplingParams::default()
        };
        let group = options.group.max(1);
        let requests = (0..options.batch).map(|i| GenerateRequest {
            prompt_ids: prompt(i / group, options.prompt),
            params: SamplingParams { seed: i as u64, ..params.clone() },
            stop: Vec::new(),
            top_logprobs: 0,
            priority: Priority::Shadow,
            owner: None,
            version: None,
            grammar: None,
            scored: Vec::new(),
        });
        let page = 16;
        let room = options.batch
            * (options.tokens.next_multiple_of(page) + options.prompt.next_multiple_of(page));
        let config = SamplerConfig {
            context: dir.context(),
            slots: options.batch,
            max_batch_tokens: 2 * room,
            threads,
            ..SamplerConfig::default()
        };
        let metrics = Arc::new(Metrics::new()?);
        let requests = requests.collect();
        let engine = BatchedEngine::start(model, codec, config, Arc::new(|| false), metrics)?;
        engine.publish(PolicyVersion(1), lora)?;
        Ok(Self { requests, engine, runtime, tokens: options.tokens })
    }

    /// Tokens and seconds of one batch; `run` varies the prompts.
    fn run(&self, run: usize) -> anyhow::Result<(usize, f64)> {
        let began = Instant::now();
        let drawn: usize = self.runtime.block_on(async {
            let mut tasks = tokio::task::JoinSet::new();
            for mut request in self.requests.clone() {
                // Avoids cached prompts of the previous run.
                if let Some(first) = request.prompt_ids.first_mut() {
                    *first = 3 + (run % 300) as TokenId;
                }
                let engine = Arc::clone(&self.engine);
                tasks.spawn(async move { engine.generate(request).await?.collect().await });
            }
            let mut drawn = 0;
            while let Some(completion) = tasks.join_next().await {
                drawn += completion??.tokens.len();
            }
            anyhow::Ok(drawn)
        })?;
        let seconds = began.elapsed().as_secs_f64();
        let wanted = self.requests.len() * self.tokens;
        anyhow::ensure!(drawn == wanted, "{drawn} tokens were drawn instead of {wanted}");
        Ok((drawn, seconds))
    }
}

/// Measures the decoder alone.
struct StepBench {
    decoder: Decoder,
    factors: Option<AdapterWeights>,
    scratch: Scratch,
    weight_bytes: usize,
}

impl StepBench {
    fn new(
        model: &Model,
        lora: Option<&LoraWeights>,
        options: &SampleOptions,
    ) -> anyhow::Result<Self> {
        let mut decoder = Decoder::new(model)?;
        decoder.reserve_positions(options.prompt + options.tokens)?;
        let factors = lora.map(|lora| AdapterWeights::new(model.spec(), lora)).transpose()?;
        let scratch = Scratch::new(model.spec(), options.batch.max(64), options.batch);
        let weight_bytes = decoder.weight_bytes();
        Ok(Self { decoder, factors, scratch, weight_bytes })
    }

    /// Median seconds of the steps of one batch.
    fn median(&mut self, options: &SampleOptions, threads: usize) -> anyhow::Result<f64> {
        let pages = options.batch * (options.tokens / 16 + options.prompt / 16 + 4);
        let mut pool = PagePool::new(self.decoder.shape(), pages);
        let no_room = || anyhow::anyhow!("the cache is too small");
        let factors = self.factors.as_ref();
        let mut rows: Vec<SequencePages> = Vec::new();
        for i in 0..options.batch {
            let ids = prompt(i / options.group.max(1), options.prompt);
            // All but the first sequence of a group find its prompt in the prefix cache.
            let mut sequence =
                SequencePages::new(&mut pool, WeightsId::default(), &ids, options.tokens)
                    .with_context(no_room)?;
            while sequence.remaining() > 0 {
                let tokens = sequence.remaining().min(64);
                anyhow::ensure!(sequence.ensure_pages(&mut pool, tokens), "the cache is too small");
                self.decoder.prefill(&mut sequence, tokens, factors, &mut self.scratch, threads)?;
            }
            sequence.cache_last_page(&mut pool);
            rows.push(sequence);
        }
        let mut times = Vec::new();
        for step in 0..options.tokens {
            for row in &mut rows {
                anyhow::ensure!(row.ensure_pages(&mut pool, 1), "the cache is too small");
            }
            let began = Instant::now();
            self.decoder.step(&mut rows, factors, &mut self.scratch, threads)?;
            times.push(began.elapsed().as_secs_f64());
            rows.iter_mut().for_each(|row| row.push(3 + (step % 100) as TokenId));
        }
        times.sort_by(f64::total_cmp);
        times.get(times.len() / 2).copied().context("no step was timed")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_embedded_model_is_measured() {
        let flags = "--batch 9 --group 4 --prompt 18 --tokens 5 --rank 2 --runs 1 --threads 2";
        let flags: Vec<&str> = flags.split(' ').collect();
        let options: SampleOptions = crate::measure::tests::options(&flags);
        let report = run(&options).unwrap();
        let number = |name: &str| report[name].as_f64().unwrap();
        let (rate, share) = (number("best_tokens_per_second"), number("share_of_bound"));
        assert!(rate > 0.0 && share > 0.0, "{report}");
        // All weights except the embedding, which is not tied to the head.
        let spec = options.model.load().unwrap().spec().clone();
        let count = |shapes: &[(String, Vec<usize>)]| -> usize {
            let matrices = shapes.iter().filter(|(_, shape)| shape.len() == 2);
            matrices.map(|(_, shape)| shape.iter().product::<usize>()).sum()
        };
        let embedding = spec.vocab_size * spec.hidden_size;
        assert_eq!(report["weight_bytes"], 4 * (count(&spec.weight_shapes()) - embedding));
        assert_eq!(number("step_flop"), 2.0 * 9.0 * number("weight_bytes") / 4.0);
    }
}
