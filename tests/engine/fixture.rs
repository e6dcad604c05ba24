//! An engine and requests for it.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use candle_core::{Device, Tensor};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use hone_core::metrics::Metrics;
use hone_core::types::{Message, PolicyVersion, Role, SamplingParams};
use hone_engine::{
    Completion, Engine, EngineConfig, EngineError, EngineLoad, GenerateRequest, ModelDir, Priority,
    Publisher,
};
use hone_mistral::MistralEngine;

/// Runs one test at a time, because tests measure the process.
static ALONE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

pub struct Fixture {
    pub engine: Arc<MistralEngine>,
    pub metrics: Arc<Metrics>,
    pub dir: ModelDir,
    _alone: tokio::sync::MutexGuard<'static, ()>,
    pub files: tempfile::TempDir,
}

pub fn here(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

pub async fn start_model(model: &str, replicas: usize, queue: usize) -> Fixture {
    let alone = ALONE.lock().await;
    let files = tempfile::tempdir().unwrap();
    let dir = ModelDir::open(&here(model)).unwrap();
    let normalized = dir.write_normalized(files.path()).unwrap();
    let metrics = Arc::new(Metrics::new().unwrap());
    let start = Instant::now();
    let config = EngineConfig { replicas, queue };
    let engine = MistralEngine::start(&dir, &normalized, &config, Arc::clone(&metrics)).unwrap();
    println!("{model}: {replicas} replicas per color started in {:?}", start.elapsed());
    Fixture { engine, metrics, dir, _alone: alone, files }
}

pub async fn start(replicas: usize, queue: usize) -> Fixture {
    start_model("models/embedded", replicas, queue).await
}

pub fn ask(text: &str) -> Vec<Message> {
    vec![Message { role: Role::User, content: text.to_owned() }]
}

impl Fixture {
    pub fn request(&self, text: &str, seed: u64, priority: Priority) -> GenerateRequest {
        GenerateRequest {
            prompt_ids: self.engine.codec().prompt(&ask(text)).unwrap(),
            params: SamplingParams { seed, max_tokens: 48, ..Default::default() },
            stop: Vec::new(),
            top_logprobs: 0,
            priority,
            version: None,
        }
    }

    /// A request that ends only when it is dropped or the context is full.
    pub fn endless(&self, priority: Priority) -> GenerateRequest {
        let mut request = self.request("What is 1 plus 1?", 5, priority);
        request.params.max_tokens = u32::MAX;
        let never = self.engine.codec().stop_ids().iter().map(|id| (*id, -1e9));
        request.params.logit_bias = never.collect();
        request
    }

    pub async fn run(&self, request: GenerateRequest) -> Result<Completion, EngineError> {
        self.engine.generate(request).await?.collect().await
    }

    /// Waits until `wanted` returns true for the load, for at most ten seconds.
    pub async fn until(&self, what: &str, wanted: impl Fn(EngineLoad) -> bool) {
        let start = Instant::now();
        while !wanted(self.engine.load()) {
            assert!(start.elapsed() < Duration::from_secs(10), "{what}: {:?}", self.engine.load());
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    pub async fn publish(&self, version: u64, adapter: Option<&Path>) {
        self.engine.stage(PolicyVersion(version), adapter).await.unwrap();
        self.engine.activate().await.unwrap();
    }

    /// A PEFT directory with random weights for all seven linear layers of every block.
    pub fn adapter(&self, seed: u64, rename: impl Fn(String) -> String) -> PathBuf {
        let size = |key: &str| self.dir.config.get(key).unwrap().as_u64().unwrap() as usize;
        let (hidden, inner) = (size("hidden_size"), size("intermediate_size"));
        let kv = hidden / size("num_attention_heads") * size("num_key_value_heads");
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut tensors = HashMap::new();
        let mut add = |name: String, rows: usize, columns: usize| {
            let values = (0..rows * columns).map(|_| random.random_range(-0.2_f32..0.2));
            let values: Vec<f32> = values.collect();
            let tensor = Tensor::from_vec(values, (rows, columns), &Device::Cpu).unwrap();
            tensors.insert(name, tensor);
        };
        for layer in 0..size("num_hidden_layers") {
            for (module, input, output) in [
                ("self_attn.q_proj", hidden, hidden),
                ("self_attn.k_proj", hidden, kv),
                ("self_attn.v_proj", hidden, kv),
                ("self_attn.o_proj", hidden, hidden),
                ("mlp.gate_proj", hidden, inner),
                ("mlp.up_proj", hidden, inner),
                ("mlp.down_proj", inner, hidden),
            ] {
                let name = format!("base_model.model.model.layers.{layer}.{module}");
                add(rename(format!("{name}.lora_A.weight")), 4, input);
                add(rename(format!("{name}.lora_B.weight")), output, 4);
            }
        }
        let dir = self.files.path().join(format!("adapter-{seed}"));
        std::fs::create_dir_all(&dir).unwrap();
        candle_core::safetensors::save(&tensors, dir.join("adapter_model.safetensors")).unwrap();
        let config = r#"{"peft_type":"LORA","r":4,"lora_alpha":8,"target_modules":["q_proj"]}"#;
        std::fs::write(dir.join("adapter_config.json"), config).unwrap();
        dir
    }
}
