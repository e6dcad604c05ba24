//! Properties of matching; a test of `adapter::peft` compares results with PEFT's.

use proptest::prelude::*;

use super::*;

fn matcher(config: &LoraConfig) -> ModuleMatcher {
    ModuleMatcher::new(config).unwrap()
}

#[test]
fn an_invalid_regular_expression_is_reported_with_its_key() {
    let mut config = LoraConfig::default();
    config.rank_pattern.insert("(?=x)".to_owned(), 1);
    let (key, why) = ModuleMatcher::new(&config).err().unwrap();
    assert_eq!(key, "rank_pattern");
    assert!(why.contains("look-around"), "{why}");
}

proptest! {
    #[test]
    fn a_name_matches_only_after_a_dot(layer in 0_usize..40, kind in "[a-z]{1,6}_proj", cut in 0_usize..30) {
        let module = format!("model.layers.{layer}.mlp.{kind}");
        let from = cut.min(module.len() - 1);
        let name = &module[from..];
        let config = LoraConfig { target_modules: [name].into(), ..LoraConfig::default() };
        let expected = from == 0 || module.as_bytes()[from - 1] == b'.';
        prop_assert_eq!(matcher(&config).matched(&module).is_some(), expected);
    }

    #[test]
    fn rslora_divides_by_the_root_of_the_rank(r in 1_usize..512, alpha in 0.1_f64..512.0) {
        let plain = LoraConfig { r, alpha, ..LoraConfig::default() };
        let stable = LoraConfig { use_rslora: true, ..plain.clone() };
        let [plain, stable] = [plain, stable].map(|config| matcher(&config).scale("m.q_proj").scale);
        prop_assert!((stable - plain * (r as f64).sqrt()).abs() < 1e-9 * stable);
    }

    #[test]
    fn only_listed_layers_match(layers in prop::collection::vec(0_usize..12, 1..5), layer in 0_usize..12) {
        let config = LoraConfig { layers_to_transform: layers.clone(), ..LoraConfig::default() };
        let matched = matcher(&config).matched(&format!("model.layers.{layer}.mlp.up_proj")).is_some();
        prop_assert_eq!(matched, layers.contains(&layer));
    }
}
