//! Sampler and trainer agree: what the real engine records is what the trainer recomputes, for the
//! base, for a trained adapter, and for an adapter on a few modules only.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "tests may fail loudly and say by how much"
)]

use std::path::Path;
use std::sync::Arc;

use hone::config::{EngineConfig, LinearKind, LoraConfig, Modules, TrainConfig};
use hone::engine::{
    Completion, Engine, GenerateRequest, MistralEngine, ModelDir, Priority, Publisher,
};
use hone::telemetry::Metrics;
use hone::train::{Learner, TrainSample};
use hone::types::{Message, PolicyVersion, Role, SamplingParams, TokenId};

/// Greatest difference that is put down to the order of sums in 32 bits.
const TOLERANCE: f32 = 1e-4;

struct Pair {
    engine: Arc<MistralEngine>,
    learner: Learner,
    files: tempfile::TempDir,
}

impl Pair {
    fn new(model: &str, modules: &[LinearKind]) -> Self {
        let files = tempfile::tempdir().unwrap();
        let dir = ModelDir::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join(model)).unwrap();
        let normalised = dir.normalised(files.path()).unwrap();
        let metrics = Arc::new(Metrics::new().unwrap());
        let config = EngineConfig { replicas: 1, queue: 8 };
        let engine = MistralEngine::start(&dir, &normalised, &config, metrics).unwrap();
        let names = modules.iter().map(|kind| kind.as_str().to_owned()).collect();
        let target_modules = Modules::Names(names);
        let lora = LoraConfig { r: 4, target_modules, ..LoraConfig::default() };
        let config = TrainConfig { lora, learning_rate: 0.02, ..TrainConfig::default() };
        Self { engine, learner: Learner::new(&dir, &config).unwrap(), files }
    }

    fn prompt(&self, text: &str) -> Vec<TokenId> {
        let message = Message { role: Role::User, content: text.to_owned() };
        self.engine.codec().prompt(&[message]).unwrap()
    }

    async fn sample(&self, prompt: &[TokenId], seed: u64, temperature: f32) -> Completion {
        let params = SamplingParams { seed, temperature, max_tokens: 40, ..Default::default() };
        let request = GenerateRequest {
            prompt_ids: prompt.to_vec(),
            params,
            stop: Vec::new(),
            top_logprobs: 0,
            priority: Priority::Live,
        };
        self.engine.generate(request).await.unwrap().collect().await.unwrap()
    }

    /// Samples at several temperatures; the greatest difference, and what was sampled.
    async fn compare(&self) -> (f32, Vec<TrainSample>) {
        let (mut greatest, mut samples) = (0.0_f32, Vec::new());
        for seed in 0..12 {
            let prompt = self.prompt(&format!("What is {seed} + 17?"));
            let temperature = [1.0, 0.7, 1.5][seed as usize % 3];
            let completion = self.sample(&prompt, seed, temperature).await;
            let ids: Vec<TokenId> = completion.tokens.iter().map(|t| t.id).collect();
            let logprobs: Vec<f32> = completion.tokens.iter().map(|t| t.logprob).collect();
            let scored = self.learner.score(&prompt, &ids, temperature).unwrap();
            assert_eq!(scored.len(), logprobs.len());
            for (served, trained) in logprobs.iter().zip(&scored) {
                greatest = greatest.max((served - trained).abs());
            }
            let advantage = if seed % 2 == 0 { 1.0 } else { -1.0 };
            let version = completion.version.0;
            samples.push(TrainSample {
                prompt_ids: prompt,
                ids,
                logprobs,
                temperature,
                advantage,
                version,
                truncated: false,
            });
        }
        (greatest, samples)
    }
}

async fn agrees(model: &str, modules: &[LinearKind]) {
    let mut pair = Pair::new(model, modules);
    let (base, mut samples) = pair.compare().await;
    println!("{model}, {} modules, base: {base:.1e}", modules.len());
    assert!(base < TOLERANCE, "{base}");
    for version in 1..=2 {
        let stats = pair.learner.step(&samples, version - 1, 40).unwrap();
        assert_eq!((stats.skipped, stats.refused), (None, Vec::new()));
        let dir = pair.files.path().join(format!("adapter-{version}"));
        std::fs::create_dir(&dir).unwrap();
        pair.learner.write_adapter(&dir, "model").unwrap();
        pair.engine.stage(PolicyVersion(version), Some(&dir)).await.unwrap();
        pair.engine.activate().await.unwrap();
        let before = samples;
        let (difference, after) = pair.compare().await;
        println!("{model}, {} modules, version {version}: {difference:.1e}", modules.len());
        assert!(difference < TOLERANCE, "{difference}");
        // A published version that changes nothing would agree too.
        assert!(before.iter().zip(&after).any(|(b, a)| b.logprobs != a.logprobs));
        samples = after;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_embedded_model_with_every_module() {
    agrees("models/embedded", &LinearKind::ALL).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_embedded_model_with_two_modules() {
    agrees("models/embedded", &[LinearKind::QProj, LinearKind::DownProj]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_from_transformers() {
    agrees("tests/fixtures/qwen2-tiny", &LinearKind::ALL).await;
}
