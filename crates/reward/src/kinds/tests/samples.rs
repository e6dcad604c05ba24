//! Samples for the tests of the kinds, and functions that score them.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use futures::FutureExt;
use serde::de::DeserializeOwned;

use crate::kinds::kind::{BuildContext, Kind, per_sample};
use crate::{RewardFn, ScoreInput, Tools};

/// A sample with as many token ids as bytes.
pub fn sample(text: &str, metadata: &[(&str, &str)]) -> ScoreInput {
    let metadata: BTreeMap<_, _> =
        metadata.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
    ScoreInput {
        messages: Arc::new(Vec::new()),
        metadata: Arc::new(metadata),
        text: text.to_owned(),
        ids: vec![0; text.len()],
    }
}

/// A sample whose reference answer is `answer`.
pub fn with_answer(text: &str, answer: Option<&str>) -> ScoreInput {
    let metadata: Vec<(&str, &str)> = answer.map(|a| ("answer", a)).into_iter().collect();
    sample(text, &metadata)
}

/// A sample of this many tokens.
pub fn of_length(tokens: usize) -> ScoreInput {
    ScoreInput { ids: vec![0; tokens], ..sample("", &[]) }
}

/// Builds a kind that needs no tools; the function scores one sample.
pub fn function(kind: &dyn Kind) -> impl Fn(&ScoreInput) -> Option<f64> + use<> {
    let tools = Tools::default();
    let context = BuildContext { tools: &tools, route: "route", part: "part" };
    let function = kind.build(&context).unwrap().unwrap();
    move |input| function.score(std::slice::from_ref(input)).now_or_never().unwrap()[0]
}

/// The value of one sample.
pub fn score(kind: &dyn Kind, input: &ScoreInput) -> Option<f64> {
    function(kind)(input)
}

/// The value of a text without metadata, which is not missing.
pub fn score_text(kind: &dyn Kind, text: &str) -> f64 {
    score(kind, &sample(text, &[])).unwrap()
}

/// Whether two values are equal but for rounding.
pub fn near(value: f64, wanted: f64) -> bool {
    (value - wanted).abs() < 1e-12
}

/// The cases under a key that `tests/reference/rewards/rewards.py` computed.
pub fn reference<T: DeserializeOwned>(key: &str) -> Vec<T> {
    let text = include_str!("../../../../../tests/reference/rewards/rewards.json");
    let mut cases: BTreeMap<String, serde_json::Value> = serde_json::from_str(text).unwrap();
    serde_json::from_value(cases.remove(key).unwrap()).unwrap()
}

/// A function with the value 0.5 for every sample.
pub fn half() -> Arc<dyn RewardFn> {
    per_sample(|_| Some(0.5)).unwrap().unwrap()
}

/// A function that panics, or returns too few values and no finite one.
pub struct Broken {
    /// Whether it panics.
    pub panics: bool,
}

#[async_trait]
impl RewardFn for Broken {
    async fn score(&self, _: &[ScoreInput]) -> Vec<Option<f64>> {
        assert!(!self.panics, "a grader's bug");
        vec![Some(f64::NAN), Some(f64::INFINITY)]
    }
}
