//! `hone-bench sample`: the speed of the native sampler, and of its decoder step relative to the
//! machine's memory bandwidth and arithmetic.

use std::sync::Arc;
use std::time::Instant;

use anyhow::Context as _;
use candle_core::{DType, Device};
use clap::Args;
use futures::future::try_join_all;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;
use serde_json::{Value, json};

use hone_core::config::Compute;
use hone_core::metrics::Metrics;
use hone_core::types::{PolicyVersion, SamplingParams, TokenId};
use hone_engine::{Codec, Engine, GenerateRequest, ModelDir, Priority};
use hone_model::Model;
use hone_model::adapter::LoraConfig;
use hone_model::adapter::weights::LoraWeights;
use hone_model::kernels::matmul::{Matrix, product};
use hone_model::kernels::parallel::with_threads;
use hone_sampler::{
    BatchedEngine, Decoder, PagePool, PolicyEngine, SamplerConfig, Scratch, SequencePages,
    WeightsId,
};

use super::measure::{machine_load, quantiles, threads_or_cores};
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
    /// Number of measurements
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub runs: usize,
    /// Number of threads [default: one per core]
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    pub threads: usize,
    /// Arithmetic of products with weights in bf16
    #[arg(long, value_name = "TYPE", default_value = "f32", value_parser = compute())]
    pub compute: Compute,
    /// Compares a batch of so many policies, each with its own adapter, with the same load on one [default: no]
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    pub policies: u32,
    /// Rank of the adapters of policies
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub rank: usize,
}

/// Prompt number `number`; `benches/peers/peer.py` uses the same prompts.
pub fn prompt(number: usize, len: usize) -> Vec<TokenId> {
    (0..len).map(|i| 3 + ((number * 31 + i * 7) % 370) as TokenId).collect()
}

/// The measurements: the best of the runs. A step is one of the decoder with logits, without sampling, and its
/// time the median of a run's steps.
pub(crate) fn run(options: &SampleOptions) -> anyhow::Result<Value> {
    let (dir, _folder) = options.model.open()?;
    let model = options.model.load()?.with_compute(options.compute);
    let threads = threads_or_cores(options.threads);
    let whole = SamplerBench::new(&dir, &model, options, threads)?;
    let mut step = StepBench::new(&model, options)?;
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
    let (mut products, mut memory, mut rates) = (0.0_f64, 0.0_f64, Vec::new());
    let mut seconds = f64::INFINITY;
    let block = vec![1.0_f32; step.weight_bytes / size_of::<f32>()];
    whole.run(0, &[])?;
    for run in 0..options.runs.max(1) {
        // In turns, so that other processes affect all measurements.
        memory = memory.max(pool.install(|| read_rate(&block, threads)));
        products = products.max(pool.install(|| product_rate(threads)));
        seconds = seconds.min(pool.install(|| step.median(options, threads))?);
        rates.push(whole.run(run + 1, &[])?);
    }
    let policies = if options.policies > 0 {
        compare_policies(&dir, &model, options, threads)?
    } else {
        Value::Null
    };
    // Multiplications and additions with weights for a token, whose logits are computed.
    let spec = model.spec();
    let layers = (0..spec.num_layers).flat_map(|layer| spec.linears(layer));
    let linears: usize = layers.map(|(_, (out, inner))| out * inner).sum();
    let step_flop = 2.0 * ((linears + spec.vocab_size * spec.hidden_size) * options.batch) as f64;
    let (by_memory, by_products) = (step.weight_bytes as f64 / memory, step_flop / products);
    Ok(json!({
        "batch": options.batch,
        "prompt": options.prompt,
        "tokens": options.tokens,
        "threads": threads,
        "dtype": whole.engine.dtype(),
        "load": machine_load(),
        // With prefill, sampling and detokenization.
        "tokens_per_second": rates,
        "best_tokens_per_second": rates.iter().copied().fold(0.0, f64::max),
        "step_seconds": seconds,
        "weight_bytes": step.weight_bytes,
        "memory_bytes_per_second": memory,
        "step_flop": step_flop,
        "product_flop_per_second": products,
        // The resource whose lower bound is longer.
        "bound": if by_memory > by_products { "memory" } else { "products" },
        "share_of_bound": by_memory.max(by_products) / seconds,
        "policies": policies,
    }))
}

/// The throughput of many policies in one batch, relative to the same load on one: the median of the ratios of runs in
/// turns. Each sequence has a prompt of its own, because policies share no prefixes.
fn compare_policies(
    dir: &ModelDir,
    model: &Model,
    options: &SampleOptions,
    threads: usize,
) -> anyhow::Result<Value> {
    let options = SampleOptions { group: 1, ..options.clone() };
    let bench = SamplerBench::new(dir, model, &options, threads)?;
    let config = LoraConfig { r: options.rank, ..LoraConfig::default() };
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let mut policies = Vec::new();
    for number in 1..=options.policies + 1 {
        let (spec, device) = (model.spec(), Device::Cpu);
        let lora = LoraWeights::fresh(spec, &config, &mut rng, DType::F32, &device)?;
        let policy = PolicyEngine::new(Arc::clone(&bench.engine), number);
        policy.publish(PolicyVersion(u64::from(number) << 32 | 1), Some(&lora))?;
        policies.push(policy);
    }
    let (one, many) = policies.split_at(1);
    let (mut rates, mut ratios) = ([0.0_f64; 2], Vec::new());
    bench.run(0, many)?;
    for run in 0..options.runs.max(1) {
        let found = [bench.run(run + 1, one)?, bench.run(run + 1, many)?];
        rates.iter_mut().zip(found).for_each(|(best, rate)| *best = best.max(rate));
        ratios.push(found[1] / found[0]);
    }
    Ok(json!({
        "count": options.policies,
        "rank": options.rank,
        "best_tokens_per_second": rates[1],
        "best_tokens_per_second_of_one": rates[0],
        "ratio": quantiles(ratios)[0],
    }))
}

/// Operations per second of large f32 products on `threads` threads of the current pool.
fn product_rate(threads: usize) -> f64 {
    const SIDE: usize = 1536;
    const PRODUCTS: usize = 8;
    let values: Vec<f32> = (0..SIDE * SIDE).map(|i| (i as f32).sin()).collect();
    let x = Matrix::new(&values, SIDE, SIDE);
    let began = Instant::now();
    for _ in 0..PRODUCTS {
        drop(with_threads(threads, || std::hint::black_box(product(1.0, x, x.t()))));
    }
    2.0 * (SIDE as f64).powi(3) * PRODUCTS as f64 / began.elapsed().as_secs_f64()
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
        let requests = (0..options.batch).map(|i| {
            let params = SamplingParams { seed: i as u64, ..params.clone() };
            let ids = prompt(i / options.group.max(1), options.prompt);
            GenerateRequest::new(ids, params, Priority::Shadow)
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
        engine.publish(PolicyVersion(1), None)?;
        Ok(Self { requests, engine, runtime, tokens: options.tokens })
    }

    /// Tokens per second of one batch of the engine's own policy, or of these in turn; `run` varies the prompts.
    fn run(&self, run: usize, policies: &[PolicyEngine]) -> anyhow::Result<f64> {
        let began = Instant::now();
        let drawing = self.requests.iter().enumerate().map(async |(i, request)| {
            let policy = policies.get(i % policies.len().max(1));
            let engine = policy.map_or(&*self.engine as &dyn Engine, |policy| policy);
            let mut request = request.clone();
            // Avoids cached prompts of the previous run.
            if let Some(first) = request.prompt_ids.first_mut() {
                *first = 3 + (run % 300) as TokenId;
            }
            anyhow::Ok(engine.generate(request).await?.collect().await?.tokens.len())
        });
        let drawn: usize = self.runtime.block_on(try_join_all(drawing))?.into_iter().sum();
        let seconds = began.elapsed().as_secs_f64();
        let wanted = self.requests.len() * self.tokens;
        anyhow::ensure!(drawn == wanted, "{drawn} tokens were drawn instead of {wanted}");
        Ok(drawn as f64 / seconds)
    }
}

const NO_ROOM: &str = "the cache is too small";

/// Measures the decoder alone.
struct StepBench {
    decoder: Decoder,
    scratch: Scratch,
    weight_bytes: usize,
}

impl StepBench {
    fn new(model: &Model, options: &SampleOptions) -> anyhow::Result<Self> {
        let mut decoder = Decoder::new(model)?;
        decoder.reserve_positions(options.prompt + options.tokens)?;
        let scratch = Scratch::new(model.spec(), options.batch.max(64), options.batch);
        Ok(Self { weight_bytes: decoder.weight_bytes(), decoder, scratch })
    }

    /// Median seconds of the steps of one batch.
    fn median(&mut self, options: &SampleOptions, threads: usize) -> anyhow::Result<f64> {
        let pages = options.batch * (options.tokens / 16 + options.prompt / 16 + 4);
        let mut pool = PagePool::new(self.decoder.shape(), pages);
        let mut rows: Vec<SequencePages> = Vec::new();
        for i in 0..options.batch {
            let ids = prompt(i / options.group.max(1), options.prompt);
            // All but the first sequence of a group find its prompt in the prefix cache.
            let mut sequence =
                SequencePages::new(&mut pool, WeightsId::default(), &ids, options.tokens)
                    .context(NO_ROOM)?;
            while sequence.remaining() > 0 {
                let tokens = sequence.remaining().min(64);
                anyhow::ensure!(sequence.ensure_pages(&mut pool, tokens), NO_ROOM);
                self.decoder.prefill(&mut sequence, tokens, None, &mut self.scratch, threads)?;
            }
            sequence.cache_last_page(&mut pool);
            rows.push(sequence);
        }
        let mut times = Vec::new();
        for step in 0..options.tokens {
            for row in &mut rows {
                anyhow::ensure!(row.ensure_pages(&mut pool, 1), NO_ROOM);
            }
            let began = Instant::now();
            self.decoder.step(&mut rows, None, &mut self.scratch, threads)?;
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
        let flags = "--batch 9 --group 4 --prompt 18 --tokens 5 --runs 1 --threads 2 --policies 4";
        let flags: Vec<&str> = flags.split(' ').collect();
        let options: SampleOptions = crate::measure::tests::options(&flags);
        let report = run(&options).unwrap();
        let number = |name: &str| report[name].as_f64().unwrap();
        let (rate, share) = (number("best_tokens_per_second"), number("share_of_bound"));
        assert!(rate > 0.0 && share > 0.0, "{report}");
        let policies = &report["policies"];
        assert_eq!(policies["count"], 4);
        assert!(policies["ratio"].as_f64().unwrap() > 0.0, "{report}");
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
