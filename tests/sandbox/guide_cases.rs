//! The values of the guides' reward functions, which `tests/reference/guides/make_guide_cases.py`
//! computes, and the kinds about code that stand for them.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value;

use hone_reward::{Route, Routes, ScoreInput, Tools};

use crate::code_reward::sandbox;

/// An input of a function of the guides, with its value.
pub struct GuideCase {
    /// The completion with its columns.
    pub input: ScoreInput,
    /// The same, for messages.
    pub text: String,
    /// The value of the guide's function.
    pub expected: f64,
}

/// The cases of a function whose input is a text, or a text with columns.
pub fn cases(function: &str) -> Vec<GuideCase> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/reference/guides/guide_cases.json");
    let json: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let case = |case: &Value| {
        let given = &case[0];
        let text = given.as_str().or(given["text"].as_str()).unwrap().to_owned();
        let column = |(key, value): (&String, &Value)| {
            (key.clone(), value.as_str().map_or_else(|| value.to_string(), str::to_owned))
        };
        let mut metadata: BTreeMap<String, String> =
            given.as_object().into_iter().flatten().map(column).collect();
        metadata.remove("text");
        let input = ScoreInput {
            messages: Arc::default(),
            metadata: Arc::new(metadata),
            text,
            ids: Vec::new(),
        };
        GuideCase { input, text: given.to_string(), expected: case[1].as_f64().unwrap() }
    };
    json["functions"][function]["cases"].as_array().unwrap().iter().map(case).collect()
}

/// The block of docs/rewards.md that is the library's combined reward for code.
async fn documented_route() -> Option<Arc<Route>> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/rewards.md");
    let text = std::fs::read_to_string(path).unwrap();
    let mut blocks =
        text.split("```toml\n").skip(1).map(|rest| rest.split_once("\n```\n").unwrap().0);
    let block = blocks.find(|block| block.contains("\"no_syntax_error\"")).unwrap();
    let config = hone::config::parse(&format!("[[route]]\nname = \"r\"\n{block}")).unwrap();
    let tools = Tools { sandbox: Some(sandbox().await?), ..Tools::default() };
    let routes = Routes::with(&config.routes, &tools).unwrap();
    Some(Arc::clone(routes.get("r").unwrap()))
}

/// Weighted values of one part, or the sum of all parts; `None` if a value is missing.
async fn weighted(route: &Route, part: Option<&str>, cases: &[GuideCase]) -> Vec<Option<f64>> {
    let samples: Vec<ScoreInput> = cases.iter().map(|case| case.input.clone()).collect();
    let mut sums = vec![Some(0.0); cases.len()];
    for (name, values) in route.grade(&samples).await {
        let weight = route.weight(&name).unwrap();
        if part.is_none_or(|part| part == name) {
            for (sum, value) in sums.iter_mut().zip(values) {
                *sum = sum.zip(value).map(|(sum, value)| sum + weight * value);
            }
        }
    }
    sums
}

const FENCE: &str = "Hone reads any fence of CommonMark: other languages, CRLF, tildes, no end";
const INLINE: &str = "a fence within a line is none in CommonMark";
const WHOLE: &str = "a completion without a fence is code as a whole";
const TUPLE: &str = "JSON has no tuples";
const NO_CALLS: &str = "without calls there is no value";
const INDENT: &str = "a closing fence may be indented";
const OTHER_LANGUAGE: &str = "a block of another language is no answer";

#[tokio::test]
async fn code_kinds_equal_the_guides_functions_except_where_documented() {
    let Some(route) = documented_route().await else { return };
    let execution: &[(usize, &str, Option<f64>)] = &[
        (2, FENCE, Some(2.0)),
        (3, FENCE, Some(2.0)),
        (4, FENCE, Some(2.0)),
        (5, FENCE, Some(2.0)),
        (6, FENCE, Some(2.0)),
        (7, WHOLE, Some(2.0)),
        (8, FENCE, Some(2.0)),
        (10, FENCE, Some(2.0)),
        (12, INLINE, Some(0.0)),
        (15, OTHER_LANGUAGE, Some(0.0)),
        (25, TUPLE, Some(2.0)),
        (35, NO_CALLS, None),
        (36, NO_CALLS, None),
        (37, NO_CALLS, None),
        (38, NO_CALLS, None),
        (40, NO_CALLS, None),
    ];
    let syntax: &[(usize, &str, Option<f64>)] = &[
        (2, FENCE, Some(0.2)),
        (3, FENCE, Some(0.2)),
        (4, FENCE, Some(0.2)),
        (5, FENCE, Some(0.2)),
        (6, FENCE, Some(0.2)),
        (8, FENCE, Some(0.2)),
        (10, FENCE, Some(0.2)),
        (12, INLINE, Some(0.0)),
        (15, OTHER_LANGUAGE, Some(0.0)),
        (42, INDENT, Some(0.2)),
    ];
    // The sums differ where the parts do.
    let sums: &[(usize, &str, Option<f64>)] = &[
        (2, FENCE, Some(2.2)),
        (3, FENCE, Some(2.2)),
        (4, FENCE, Some(2.2)),
        (5, FENCE, Some(2.2)),
        (6, FENCE, Some(2.2)),
        (7, WHOLE, Some(2.0)),
        (8, FENCE, Some(2.2)),
        (10, FENCE, Some(2.2)),
        (12, INLINE, Some(0.5)),
        (15, OTHER_LANGUAGE, Some(0.5)),
        (25, TUPLE, Some(2.7)),
    ];
    for (function, part, documented) in [
        ("code_execution", Some("code_execution"), execution),
        ("code_block_format", Some("code_block_format"), &[]),
        ("no_syntax_error", Some("no_syntax_error"), syntax),
        ("code_generation", None, sums),
    ] {
        let cases = cases(function);
        assert!(cases.len() > 20);
        let values = weighted(&route, part, &cases).await;
        let close = |value: Option<f64>, wanted: Option<f64>| match (value, wanted) {
            (Some(value), Some(wanted)) => (value - wanted).abs() < 1e-12,
            (None, None) => true,
            _ => false,
        };
        for (index, (value, case)) in values.into_iter().zip(&cases).enumerate() {
            let expected = match documented.iter().find(|(at, ..)| *at == index) {
                Some((_, reason, hone)) => {
                    assert!(!close(*hone, Some(case.expected)), "{function} {index}: {reason}");
                    *hone
                }
                None => Some(case.expected),
            };
            assert!(close(value, expected), "{function} {index}: {value:?} of {}", case.text);
        }
    }
}
