//! A step of the native sampler allocates nothing once its buffers have grown.
#![expect(clippy::unwrap_used, reason = "tests may fail loudly")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{DType, Device};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use hone_engine::ModelDir;
use hone_model::adapter::weights::LoraWeights;
use hone_model::adapter::{BaseDtype, LoraConfig};
use hone_model::{Model, ModelSpec};
use hone_sampler::{AdapterWeights, Decoder, PagePool, Scratch, SequencePages, WeightsId};

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

struct Counting;

// SAFETY: every call is forwarded unchanged to the system allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller upholds the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller upholds the contract of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Decodes three batches of 24 sequences of 40 tokens; returns the allocations of the last.
fn rounds(decoder: &Decoder, spec: &ModelSpec, factors: &AdapterWeights, threads: usize) -> usize {
    let mut pool = PagePool::new(decoder.shape(), 200);
    let mut scratch = Scratch::new(spec, 32, 32);
    let prompt: Vec<u32> = (3..30).collect();
    let mut last = 0;
    for _ in 0..3 {
        let mut rows: Vec<SequencePages> = Vec::new();
        for _ in 0..24 {
            let new = SequencePages::new(&mut pool, WeightsId::default(), &prompt, 40);
            let mut sequence = new.unwrap();
            while sequence.remaining() > 0 {
                let tokens = sequence.remaining();
                assert!(rows.is_empty(), "the others share the first one's prompt");
                assert!(sequence.ensure_pages(&mut pool, tokens));
                decoder
                    .prefill(&mut sequence, tokens, Some(factors), &mut scratch, threads)
                    .unwrap();
                sequence.cache_last_page(&mut pool);
            }
            rows.push(sequence);
        }
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        for step in 0..40 {
            for row in &mut rows {
                if step > 0 {
                    row.push(3 + step);
                }
                assert!(row.ensure_pages(&mut pool, 1));
            }
            decoder.step(&mut rows, Some(factors), &mut scratch, threads).unwrap();
        }
        last = ALLOCATIONS.load(Ordering::Relaxed) - before;
        rows.into_iter().for_each(|row| row.free(&mut pool));
    }
    last
}

#[test]
fn a_decoder_step_does_not_allocate() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/embedded");
    let dir = ModelDir::open(&dir).unwrap();
    let spec = ModelSpec::from_config(&dir.config).unwrap();
    let model = Model::load(spec.clone(), &dir.weights, BaseDtype::Float32, &Device::Cpu).unwrap();
    let config = LoraConfig { r: 4, ..LoraConfig::default() };
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let lora = LoraWeights::fresh(&spec, &config, &mut rng, DType::F32, &Device::Cpu).unwrap();
    let factors = AdapterWeights::new(&spec, &lora).unwrap();
    let mut decoder = Decoder::new(&model).unwrap();
    decoder.reserve_positions(80).unwrap();
    assert_eq!(rounds(&decoder, &spec, &factors, 1), 0);
    // With more threads, only the pool's queue may grow occasionally.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
    let found = pool.install(|| rounds(&decoder, &spec, &factors, 2));
    assert!(found < 40, "{found} allocations in 40 steps of 24 tokens");
}
