//! Advantages of the guides to GRPO, which `tests/reference/guides/make_guide_cases.py` computes.

use serde_json::Value;

use super::super::Moments;
use super::{AdvantageScale, assert_near, graded, run};

fn cases(function: &str) -> Vec<[Value; 2]> {
    let text = include_str!(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/reference/guides/guide_cases.json"
    ));
    let mut all: Value = serde_json::from_str(text).unwrap();
    let cases: Vec<_> = serde_json::from_value(all["functions"][function]["cases"].take()).unwrap();
    assert!(cases.len() > 20);
    cases
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

/// Cases with one completion are left out: there is nothing to compare it with.
#[test]
fn advantages_of_a_sum_of_parts_are_those_of_trl() {
    for [_, expected] in cases("multi_objective") {
        let sums = numbers(&expected["sums"]);
        if sums.len() > 1 {
            let found = run(&[graded(&sums)], AdvantageScale::Group).remove(0);
            for (found, wanted) in found.into_iter().zip(numbers(&expected["advantages"])) {
                assert_near(found, wanted);
            }
        }
    }
}

/// The documented difference from `compute_advantages`, which divides by the deviation with divisor n.
#[test]
fn advantages_differ_from_the_first_guide_by_the_divisor_only() {
    for [rewards, expected] in cases("group_advantages") {
        let rewards = numbers(&rewards);
        if rewards.len() > 1 {
            let n = rewards.len() as f64;
            let deviation = Moments::of(rewards.iter().copied()).deviation().unwrap();
            let of_guide = (deviation * ((n - 1.0) / n).sqrt()).max(1e-8);
            let found = run(&[graded(&rewards)], AdvantageScale::Group).remove(0);
            for (found, wanted) in found.into_iter().zip(numbers(&expected)) {
                assert_near(found * (deviation + 1e-4), wanted * of_guide);
            }
        }
    }
}
