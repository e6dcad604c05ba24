//! The plan of a process against shapes that were computed separately.

use candle_core::DType;
use proptest::prelude::*;

use hone_model::adapter::BaseDtype;

use super::*;

/// The shape of SmolLM2-135M.
fn smollm2() -> ModelSpec {
    ModelSpec::from_config(&serde_json::json!({
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "num_attention_heads": 9,
        "num_key_value_heads": 3, "num_hidden_layers": 30, "intermediate_size": 1536,
        "tie_word_embeddings": true,
    }))
    .unwrap()
}

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

fn planner<'a>(
    spec: &'a ModelSpec,
    config: &'a TrainConfig,
    setup: ProcessSetup,
) -> MemoryPlanner<'a> {
    let base = BaseMemory::new(spec, BaseDtype::Auto, |_| Ok(DType::BF16)).unwrap();
    MemoryPlanner { spec, base, config, threads: 2, context: 8192, setup }
}

fn bytes(plan: &ProcessMemory, name: &str) -> usize {
    let mut found = plan.parts.iter().filter(|part| part.part == name);
    let part = found.next().unwrap_or_else(|| panic!("no part {name}: {plan}"));
    assert!(found.next().is_none(), "{name} is not unique");
    part.bytes
}

#[test]
fn the_parts_of_a_daemon_are_those_of_the_shapes() {
    let (spec, config) = (smollm2(), TrainConfig::default());
    let plan = planner(&spec, &config, serve()).plan(6000);
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
    let usual = planner(&spec, &config, serve()).plan(0);
    assert_eq!(bytes(&usual, "one layer or logits"), 170 * 49_152 * 4);
    // If no layer is kept, one is recomputed beside its gradients.
    let always = TrainConfig { recompute: Recompute::Always, ..config.clone() };
    let recomputed = planner(&spec, &always, serve()).plan(6000);
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
    let (spec, config) = (smollm2(), TrainConfig::default());
    let planner = planner(&spec, &config, serve());
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
    let (spec, config) = (smollm2(), TrainConfig::default());
    let setup = ProcessSetup { replicas: 0, ..serve() };
    let plan = planner(&spec, &config, setup).plan(0);
    for part in ["serving weights", "conversations", "staged weights", "mapped files"] {
        assert_eq!(bytes(&plan, part), 0, "{part}");
    }
    // The sampler still reads and copies the adapter.
    assert!(bytes(&plan, "staged adapter") > 0);
    assert_eq!(bytes(&plan, "sampler buffers"), setup.sampler_buffers);
    let setup = ProcessSetup { sequences: 0, cache_positions: 0, sampler_buffers: 0, ..setup };
    let plan = planner(&spec, &config, setup).plan(0);
    assert_eq!(bytes(&plan, "sampler cache") + bytes(&plan, "sampler buffers"), 0);
}

#[test]
fn a_conversation_of_mistral_rs_ends_at_the_sliding_window() {
    let (mut spec, config) = (smollm2(), TrainConfig::default());
    let conversations =
        |spec: &ModelSpec| bytes(&planner(spec, &config, serve()).plan(6000), "conversations");
    let whole = conversations(&spec);
    spec.layers.iter_mut().for_each(|layer| layer.window = Some(8000));
    assert_eq!(conversations(&spec), whole);
    spec.layers.iter_mut().for_each(|layer| layer.window = Some(1000));
    assert!(conversations(&spec) < whole / 6);
}

#[test]
fn with_the_native_engine_alone_there_is_one_copy_of_the_weights() {
    let (spec, config) = (smollm2(), TrainConfig::default());
    let setup = ProcessSetup { replicas: 0, versions: 2, ..serve() };
    let plan = planner(&spec, &config, setup).plan(0);
    for part in ["serving weights", "judge weights", "conversations", "staged weights"] {
        assert_eq!(bytes(&plan, part), 0, "{part}");
    }
    let adapter = bytes(&plan, "optimizer moments") / 2;
    assert_eq!(bytes(&plan, "adapter"), (2 + 2) * adapter);
    assert_eq!(bytes(&plan, "kept adapters"), 0);
    let keeping = ProcessSetup { kept_versions: 8, ..setup };
    let keeping = planner(&spec, &config, keeping).plan(0);
    assert_eq!(bytes(&keeping, "kept adapters"), (8 - 2) * adapter);
    assert_eq!(keeping.start, plan.start + (8 - 2) * adapter);
    // A judge of its own, with mistral.rs, takes two copies and a conversation.
    let judged = ProcessSetup { judge_replicas: 1, ..setup };
    let judged = planner(&spec, &config, judged).plan(0);
    assert_eq!(bytes(&judged, "judge weights"), 2 * 4 * 134_515_008);
    assert!(bytes(&judged, "conversations") > 0);
    assert_eq!(bytes(&judged, "staged weights"), 0, "a judge keeps the base");
}

#[test]
fn without_training_no_step_is_planned() {
    let (spec, config) = (smollm2(), TrainConfig::default());
    let setup = ProcessSetup { trains: false, replicas: 0, versions: 2, ..serve() };
    let plan = planner(&spec, &config, setup).plan(0);
    assert_eq!((plan.step, plan.usual_step, bytes(&plan, "optimizer moments")), (0, 0, 0));
    assert_eq!(plan.peak, plan.start + plan.generation + plan.staging);
    let trains = planner(&spec, &config, ProcessSetup { trains: true, ..setup }).plan(0);
    assert_eq!(bytes(&plan, "base weights"), bytes(&trains, "base weights"));
    // mistral.rs needs no base of the trainer's.
    let alone = ProcessSetup { sequences: 0, cache_positions: 0, replicas: 1, ..setup };
    assert_eq!(bytes(&planner(&spec, &config, alone).plan(0), "base weights"), 0);
}

#[test]
fn all_copies_of_a_small_model_are_staged_at_once() {
    let (spec, config) = (smollm2(), TrainConfig::default());
    let staged = |weight_files| {
        let setup = ProcessSetup { replicas: 3, weight_files, ..serve() };
        bytes(&planner(&spec, &config, setup).plan(0), "staged weights")
    };
    assert_eq!(staged(SMALL), 3 * staged(SMALL + 1));
}

#[test]
fn the_longest_sample_follows_from_the_limit() {
    let (spec, config) = (smollm2(), TrainConfig::default());
    let planner = planner(&spec, &config, serve());
    for tokens in [3000, 6000, 8191] {
        let peak = planner.plan(tokens).peak;
        assert_eq!(planner.longest_sample(Some(peak)).unwrap(), tokens);
    }
    assert_eq!(planner.longest_sample(Some(usize::MAX)).unwrap(), 8192, "the context is a bound");
    assert_eq!(planner.longest_sample(None).unwrap(), 8192);
    let set = TrainConfig { max_tokens: 700, ..config.clone() };
    let fits = MemoryPlanner { config: &set, ..planner };
    // Shorter samples still share a shard of the usual length.
    assert_eq!(fits.longest_sample(Some(planner.plan(0).peak)).unwrap(), 700);
    assert_eq!(fits.longest_sample(None).unwrap(), 700);
}

#[test]
fn what_does_not_fit_is_refused_with_the_key_and_what_fits() {
    let (spec, config) = (smollm2(), TrainConfig { max_tokens: 6000, ..TrainConfig::default() });
    let planner = planner(&spec, &config, serve());
    let limit = planner.plan(4000).peak;
    let refused = planner.longest_sample(Some(limit)).unwrap_err();
    let LearnError::MaxTokens { max_tokens, fits, needed, .. } = &refused else {
        panic!("{refused}");
    };
    assert_eq!((*max_tokens, *fits), (6000, 4000));
    assert_eq!(*needed, planner.plan(6000).peak.div_ceil(1 << 20));
    let text = refused.to_string();
    assert!(text.starts_with("`train.max_tokens` is 6000, for which"), "{text}");
    assert!(text.ends_with("set it to at most 4000, or to 0 for what fits"), "{text}");

    let peak = planner.plan(0).peak;
    let refused = planner.longest_sample(Some(peak - 1)).unwrap_err();
    let LearnError::Memory { needed, least, .. } = &refused else { panic!("{refused}") };
    assert_eq!(*needed, peak.div_ceil(1 << 20));
    assert!(least < needed);
    assert!(refused.to_string().contains("train.recompute"), "{refused}");
}

#[test]
fn a_longer_sample_that_keeps_fewer_layers_does_not_lower_the_plan() {
    let (spec, config) = (smollm2(), TrainConfig::default());
    let planner = planner(&spec, &config, serve());
    // Up to 7,590 tokens, five layers of 5,305 values per token fit into 768 MiB.
    let [five, four] = [7590, 7591].map(|tokens| planner.plan(tokens));
    assert_eq!(bytes(&five, "kept activations"), 5 * 5305 * 7590 * 4);
    assert_eq!(five.step, four.step);
    assert!(MemoryPlan::new(&spec, planner.base, &config, 2, 7591).step() < five.step);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn the_plan_grows_with_the_tokens(tokens in 1_usize..20_000, more in 1_usize..5_000) {
        let (spec, config) = (smollm2(), TrainConfig::default());
        let planner = MemoryPlanner { context: 16_384, ..planner(&spec, &config, serve()) };
        let [less, more] = [tokens, tokens + more].map(|tokens| planner.plan(tokens));
        prop_assert!(less.peak <= more.peak, "{less}\n{more}");
    }
}
