//! Names, patterns and their forms in files; `train::peft_tests` holds them equal to PEFT's.

use proptest::prelude::*;

use super::*;

fn modules(json: &str) -> Modules {
    serde_json::from_str(json).unwrap()
}

fn rules(config: &LoraConfig) -> ModuleRules {
    ModuleRules::new(config).unwrap()
}

#[test]
fn a_text_is_a_pattern_unless_it_is_plain_names() {
    assert_eq!(modules("\"ALL-linear\""), Modules::AllLinear);
    assert_eq!(modules("\"q_proj, v_proj\""), ["q_proj", "v_proj"].into());
    assert_eq!(modules("[\"q_proj\"]"), ["q_proj"].into());
    assert_eq!(modules("\".*q_proj\""), Modules::Pattern(".*q_proj".to_owned()));
    for json in ["\"all-linear\"", "[\"q_proj\"]", "\".*q_proj\""] {
        assert_eq!(serde_json::to_string(&modules(json)).unwrap(), json);
    }
}

#[test]
fn patterns_keep_the_order_they_are_written_in() {
    let text = "{\"z\":1,\"a\":2,\"m\":3}";
    let patterns: Patterns<usize> = serde_json::from_str(text).unwrap();
    assert_eq!(serde_json::to_string(&patterns).unwrap(), text);
}

#[test]
fn what_is_no_regular_expression_names_its_key() {
    let mut config = LoraConfig::default();
    config.rank_pattern.0.push(("(?=x)".to_owned(), 1));
    let (key, why) = ModuleRules::new(&config).err().unwrap();
    assert_eq!(key, "rank_pattern");
    assert!(why.contains("look-around"), "{why}");
}

#[test]
fn names_that_mean_no_module_are_told() {
    let config = LoraConfig {
        target_modules: ["q_proj", "lm_head", "layers.7.mlp.up_proj"].into(),
        ..LoraConfig::default()
    };
    let known = ["model.layers.0.self_attn.q_proj".to_owned()];
    assert_eq!(rules(&config).unmatched(&known), ["lm_head", "layers.7.mlp.up_proj"]);
}

proptest! {
    #[test]
    fn a_name_matches_from_a_dot_on_only(layer in 0_usize..40, kind in "[a-z]{1,6}_proj", cut in 0_usize..30) {
        let module = format!("model.layers.{layer}.mlp.{kind}");
        let from = cut.min(module.len() - 1);
        let name = &module[from..];
        let config = LoraConfig { target_modules: [name].into(), ..LoraConfig::default() };
        let expected = from == 0 || module.as_bytes()[from - 1] == b'.';
        prop_assert_eq!(rules(&config).factor(&module).is_some(), expected);
    }

    #[test]
    fn rslora_scales_by_the_root_of_the_rank(r in 1_usize..512, alpha in 0.1_f64..512.0) {
        let plain = LoraConfig { r, alpha, ..LoraConfig::default() };
        let stable = LoraConfig { use_rslora: true, ..plain.clone() };
        let [plain, stable] = [plain, stable].map(|config| rules(&config).scaled("m.q_proj").scale);
        prop_assert!((stable - plain * (r as f64).sqrt()).abs() < 1e-9 * stable);
    }

    #[test]
    fn only_the_layers_named_are_chosen(layers in prop::collection::vec(0_usize..12, 1..5), layer in 0_usize..12) {
        let config = LoraConfig { layers_to_transform: layers.clone(), ..LoraConfig::default() };
        let chosen = rules(&config).factor(&format!("model.layers.{layer}.mlp.up_proj")).is_some();
        prop_assert_eq!(chosen, layers.contains(&layer));
    }
}
