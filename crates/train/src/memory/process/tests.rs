//! The plan of a process against shapes that were computed separately.

use std::sync::LazyLock;

use candle_core::DType;
use proptest::prelude::*;

use hone_model::adapter::BaseDtype;

use super::*;

/// The shape of SmolLM2-135M.
static SMOLLM2: LazyLock<ModelSpec> = LazyLock::new(|| {
    ModelSpec::from_config(&serde_json::json!({
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "num_attention_heads": 9,
        "num_key_value_heads": 3, "num_hidden_layers": 30, "intermediate_size": 1536,
        "tie_word_embeddings": true,
    }))
    .unwrap()
});

static DEFAULTS: LazyLock<TrainConfig> = LazyLock::new(TrainConfig::default);

/// `hone serve` with mistral.rs, the native engine for rollouts, and 16-bit weight files.
fn serve() -> ProcessSetup {
    ProcessSetup {
        trains: true,
        replicas: 1,
        judge_replicas: 0,
        sequences: 64,
        sampler_buffers: 18 << 20,
        cache_positions: 32_768,
        versions: 1,
        kept_versions: 1,
        weight_files: 269_062_896,
        tokenizer_file: 2_000_000,
        ledger_cache: 64 << 20,
    }
}

fn planner(setup: ProcessSetup) -> MemoryPlanner<'static> {
    let base = BaseMemory::new(&SMOLLM2, BaseDtype::Auto, |_| Ok(DType::BF16)).unwrap();
    MemoryPlanner { spec: &SMOLLM2, base, config: &DEFAULTS, threads: 2, context: 8192, setup }
}

/// The plan for the usual shards.
fn usual(setup: ProcessSetup) -> ProcessMemory {
    planner(setup).plan(0)
}

fn bytes(plan: &ProcessMemory, name: &str) -> usize {
    let mut found = plan.parts.iter().filter(|part| part.part == name);
    let part = found.next().unwrap_or_else(|| panic!("no part {name}: {plan}"));
    assert!(found.next().is_none(), "{name} is not unique");
    part.bytes
}

#[test]
fn the_parts_of_a_daemon_are_those_of_the_shapes() {
    let plan = planner(serve()).plan(6000);
    // Embedding, 30 layers of attention, MLP and two norms, and the final norm.
    let layer = 2 * 576 * 576 + 2 * 192 * 576 + 3 * 576 * 1536 + 2 * 576;
    let values = 49_152 * 576 + 30 * layer + 576;
    assert_eq!(values, 134_515_008);
    assert_eq!(bytes(&plan, "serving weights"), 2 * 4 * values);
    assert_eq!(bytes(&plan, "staged weights"), 4 * values);
    // The norms are in 32 bits.
    assert_eq!(bytes(&plan, "base weights"), 2 * values + 2 * 61 * 576);
    // Keys and values of 30 layers, 3 heads of 64.
    assert_eq!(bytes(&plan, "sampler cache"), 32_768 * 46_080);
    // The mask, the cache of 6,144 positions twice, and a layer's values.
    let layer = (3 * 576 + 3 * 1536) * 6000 * 4;
    assert_eq!(bytes(&plan, "conversations"), 4 * 6000 * 6000 + 2 * 6144 * 46_080 + layer);
    assert_eq!(bytes(&plan, "layer inputs"), 31 * 576 * 6000 * 4);
    // 6 layers of 5,305 values per token fit into 768 MiB.
    assert_eq!(bytes(&plan, "kept activations"), 6 * 5305 * 6000 * 4);
    // The gradients of one layer: two hidden states, and those of attention. 170 rows of logits, which are
    // computed at once, take less.
    let work = 2 * 576 + 3 * 576 + (576 + 2 * 192) + 576 + (576 + 192);
    assert_eq!(bytes(&plan, "one layer or logits"), work * 6000 * 4);
    let usual = usual(serve());
    assert_eq!(bytes(&usual, "one layer or logits"), 170 * 49_152 * 4);
    // If no layer is kept, one is recomputed beside its gradients.
    let config = &TrainConfig { recompute: Recompute::Always, ..DEFAULTS.clone() };
    let recomputed = MemoryPlanner { config, ..planner(serve()) }.plan(6000);
    assert_eq!(bytes(&recomputed, "one layer or logits"), (5305 + work) * 6000 * 4);
    assert_eq!(bytes(&plan, "mapped files"), 269_062_896);
    // r 16 for seven modules in 30 layers, with two moments; three adapters from the start on.
    let adapter = 4 * 16 * 30 * (2 * 1152 + 2 * 768 + 3 * 2112);
    assert_eq!(bytes(&plan, "optimizer moments"), 2 * adapter);
    assert_eq!(bytes(&plan, "adapter"), 3 * adapter);
    assert_eq!(bytes(&plan, "staged adapter"), 3 * adapter);
    assert_eq!(bytes(&plan, "gradients"), 2 * adapter);
}

#[test]
fn the_peak_adds_the_parts_that_overlap() {
    let planner = planner(serve());
    for tokens in [0, 1024, 8192] {
        let plan = planner.plan(tokens);
        let all: usize = plan.parts.iter().map(|part| part.bytes).sum();
        assert_eq!(all, plan.start + plan.generation + plan.step + plan.staging);
        let held = plan.start + plan.generation;
        assert_eq!(plan.peak, held + plan.step.max(plan.usual_step + plan.staging));
        assert_eq!(plan.tokens, tokens.max(1024));
    }
    // A publication beside a usual step takes more than a step of 1,024 tokens, and less than one
    // of the whole context.
    let [short, long] = [0, 8192].map(|tokens| planner.plan(tokens));
    assert_eq!(short.step, short.usual_step);
    assert_eq!(short.peak, short.start + short.generation + short.step + short.staging);
    assert_eq!(long.usual_step, short.usual_step);
    let table = long.to_string();
    assert!(table.contains("serving weights") && table.contains("shards of up to 8192"), "{table}");
}

#[test]
fn without_clients_nothing_is_served_or_staged() {
    let setup = ProcessSetup { replicas: 0, ..serve() };
    let plan = usual(setup);
    for part in ["serving weights", "conversations", "staged weights", "mapped files"] {
        assert_eq!(bytes(&plan, part), 0, "{part}");
    }
    // The sampler still reads and copies the adapter, which any step may run beside.
    assert!(bytes(&plan, "staged adapter") > 0);
    let plan = planner(setup).plan(8192);
    assert_eq!(plan.peak, plan.start + plan.generation + plan.step + plan.staging);
    assert_eq!(bytes(&plan, "sampler buffers"), setup.sampler_buffers);
    let setup = ProcessSetup { sequences: 0, cache_positions: 0, sampler_buffers: 0, ..setup };
    let plan = usual(setup);
    assert_eq!(bytes(&plan, "sampler cache") + bytes(&plan, "sampler buffers"), 0);
}

#[test]
fn a_conversation_of_mistral_rs_ends_at_the_sliding_window() {
    let mut spec = SMOLLM2.clone();
    let conversations = |spec: &ModelSpec| {
        bytes(&MemoryPlanner { spec, ..planner(serve()) }.plan(6000), "conversations")
    };
    let whole = conversations(&spec);
    spec.layers.iter_mut().for_each(|layer| layer.window = Some(8000));
    assert_eq!(conversations(&spec), whole);
    spec.layers.iter_mut().for_each(|layer| layer.window = Some(1000));
    assert!(conversations(&spec) < whole / 6);
}

#[test]
fn with_the_native_engine_alone_there_is_one_copy_of_the_weights() {
    let setup = ProcessSetup { replicas: 0, versions: 2, ..serve() };
    let plan = usual(setup);
    for part in ["serving weights", "judge weights", "conversations", "staged weights"] {
        assert_eq!(bytes(&plan, part), 0, "{part}");
    }
    let adapter = bytes(&plan, "optimizer moments") / 2;
    assert_eq!(bytes(&plan, "adapter"), (2 + 2) * adapter);
    assert_eq!(bytes(&plan, "kept adapters"), 0);
    let keeping = ProcessSetup { kept_versions: 8, ..setup };
    let keeping = usual(keeping);
    assert_eq!(bytes(&keeping, "kept adapters"), (8 - 2) * adapter);
    assert_eq!(keeping.start, plan.start + (8 - 2) * adapter);
    // A judge of its own, with mistral.rs, takes two copies and a conversation.
    let judged = ProcessSetup { judge_replicas: 1, ..setup };
    let judged = usual(judged);
    assert_eq!(bytes(&judged, "judge weights"), 2 * 4 * 134_515_008);
    assert!(bytes(&judged, "conversations") > 0);
    assert_eq!(bytes(&judged, "staged weights"), 0, "a judge keeps the base");
}

#[test]
fn without_training_no_step_is_planned() {
    let setup = ProcessSetup { trains: false, replicas: 0, versions: 2, ..serve() };
    let plan = usual(setup);
    assert_eq!((plan.step, plan.usual_step, bytes(&plan, "optimizer moments")), (0, 0, 0));
    assert_eq!(plan.peak, plan.start + plan.generation + plan.staging);
    let trains = usual(ProcessSetup { trains: true, ..setup });
    assert_eq!(bytes(&plan, "base weights"), bytes(&trains, "base weights"));
    // mistral.rs needs no base of the trainer's.
    let alone = ProcessSetup { sequences: 0, cache_positions: 0, replicas: 1, ..setup };
    assert_eq!(bytes(&usual(alone), "base weights"), 0);
}

#[test]
fn all_copies_of_a_small_model_are_staged_at_once() {
    let staged = |weight_files| {
        let setup = ProcessSetup { replicas: 3, weight_files, ..serve() };
        bytes(&usual(setup), "staged weights")
    };
    assert_eq!(staged(SMALL), 3 * staged(SMALL + 1));
}

#[test]
fn the_longest_sample_follows_from_the_limit() {
    let planner = planner(serve());
    for tokens in [3000, 6000, 8191] {
        let peak = planner.plan(tokens).peak;
        assert_eq!(planner.longest_sample(Some(peak)).unwrap(), tokens);
    }
    assert_eq!(planner.longest_sample(Some(usize::MAX)).unwrap(), 8192, "the context is a bound");
    assert_eq!(planner.longest_sample(None).unwrap(), 8192);
    let set = TrainConfig { max_tokens: 700, ..DEFAULTS.clone() };
    let fits = MemoryPlanner { config: &set, ..planner };
    // Shorter samples still share a shard of the usual length.
    assert_eq!(fits.longest_sample(Some(planner.plan(0).peak)).unwrap(), 700);
    assert_eq!(fits.longest_sample(None).unwrap(), 700);
}

#[test]
fn what_does_not_fit_is_refused_with_the_key_and_what_fits() {
    let config = TrainConfig { max_tokens: 6000, ..DEFAULTS.clone() };
    let planner = MemoryPlanner { config: &config, ..planner(serve()) };
    let limit = planner.plan(4000).peak;
    let refused = |limit| planner.longest_sample(Some(limit)).unwrap_err().to_string();
    let mib = |bytes: usize| bytes.div_ceil(1 << 20);
    let expected = format!(
        "`train.max_tokens` is 6000, for which the process needs about {} MiB, but {} MiB are available: \
         set it to at most 4000, or to 0 for what fits",
        mib(planner.plan(6000).peak),
        limit >> 20
    );
    assert_eq!(refused(limit), expected);

    let peak = planner.plan(0).peak;
    let config = TrainConfig { recompute: Recompute::Always, ..config.clone() };
    let least = MemoryPlanner { config: &config, ..planner }.plan(0).peak;
    assert!(least < peak);
    let expected = format!(
        "the process needs about {} MiB to train, but {} MiB are available; with `train.recompute` \
         \"always\" it needs about {} MiB",
        mib(peak),
        (peak - 1) >> 20,
        mib(least)
    );
    assert_eq!(refused(peak - 1), expected);
}

#[test]
fn a_longer_sample_that_keeps_fewer_layers_does_not_lower_the_plan() {
    let planner = planner(serve());
    // Up to 7,590 tokens, five layers of 5,305 values per token fit into 768 MiB.
    let [five, four] = [7590, 7591].map(|tokens| planner.plan(tokens));
    assert_eq!(bytes(&five, "kept activations"), 5 * 5305 * 7590 * 4);
    assert_eq!(five.step, four.step);
    assert!(MemoryPlan::new(&SMOLLM2, planner.base, &DEFAULTS, 2, 7591).step() < five.step);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn the_plan_grows_with_the_tokens(tokens in 1_usize..20_000, more in 1_usize..5_000) {
            let planner = MemoryPlanner { context: 16_384, ..planner(serve()) };
        let [less, more] = [tokens, tokens + more].map(|tokens| planner.plan(tokens));
        prop_assert!(less.peak <= more.peak, "{less}\n{more}");
    }
}
