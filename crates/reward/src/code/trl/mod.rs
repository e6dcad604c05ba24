//! `python`: a reward function with the signature of TRL's, `f(prompts, completions, **columns)`.
//!
//! The source runs in a [`Sandbox`] process, once for each group: the function gets all completions
//! of the group in one call, by keyword, as TRL 1.16 passes them
//! (`GRPOTrainer._calculate_rewards`). So a function from a training script with TRL runs unchanged
//! if it needs the standard library only. State does not survive a call, and all values of a call
//! are missing if the function fails.
//!
//! Unlike tests of `code`, the source is trusted: a function that itself executes a completion's
//! code lets that code choose every value of its group.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use hone_core::config::{Checked, Problem, quoted};

use crate::kinds::define::define_kind;
use crate::sandbox::{Limits, RunRequest, Sandbox};
use crate::{RewardFn, ScoreInput};

/// Most bytes that one call may print.
const PRINTED_BYTES: usize = 1 << 20;
/// Most printed characters that are logged of one call.
const LOGGED_CHARS: usize = 2_000;
/// Arguments of the function that no column replaces, and the names of TRL's prompt columns.
const NOT_COLUMNS: [&str; 5] = ["prompt", "prompts", "completion", "completions", "completion_ids"];

/// The part `kind = "python"`.
pub struct PythonFunction {
    params: PythonParams,
    source: String,
    sandbox: Arc<Sandbox>,
    /// Route and part, for the log.
    name: [String; 2],
    warned: AtomicBool,
}

/// What `call.py` reports.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum CallReport {
    Values(Vec<Option<f64>>),
    Function(String),
    Failed(String),
}

impl PythonFunction {
    /// Prepares the part; reads the file that `path` names. `route` and `part` are for the log.
    /// Errors: if the file cannot be read.
    pub fn new(
        params: PythonParams,
        sandbox: Arc<Sandbox>,
        route: &str,
        part: &str,
    ) -> Result<Self, Problem> {
        let source = if params.path.as_os_str().is_empty() {
            params.source.clone()
        } else {
            std::fs::read_to_string(&params.path)
                .map_err(|error| params.wrong_source(&format!("cannot be read: {error}")))?
        };
        let name = [route.to_owned(), part.to_owned()];
        Ok(Self { params, source, sandbox, name, warned: AtomicBool::new(false) })
    }

    /// Calls the function for one group. Without samples it is only found, not called.
    /// Errors: a problem of the key `function` if there is no such function; one without a key if the source cannot be
    /// confined, hits a limit, raises, or returns something else than a number or `None` for each sample.
    pub async fn call(&self, samples: &[ScoreInput]) -> Result<Vec<Option<f64>>, Problem> {
        let job = json!({
            "source": self.source, "file": self.params.file(),
            "function": self.params.function,
            "samples": (!samples.is_empty()).then(|| arguments(samples, &self.params)),
        });
        let limits = Limits {
            wall_ms: self.params.timeout_ms,
            memory_mb: self.params.memory_mb,
            output_bytes: PRINTED_BYTES,
        };
        let code = include_str!("call.py").to_owned();
        let failed = |why: String| Err(Problem::new("", why));
        let run = self.sandbox.run(RunRequest { code, stdin: job.to_string(), limits });
        let outcome = match run.await {
            Ok(outcome) => outcome,
            Err(error) => return failed(error.to_string()),
        };
        if !outcome.stdout.is_empty() {
            let printed: String = outcome.stdout.trim_end().chars().take(LOGGED_CHARS).collect();
            let [route, part] = &self.name;
            tracing::info!(route, part, "the reward function printed: {printed}");
        }
        match serde_json::from_str(&outcome.report) {
            Ok(CallReport::Values(values)) => Ok(values),
            Ok(CallReport::Function(why)) => Err(Problem::new("function", format!(" {why}"))),
            Ok(CallReport::Failed(why)) => failed(why),
            Err(_) => failed(match outcome.status.stopped() {
                Some(reason) => format!("it was stopped: {reason}"),
                None if outcome.stderr.is_empty() => "it ended without an answer".to_owned(),
                None => outcome.stderr_tail(1),
            }),
        }
    }
}

#[async_trait]
impl RewardFn for PythonFunction {
    async fn score(&self, samples: &[ScoreInput]) -> Vec<Option<f64>> {
        if samples.is_empty() {
            return Vec::new();
        }
        self.call(samples).await.unwrap_or_else(|problem| {
            if !self.warned.swap(true, Ordering::Relaxed) {
                let ([route, part], error) = (&self.name, problem.sentence());
                tracing::warn!(
                    route, part, %error,
                    "a reward function failed; its values are missing, and later failures are not \
                     logged"
                );
            }
            vec![None; samples.len()]
        })
    }

    async fn probe(&self) -> Checked {
        self.call(&[]).await.map(drop).map_err(|problem| match problem.key.is_empty() {
            true => self.params.wrong_source(&format!("fails: {}", problem.rest)),
            false => problem,
        })
    }
}

/// The function's keyword arguments; `columns` are to be passed one by one.
fn arguments(samples: &[ScoreInput], params: &PythonParams) -> Value {
    let prompt = |input: &ScoreInput| match params.format {
        PromptForm::Chat => json!(*input.messages),
        PromptForm::Text => json!(input.prompt()),
    };
    let completion = |input: &ScoreInput| match params.format {
        PromptForm::Chat => json!([{"role": "assistant", "content": input.text}]),
        PromptForm::Text => json!(input.text),
    };
    let keys: BTreeSet<&String> = samples.iter().flat_map(|input| input.metadata.keys()).collect();
    let column = |key: &String| -> Vec<Value> {
        let of_type = params.columns.get(key).copied();
        let texts = samples.iter().map(|input| input.metadata.get(key));
        texts.map(|text| text.map_or(Value::Null, |text| typed(text, of_type))).collect()
    };
    let columns = keys.into_iter().filter(|key| !NOT_COLUMNS.contains(&key.as_str()));
    let columns: Map<String, Value> =
        columns.map(|key| (key.clone(), Value::Array(column(key)))).collect();
    json!({
        "prompts": samples.iter().map(prompt).collect::<Vec<_>>(),
        "completions": samples.iter().map(completion).collect::<Vec<_>>(),
        "completion_ids": samples.iter().map(|input| &input.ids).collect::<Vec<_>>(),
        "columns": columns,
    })
}

/// The value of an entry of the metadata.
fn typed(text: &str, of_type: Option<ColumnType>) -> Value {
    let parsed = match of_type {
        Some(ColumnType::Text) => None,
        Some(ColumnType::Json) => serde_json::from_str(text).ok(),
        None if text.trim_start().starts_with(['[', '{']) => serde_json::from_str(text).ok(),
        None => None,
    };
    parsed.unwrap_or_else(|| Value::String(text.to_owned()))
}

/// The form in which a function gets prompts and completions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PromptForm {
    /// Lists of messages, as TRL passes for conversational datasets.
    Chat,
    /// Texts, as TRL passes for datasets of plain text: the last user message and the completion.
    Text,
}

/// What a function gets for an entry of the metadata, which is always a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ColumnType {
    /// The text.
    Text,
    /// The JSON value that the text contains; the text if it contains none.
    Json,
}

define_kind! {
    pub struct PythonParams {
        /// The Python file with the function, relative to the working directory. It is read once, at
        /// start.
        pub path: PathBuf = PathBuf::new(),
        /// The Python itself, instead of `path`.
        pub source: String = String::new(),
        /// The function's name. It may be empty if one function alone has an argument `completions`.
        pub function: String = String::new(),
        /// Whether prompts and completions are lists of messages or texts.
        pub format: PromptForm = PromptForm::Chat,
        /// Types of columns. Others are JSON if they contain a list or an object, and else text.
        pub columns: BTreeMap<String, ColumnType> = BTreeMap::new(),
        /// Time of one call, which scores a group, in milliseconds.
        pub timeout_ms: u64 = 10_000 => between(10, 600_000),
        /// Memory of one call, in MiB.
        pub memory_mb: u64 = 512 => between(32, 65_536),
    }
    kind: "python",
    range: "the function's",
    typical_weight: "1.0",
    example: "source = \"def f(completions, **columns): return [0.0 for _ in completions]\"",
    calls_out: true,
    bounds: [f64::NEG_INFINITY, f64::INFINITY],
    formula: "the list that the Python function f(prompts, completions, **columns), in the file path or in source, \
              returns for a group, as in TRL; None is missing, and all values are if it fails. function is needed if \
              several have an argument completions; columns are of type \"text\" or \"json\"",
}

impl PythonParams {
    /// The name of the source in tracebacks.
    fn file(&self) -> String {
        match self.path.as_os_str().is_empty() {
            true => "<source>".to_owned(),
            false => self.path.display().to_string(),
        }
    }

    /// Why the source cannot be used, as an error of its key.
    fn wrong_source(&self, why: &str) -> Problem {
        match self.path.as_os_str().is_empty() {
            true => Problem::new("source", format!(" {why}")),
            false => {
                let path = quoted(&self.path.to_string_lossy());
                Problem::new("path", format!(" is {path}, which {why}"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use hone_core::types::{Message, Role};

    use super::*;
    use crate::kinds::Kind;
    use crate::kinds::tests::samples::sample;

    fn read(toml: &str) -> PythonParams {
        toml::from_str(toml).unwrap()
    }

    fn input(text: &str, metadata: &[(&str, &str)]) -> ScoreInput {
        let message = |role, content: &str| Message::new(role, content);
        let messages = vec![message(Role::System, "Be brief."), message(Role::User, "2?")];
        ScoreInput { messages: Arc::new(messages), ids: vec![7, 8], ..sample(text, metadata) }
    }

    #[test]
    fn the_arguments_are_those_of_trl() {
        let row = [("answer", "2"), ("cases", "[[1, 2]]"), ("prompt", "2?")];
        let samples = [input("2", &row), input("3", &[])];
        let given = arguments(&samples, &read("source = 'x'"));
        let prompt = json!([
            {"role": "system", "content": "Be brief."}, {"role": "user", "content": "2?"},
        ]);
        let completion = |text| json!([{"role": "assistant", "content": text}]);
        let columns = json!({"answer": ["2", null], "cases": [[[1, 2]], null]});
        assert_eq!(
            given,
            json!({
                "prompts": [prompt, prompt], "completions": [completion("2"), completion("3")],
                "completion_ids": [[7, 8], [7, 8]], "columns": columns,
            })
        );
        let given = arguments(&samples, &read("source = 'x'\nformat = 'text'"));
        assert_eq!(given["prompts"], json!(["2?", "2?"]));
        assert_eq!(given["completions"], json!(["2", "3"]));
    }

    #[test]
    fn columns_have_their_type() {
        for (text, automatic, as_json) in [
            ("5", json!("5"), json!(5)),
            ("[0, 1)", json!("[0, 1)"), json!("[0, 1)")),
            (" [-2, 7]", json!([-2, 7]), json!([-2, 7])),
            ("{\"a\": null}", json!({"a": null}), json!({"a": null})),
            ("true", json!("true"), json!(true)),
            ("", json!(""), json!("")),
        ] {
            assert_eq!(typed(text, None), automatic);
            assert_eq!(typed(text, Some(ColumnType::Json)), as_json);
            assert_eq!(typed(text, Some(ColumnType::Text)), json!(text));
        }
        let params = read("source = 'x'\ncolumns = { answer = 'text', level = 'json' }");
        assert_eq!(params.columns["level"], ColumnType::Json);
    }

    #[test]
    fn errors_name_the_parameter() {
        let sentence = |toml: &str| read(toml).check().unwrap_err().sentence();
        insta::assert_snapshot!(sentence(""), @"path is missing: give it, or source");
        insta::assert_snapshot!(sentence("path = 'a.py'\nsource = 'x'"), @r#"path is "a.py": it must be absent where source is given"#);
        insta::assert_snapshot!(sentence("path = 'a.py'\ntimeout_ms = 1"), @"timeout_ms is 1: it must be from 10 to 600000");
        assert_eq!(read("path = 'a.py'").check(), Ok(()));
    }
}
