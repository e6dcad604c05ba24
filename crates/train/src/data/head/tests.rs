//! The regression, and the heads on hidden states of the embedded model's own answers.

use std::sync::{Arc, OnceLock};

use candle_core::{Device, Tensor};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use hone_core::types::{Message, Role};
use hone_engine::{Codec, ModelDir};
use hone_model::Model;
use hone_model::adapter::BaseDtype;
use hone_model::transformer::Segments;

use super::*;
use crate::learning::features::features;

/// The embedded model's answer to an addition, as its features and whether it is right and well formed.
pub(super) struct Answer {
    pub features: Vec<f64>,
    pub is_right: bool,
    pub is_formed: bool,
}

/// Answers of the embedded model at temperature 1.
pub(super) fn answers() -> &'static [Answer] {
    static ANSWERS: OnceLock<Vec<Answer>> = OnceLock::new();
    ANSWERS.get_or_init(|| (0..16).flat_map(|seed| sampled(100, seed)).collect())
}

fn embedded() -> (Model, Codec) {
    let data = tempfile::tempdir().unwrap();
    let dir = hone_model::embedded::unpack(data.path()).unwrap();
    let codec = Codec::load(&ModelDir::open(&dir).unwrap()).unwrap();
    (hone_model::testing::load_model(&dir, BaseDtype::default()), codec)
}

fn sampled(count: usize, seed: u64) -> Vec<Answer> {
    let (model, codec) = embedded();
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut prompts: Vec<Vec<u32>> = Vec::new();
    let mut sums = Vec::new();
    for _ in 0..count {
        let [a, b] = [(); 2].map(|()| rng.random_range(0..50_u32));
        let question = match rng.random_range(0..3) {
            0 => format!("What is {a} + {b}?"),
            1 => format!("How much is {a} plus {b}?"),
            _ => format!("Add {a} and {b}."),
        };
        prompts.push(codec.prompt(&[Message::new(Role::User, question)]).unwrap());
        sums.push(a + b);
    }
    let ids = complete(&model, &prompts, codec.stop_ids()[0], &mut rng);
    let texts: Vec<(&[u32], &[u32])> =
        prompts.iter().zip(&ids).map(|(prompt, ids)| (&prompt[..], &ids[..])).collect();
    let found = features(&model, &texts).unwrap();
    let answer = |((features, ids), sum): ((Vec<f64>, &Vec<u32>), u32)| {
        let text = codec.decode(ids).unwrap().replace("<|im_end|>", "");
        let inside = text.split_once("<answer>").and_then(|(_, rest)| rest.split_once("</answer>"));
        let is_formed = text.starts_with("<reasoning>")
            && text.ends_with("</answer>")
            && text.contains("</reasoning><answer>");
        let is_right = inside.is_some_and(|(found, _)| found.trim().parse() == Ok(sum));
        Answer { features, is_right, is_formed }
    };
    found.into_iter().zip(&ids).zip(sums).map(answer).collect()
}

/// Completions of at most 40 tokens at temperature 1.
fn complete(model: &Model, prompts: &[Vec<u32>], stop: u32, rng: &mut ChaCha8Rng) -> Vec<Vec<u32>> {
    let mut completions: Vec<Vec<u32>> = vec![Vec::new(); prompts.len()];
    for _ in 0..40 {
        let open: Vec<usize> =
            (0..prompts.len()).filter(|i| completions[*i].last() != Some(&stop)).collect();
        let text = |i: &usize| [&prompts[*i][..], &completions[*i][..]].concat();
        let texts: Vec<Vec<u32>> = open.iter().map(text).collect();
        let Some(len) = texts.iter().map(Vec::len).max() else { break };
        let (mut ids, mut rows) = (Vec::new(), Vec::new());
        for text in &texts {
            rows.push((ids.len() + text.len() - 1) as u32);
            ids.extend_from_slice(text);
            ids.resize(ids.len() + len - text.len(), 0);
        }
        let ids = Tensor::new(ids, &Device::Cpu).unwrap();
        let segments = Arc::new(Segments::batch(open.len(), len));
        let hidden = model.hidden(&ids, &segments, None, None).unwrap();
        let last = hidden.index_select(&Tensor::new(rows, &Device::Cpu).unwrap(), 0).unwrap();
        let logits = model.logits(&last).unwrap().to_vec2::<f32>().unwrap();
        for (i, logits) in open.into_iter().zip(logits) {
            // The greatest of the logits with Gumbel noise is a sample of their softmax.
            let noise = || -(-rng.random_range(1e-300_f64..1.0).ln()).ln();
            let noisy: Vec<f64> = logits
                .iter()
                .map(|x| f64::from(*x))
                .zip(std::iter::repeat_with(noise))
                .map(|(x, noise)| x + noise)
                .collect();
            let best = (0..noisy.len()).max_by(|a, b| noisy[*a].total_cmp(&noisy[*b])).unwrap();
            completions[i].push(best as u32);
        }
    }
    completions
}

fn observations(count: usize, seed: u64, target: impl Fn(&[f64]) -> f64) -> Vec<Observation> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut one = || {
        let features: Vec<f64> = (0..4).map(|_| rng.random_range(-1.0..1.0)).collect();
        let target = target(&features) + rng.random_range(-0.1..0.1);
        Observation { features, target, weight: 1.0 }
    };
    (0..count).map(|_| one()).collect()
}

#[test]
fn a_linear_target_is_predicted_and_a_new_one_replaces_it() {
    let mut regression = Regression::default();
    assert!(regression.posterior().is_none());
    let decay = 1.0 - 1.0 / 500.0;
    for batch in observations(4000, 1, |x| 3.0 + x[0] - 2.0 * x[2]).chunks(64) {
        regression.observe(batch, decay);
    }
    // The past decays once for a whole batch, so that it is half a batch more than the 500 of single observations.
    assert!((500.0..540.0).contains(&regression.count()), "{}", regression.count());
    let few = {
        let mut few = Regression::default();
        few.observe(&observations(20, 2, |x| x[0]), decay);
        few.posterior().unwrap()
    };
    let posterior = regression.posterior().unwrap();
    let far = [0.9, 0.0, -0.9, 0.0];
    let (mean, deviation) = posterior.predict(&far).unwrap();
    // The prior shrinks it toward the mean 3.
    assert!((4.5..5.7).contains(&mean) && deviation < 0.1, "{mean} {deviation}");
    let near = posterior.predict(&[0.0; 4]).unwrap().1;
    assert!(near < deviation && deviation < few.predict(&far).unwrap().1);
    assert_eq!(posterior.predict(&[0.0; 3]), None);
    for batch in observations(2000, 3, |x| -x[0]).chunks(64) {
        regression.observe(batch, decay);
    }
    let (mean, _) = regression.posterior().unwrap().predict(&far).unwrap();
    assert!((-1.0..-0.3).contains(&mean), "{mean}");
    let json = serde_json::to_string(&regression).unwrap();
    assert_eq!(serde_json::from_str::<Regression>(&json).unwrap(), regression);
}

#[test]
fn wide_states_are_projected_and_equal_features_do_no_harm() {
    let hidden: Vec<f64> = (0..200).map(|i| f64::from(i % 7) - 3.0).collect();
    let features = project(&hidden);
    assert_eq!(features.len(), FEATURES);
    let square = |values: &[f64]| values.iter().map(|x| x * x).sum::<f64>();
    assert!((square(&features) / FEATURES as f64 - 1.0).abs() < 0.5);
    let scaled: Vec<f64> = hidden.iter().map(|x| 5.0 * x).collect();
    assert!(project(&scaled).iter().zip(&features).all(|(a, b)| (a - b).abs() < 1e-9));
    assert!((square(&project(&[3.0, 4.0])) - 2.0).abs() < 1e-9);
    let mut regression = Regression::default();
    let equal = Observation { features, target: 1.0, weight: 0.5 };
    regression.observe(&vec![equal.clone(); 8], 1.0);
    let (mean, deviation) = regression.posterior().unwrap().predict(&equal.features).unwrap();
    assert!((mean - 1.0).abs() < 1e-6 && deviation < 1e-3, "{mean} {deviation}");
}
