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
    Codec, Completion, Engine, EngineBackend, EngineConfig, EngineError, EngineLoad,
    GenerateRequest, ModelDir, Priority, Publisher,
};
use hone_mistral::MistralEngine;
use hone_model::adapter::BaseDtype;
use hone_model::{Model, ModelSpec};
use hone_sampler::{BatchedEngine, BatchedPublisher, SamplerConfig};

/// Runs one test at a time, because tests measure the process.
static ALONE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

/// Closes an engine; the argument is whether live sequences are cancelled.
type CloseEngine = Box<dyn Fn(bool) + Send + Sync>;

pub struct Fixture {
    pub engine: Arc<dyn Engine>,
    pub publisher: Arc<dyn Publisher>,
    close: CloseEngine,
    pub metrics: Arc<Metrics>,
    pub dir: ModelDir,
    _alone: tokio::sync::MutexGuard<'static, ()>,
    pub files: tempfile::TempDir,
}

pub fn here(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// An engine with `slots` slots, which mistral.rs has for each of two versions.
pub async fn start_model(
    backend: EngineBackend,
    model: &str,
    slots: usize,
    queue: usize,
) -> Fixture {
    let alone = ALONE.lock().await;
    let files = tempfile::tempdir().unwrap();
    let dir = ModelDir::open(&here(model)).unwrap();
    let metrics = Arc::new(Metrics::new().unwrap());
    let start = Instant::now();
    let (engine, publisher, close): (Arc<dyn Engine>, Arc<dyn Publisher>, CloseEngine) =
        match backend {
            EngineBackend::Mistralrs => {
                let config = EngineConfig { replicas: slots, queue, ..EngineConfig::default() };
                let metrics = Arc::clone(&metrics);
                let engine = MistralEngine::start(&dir, files.path(), &config, metrics).unwrap();
                let closing = Arc::clone(&engine);
                let close: CloseEngine = Box::new(move |cancel| closing.close(cancel));
                (engine.clone(), engine, close)
            }
            EngineBackend::Native => {
                let engine = native(&dir, slots, queue, Arc::clone(&metrics));
                let closing = Arc::clone(&engine);
                let close: CloseEngine = Box::new(move |cancel| closing.close(cancel));
                (engine.clone(), Arc::new(BatchedPublisher::new(None, engine)), close)
            }
        };
    println!("{model}: {backend:?} with {slots} slots started in {:?}", start.elapsed());
    Fixture { engine, publisher, close, metrics, dir, _alone: alone, files }
}

fn native(dir: &ModelDir, slots: usize, queue: usize, metrics: Arc<Metrics>) -> Arc<BatchedEngine> {
    let spec = ModelSpec::from_config(&dir.config).unwrap();
    let base = Model::load(spec, &dir.weights, BaseDtype::Auto, &Device::Cpu).unwrap();
    let config = SamplerConfig {
        name: dir.name.clone(),
        context: dir.context(),
        slots,
        queue,
        serves_clients: true,
        ..SamplerConfig::default()
    };
    let codec = Arc::new(Codec::load(dir).unwrap());
    BatchedEngine::start(&base, codec, config, Arc::new(|| false), metrics).unwrap()
}

pub async fn start(backend: EngineBackend, slots: usize, queue: usize) -> Fixture {
    start_model(backend, "models/embedded", slots, queue).await
}

pub fn ask(text: &str) -> Vec<Message> {
    vec![Message::new(Role::User, text)]
}

impl Fixture {
    pub fn request(&self, text: &str, seed: u64, priority: Priority) -> GenerateRequest {
        let params = SamplingParams { seed, max_tokens: 48, ..Default::default() };
        GenerateRequest::new(self.engine.codec().prompt(&ask(text)).unwrap(), params, priority)
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
        self.publisher.stage(PolicyVersion(version), adapter).await.unwrap();
        self.publisher.activate().await.unwrap();
    }

    pub fn close(&self, cancel_live: bool) {
        (self.close)(cancel_live);
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
        let config = r#"{"peft_type":"LORA","r":4,"lora_alpha":8,"target_modules":"all-linear"}"#;
        std::fs::write(dir.join("adapter_config.json"), config).unwrap();
        dir
    }
}
