//! Unknown keys that are TRL's options, or other names that the GRPO guides use.

use std::collections::BTreeSet;

use insta::assert_snapshot;

use crate::{counterpart, environment_names, load_from, parse, trl_names};

fn error(text: &str) -> String {
    parse(text).unwrap_err().to_string()
}

fn variable(name: &str) -> String {
    load_from(None, [(name.to_owned(), "1".to_owned())]).unwrap_err().to_string()
}

#[test]
fn names_of_trl_are_answered_with_a_key() {
    assert_snapshot!(error("[train]\nnum_generations = 8"), @"train.num_generations is not a key: Hone's key for TRL's num_generations is rollout.group_size");
    assert_snapshot!(error("num_train_epochs = 1"), @"num_train_epochs is not a key: Hone's key for TRL's num_train_epochs is train.epochs");
    assert_snapshot!(error("[rollout]\nmax_completion_length = 512"), @"rollout.max_completion_length is not a key: Hone's key for TRL's max_completion_length is rollout.max_tokens");
    assert_snapshot!(error("[rollout]\nuse_vllm = true"), @"rollout.use_vllm is not a key: Hone's keys for TRL's use_vllm are rollout.sampler and engine.replicas");
    assert_snapshot!(error("[train]\nepsilon = 0.2"), @"train.epsilon is not a key: Hone's keys for TRL's epsilon are train.clip_low and train.clip_high");
    assert_snapshot!(error("[train]\nbf16 = true"), @"train.bf16 is not a key: Hone's key for TRL's bf16 is train.compute");
    assert_snapshot!(error("[train]\nwarmup_steps_ = 1"), @"train.warmup_steps_ is not a key: did you mean train.warmup_steps?");
    // Hone's own name in another section, and names of the guides.
    assert_snapshot!(error("learning_rate = 1e-5"), @"learning_rate is not a key: Hone's key for TRL's learning_rate is train.learning_rate");
    assert_snapshot!(error("[train]\nmax_prompt_length = 256"), @"train.max_prompt_length is not a key: Hone's key for max_prompt_length is dataset.max_prompt_tokens");
    assert_snapshot!(error("[train]\nkl_coeff = 0.1"), @"train.kl_coeff is not a key: Hone's key for kl_coeff is train.beta");
    assert_snapshot!(error("[train.lora]\nlora_alpha = 32"), @"train.lora.lora_alpha is not a key: Hone's key for lora_alpha is train.lora.alpha");
    assert_snapshot!(error("[model]\nload_in_4bit = true"), @"model.load_in_4bit is not a key: Hone's key for load_in_4bit is model.quantize");
    let part = "[[route]]\nname = 'a'\n[[route.reward]]\nname = 'x'\nkind = 'exact_match'\n";
    assert_snapshot!(error(&format!("{part}reward_weights = 1")), @"route[0].reward[0].reward_weights is not a key: Hone's key for TRL's reward_weights is route.reward.weight");
}

#[test]
fn variables_are_answered_too() {
    assert_snapshot!(variable("HONE_TRAIN_NUM_GENERATIONS"), @"HONE_TRAIN_NUM_GENERATIONS names no key of the configuration: Hone's key for TRL's num_generations is rollout.group_size");
    assert_snapshot!(variable("HONE_TRAIN__BF16"), @"HONE_TRAIN__BF16 names no key of the configuration: Hone's key for TRL's bf16 is train.compute");
    // As before, a variable of no section is ignored.
    load_from(None, [("HONE_NUM_GENERATIONS".to_owned(), "1".to_owned())]).unwrap();
}

#[test]
fn the_value_of_a_key_is_not_taken_for_a_name() {
    let text = error("[train]\nloss = 'a.use_vllm is not a key'");
    assert!(text.starts_with("train.loss is \"a.use_vllm is not a key\": it must be "), "{text}");
}

#[test]
fn every_name_is_answered_everywhere() {
    let mut known: BTreeSet<String> = environment_names().into_iter().map(|(_, key)| key).collect();
    // Tables, which variables cannot set.
    known.extend(["train.lora.rank_pattern", "train.lora.alpha_pattern"].map(str::to_owned));
    let mut answered = 0;
    for name in trl_names() {
        let row = counterpart(name).unwrap();
        assert!(!row.keys.is_empty() || !row.note.is_empty(), "{name}: no key and no reason");
        for section in ["", "train", "rollout", "train.lora"] {
            let key =
                if section.is_empty() { name.to_owned() } else { format!("{section}.{name}") };
            // `model`, for example, is a section, and a value is no table.
            let sections = |key: &String| key.starts_with(&format!("{name}."));
            if known.contains(&key) || (section.is_empty() && known.iter().any(sections)) {
                continue;
            }
            let table = if section.is_empty() { String::new() } else { format!("[{section}]\n") };
            let text = error(&format!("{table}{name} = 1"));
            let wanted = row.keys.first().map_or_else(|| row.plain_note(), |key| (*key).to_owned());
            assert!(text.starts_with(&format!("{key} is not a key: ")), "{text}");
            assert!(text.contains(&wanted), "{text}");
            answered += 1;
        }
    }
    assert!(answered > 800, "{answered} answers");
}
