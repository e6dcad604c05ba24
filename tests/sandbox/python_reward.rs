//! Reward functions with TRL's signature, in the sandbox and in the example webhook.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use insta::assert_snapshot;

use hone_core::metrics::Metrics;
use hone_core::types::{Message, Role};
use hone_reward::code::{PythonFunction, PythonParams};
use hone_reward::kinds::Kind;
use hone_reward::webhook::{Webhook, WebhookParams};
use hone_reward::{RewardFn, Routes, ScoreInput, Tools};

use crate::code_reward::sandbox;
use crate::guide_cases::cases;

/// The three functions of the guides to GRPO, as a user of TRL writes them.
const GUIDES: &str = r#"
import re


def extract_final_answer(text):
    match = re.search(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return match.group(1).strip() if match else ""


def correctness_reward(prompts, completions, answer, **kwargs):
    responses = [completion[0]["content"] for completion in completions]
    return [2.0 if extract_final_answer(r) == a else 0.0 for r, a in zip(responses, answer)]


def format_reward(completions, **kwargs):
    pattern = r"<reasoning>.*?</reasoning>\s*<answer>.*?</answer>"
    texts = [completion[0]["content"] for completion in completions]
    return [1.0 if re.search(pattern, text, re.DOTALL) else 0.0 for text in texts]


def incremental_format_reward(completions, **kwargs):
    rewards = []
    for completion in completions:
        text, score = completion[0]["content"], 0.0
        for tag in ("<reasoning>", "</reasoning>", "<answer>", "</answer>"):
            score += 0.25 if tag in text else 0.0
        if text.count("</answer>") == 1:
            score -= 0.001 * len(text.split("</answer>")[1].strip())
        rewards.append(score)
    return rewards


if __name__ == "__main__":
    raise SystemExit("training starts here")
"#;

fn input(text: &str, metadata: &[(&str, &str)]) -> ScoreInput {
    let pairs = metadata.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
    let message = |role, content: &str| Message::new(role, content);
    ScoreInput {
        messages: Arc::new(vec![message(Role::System, "Be brief."), message(Role::User, "6 * 7?")]),
        metadata: Arc::new(pairs.collect::<BTreeMap<_, _>>()),
        text: text.to_owned(),
        ids: vec![1; text.len()],
    }
}

fn params(source: &str) -> PythonParams {
    PythonParams { source: source.to_owned(), timeout_ms: 5_000, ..PythonParams::default() }
}

async fn function(params: PythonParams) -> Option<PythonFunction> {
    Some(PythonFunction::new(params, sandbox().await?, "route", "part").unwrap())
}

#[tokio::test]
async fn the_functions_of_the_guides_run_unchanged() {
    for (name, called) in [
        ("correctness_answer_tag", "correctness_reward"),
        ("format_soft", "format_reward"),
        ("format_incremental", "incremental_format_reward"),
    ] {
        let params = PythonParams { function: called.to_owned(), ..params(GUIDES) };
        let Some(function) = function(params).await else { return };
        let cases = cases(name);
        let samples: Vec<ScoreInput> = cases.iter().map(|case| case.input.clone()).collect();
        // All in one call.
        let values = function.call(&samples).await.unwrap();
        assert!(values.len() > 20);
        for (value, case) in values.iter().zip(&cases) {
            let equal = value.is_some_and(|value| (value - case.expected).abs() < 1e-12);
            assert!(equal, "{called} of {}: {value:?}, not {}", case.text, case.expected);
        }
    }
}

#[tokio::test]
async fn values_and_arguments_are_those_of_trl() {
    let texts = ["42", "a 43", ""];
    let rows: Vec<ScoreInput> = texts
        .iter()
        .map(|text| input(text, &[("answer", "42"), ("n", "3"), ("pairs", "[[1, 2], [3, 4]]")]))
        .collect();
    for (lines, wanted) in [
        // What a function may return.
        ("def f(completions, **_): return [None, float('nan'), True]", [None, None, Some(1.0)]),
        ("def f(completions, **_): return [float('inf'), 1, -0.5]", [None, Some(1.0), Some(-0.5)]),
        (
            "def f(completions, **_): return (len(c[0]['content']) for c in completions)",
            [Some(2.0), Some(4.0), Some(0.0)],
        ),
        (
            "from fractions import Fraction\ndef f(completions, **_): return [Fraction(1, 4)] * 3",
            [Some(0.25); 3],
        ),
        (
            "import asyncio\nasync def f(completions, **_):\n    await asyncio.sleep(0)\n    return [1.5] * 3",
            [Some(1.5); 3],
        ),
        // What it gets.
        (
            "def f(completions, answer): return [c[0]['content'] == a for c, a in zip(completions, answer)]",
            [Some(1.0), Some(0.0), Some(0.0)],
        ),
        (
            "def f(prompts, completions):\n    assert prompts[0] == [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': '6 * 7?'}]\n    assert completions[0] == [{'role': 'assistant', 'content': '42'}]\n    return [1] * len(prompts)",
            [Some(1.0); 3],
        ),
        (
            "def f(completions, completion_ids, **_): return [len(ids) for ids in completion_ids]",
            [Some(2.0), Some(4.0), Some(0.0)],
        ),
        ("def f(completions, pairs, **_): return [p[1][0] for p in pairs]", [Some(3.0); 3]),
        ("def f(completions, n, **_): return [n == ['3'] * 3] * 3", [Some(1.0); 3]),
        (
            "def f(completions, nothing=2, **columns):\n    log = columns['log_extra']('x', [1]), columns['log_metric']('y', 1)\n    return [nothing + (columns['trainer_state'] is None) + ('prompt' in columns)] * 3",
            [Some(3.0); 3],
        ),
        // What it can do: print, see the whole group, be an object, use dataclasses.
        (
            "print('loaded')\ndef f(completions, **_):\n    print('scored', '\\u00e9')\n    return [1, 2, 3]",
            [Some(1.0), Some(2.0), Some(3.0)],
        ),
        (
            "def f(completions, **_):\n    sizes = sorted(len(c[0]['content']) for c in completions)\n    return [sizes.index(len(c[0]['content'])) for c in completions]",
            [Some(1.0), Some(2.0), Some(0.0)],
        ),
        (
            "import dataclasses\n@dataclasses.dataclass\nclass Scale:\n    by: float\n    def __call__(self, completions, **_): return [self.by] * len(completions)\nf = Scale(0.5)",
            [Some(0.5); 3],
        ),
    ] {
        let mut params = params(lines);
        params.function = "f".to_owned();
        let Some(function) = function(params).await else { return };
        assert_eq!(function.call(&rows).await.unwrap(), wanted, "{lines}");
        assert_eq!(function.score(&rows).await, wanted, "{lines}");
    }
}

#[tokio::test]
async fn texts_and_types_of_columns_are_configurable() {
    let source = "def f(prompts, completions, n, pairs):\n    \
                  assert prompts == ['6 * 7?'] * 16 and pairs == ['[1]'] * 16\n    \
                  return [len(c) + n[0] for c in completions]";
    let toml = format!(
        "source = {source:?}\nformat = \"text\"\ncolumns = {{ n = \"json\", pairs = \"text\" }}"
    );
    let Some(function) = function(toml::from_str(&toml).unwrap()).await else { return };
    let texts: Vec<String> = (0..16).map(|n| "x".repeat(n)).collect();
    let rows: Vec<_> = texts.iter().map(|t| input(t, &[("n", "100"), ("pairs", "[1]")])).collect();
    let wanted: Vec<Option<f64>> = (0..16_u32).map(|n| Some(f64::from(n) + 100.0)).collect();
    assert_eq!(function.call(&rows).await.unwrap(), wanted);
    assert_eq!(function.score(&[]).await, []);
}

#[tokio::test]
async fn a_function_that_fails_leaves_its_group_without_values() {
    let rows = [input("a", &[("answer", "42")]), input("b", &[])];
    let mut errors = Vec::new();
    for lines in [
        "def f(completions, **_): return [1.0]",
        "def f(completions, **_): pass",
        "def f(completions, **_): return ['1', 2]",
        "\ndef f(completions, answer, **_):\n    return [len(a) for a in answer]",
        "def f(completions, solution): return [0, 0]",
        "import torch\ndef f(completions): return [0, 0]",
        "def f(completions): return {}['x']",
        "def f(completions):\n    while True: pass",
        "def f(completions): return [bytearray(1 << 30), 1]",
        "def f(completions): raise SystemExit(0)",
        "import os\ndef f(completions): os._exit(0)",
        "def f(completions):\n    while True: print('x' * 100_000)",
    ] {
        let mut params = params(lines);
        params.timeout_ms = 2_000;
        let Some(function) = function(params).await else { return };
        errors.push(function.call(&rows).await.unwrap_err().sentence());
        assert_eq!(function.score(&rows).await, [None, None], "{lines}");
    }
    assert_snapshot!(errors.join("\n"), @r#"
    ValueError: the function returned 1 values for 2 completions
    TypeError: the function returned None instead of a list
    TypeError: the function returned the text '1' instead of a number
    line 3: TypeError: object of type 'NoneType' has no len()
    TypeError: the function has the argument `solution`, and the prompt has no such column
    line 1: ModuleNotFoundError: No module named 'torch' (the sandbox has the standard library only)
    line 1: KeyError: 'x'
    it was stopped: it exceeded its time limit
    line 1: MemoryError
    line 1: SystemExit: 0
    it ended without an answer
    it was stopped: it exceeded its output limit
    "#);
}

/// The message of a route with one part of this TOML.
async fn refusal(part: &str) -> Option<String> {
    let toml = format!("[[route]]\nname = \"r\"\n[[route.reward]]\nname = \"p\"\n{part}");
    let config = hone::config::parse(&toml).unwrap();
    let tools = Tools { sandbox: Some(sandbox().await?), ..Tools::default() };
    let error = match Routes::with(&config.routes, &tools) {
        Ok(routes) => routes.probe().await.unwrap_err(),
        Err(error) => error,
    };
    Some(error.to_string())
}

#[tokio::test]
async fn a_source_without_the_function_is_refused_at_start() {
    let mut errors = Vec::new();
    for part in [
        "kind = 'python'\npath = 'no-such-file.py'",
        "kind = 'python'\nsource = 'def f(:'",
        "kind = 'python'\nsource = 'import numpy'",
        "kind = 'python'\nsource = 'def helper(x): pass'",
        "kind = 'python'\nsource = '''\ndef f(completions): pass\ndef g(completions): pass'''",
        "kind = 'python'\nfunction = 'format'\nsource = 'def f(completions): pass'",
        "kind = 'python'\nfunction = 'f'\nsource = 'f = 1'",
        "kind = 'python'\nsource = 'while True: pass'\ntimeout_ms = 300\nscale = 2.0",
        "kind = 'ensemble'\nof = [{ kind = 'think_format' }, { kind = 'python', source = '1 / 0' }]",
    ] {
        let Some(error) = refusal(part).await else { return };
        errors.push(error);
    }
    assert_snapshot!(errors.join("\n"), @r#"
    route `r`, reward `p`: path is "no-such-file.py", which cannot be read: No such file or directory (os error 2)
    route `r`, reward `p`: source fails: line 1: SyntaxError: invalid syntax
    route `r`, reward `p`: source fails: line 1: ModuleNotFoundError: No module named 'numpy' (the sandbox has the standard library only)
    route `r`, reward `p`: function is missing: no function of the source has an argument `completions`, so name one
    route `r`, reward `p`: function is missing: the source defines f, g, so name one of them
    route `r`, reward `p`: function is "format": the source has no such function, only f
    route `r`, reward `p`: function is "f": the source has no such function, and no other
    route `r`, reward `p`: source fails: it was stopped: it exceeded its time limit
    route `r`, reward `p`: of[1].source fails: line 1: ZeroDivisionError: division by zero
    "#);
}

/// Runs the binary; returns its exit code and standard error.
fn hone(dir: &Path, args: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hone"));
    let output = command.args(args).current_dir(dir).output().unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

#[tokio::test]
async fn commands_report_a_bad_file_before_anything_else() {
    if sandbox().await.is_none() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
    write("rewards.py", "import re\n\ndef correct(completions, **_):\n    return [0.0)\n");
    write("rows.jsonl", "{\"prompt\": \"2?\", \"answer\": \"2\"}\n");
    write(
        "hone.toml",
        "[dataset]\npath = \"rows.jsonl\"\n[[route]]\nname = \"default\"\n[[route.reward]]\n\
         name = \"correct\"\nkind = \"python\"\npath = \"rewards.py\"\n",
    );
    let (code, error) = hone(dir.path(), &["validate", "--config", "hone.toml"]);
    assert_eq!(code, Some(2), "{error}");
    assert_snapshot!(error.trim_end(), @r#"error: route `default`, reward `correct`: path is "rewards.py", which fails: line 4: SyntaxError: closing parenthesis ')' does not match opening parenthesis '['"#);
    let (code, error) = hone(dir.path(), &["train", "--steps", "1", "--config", "hone.toml"]);
    assert_ne!(code, Some(0));
    assert!(error.contains("path is \"rewards.py\", which fails: line 4: SyntaxError"), "{error}");
    write("rewards.py", GUIDES);
    let (code, error) = hone(dir.path(), &["validate", "--config", "hone.toml"]);
    assert_eq!(code, Some(2));
    assert!(
        error.contains("function is missing: the source defines correctness_reward"),
        "{error}"
    );
    write("rewards.py", "def correct(completions, **_): return [0.0]\n");
    let (code, error) = hone(dir.path(), &["validate", "--config", "hone.toml"]);
    assert_eq!(code, Some(0), "{error}");
}

/// `examples/webhook_server.py` with a function; killed when dropped.
struct ExampleServer(Child);

impl Drop for ExampleServer {
    fn drop(&mut self) {
        let _ended = self.0.kill();
        let _reaped = self.0.wait();
    }
}

#[tokio::test]
async fn the_example_webhook_computes_the_same_values() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("rewards.py");
    let source = format!(
        "{GUIDES}\nasync def pairs_reward(completions, pairs):\n    \
         return [None if p is None else p[0][1] for p in pairs]\n"
    );
    std::fs::write(&file, &source).unwrap();
    let answers = [("answer", "42"), ("pairs", "[[1, 2]]")];
    let right = "<reasoning>6 * 7</reasoning>\n<answer> 42 </answer>";
    let rows = [
        input(right, &answers),
        input("<answer>41</answer> so", &answers),
        input("42", &answers[..1]),
    ];
    for name in ["correctness_reward", "incremental_format_reward", "pairs_reward"] {
        let params = PythonParams {
            path: file.clone(),
            function: name.to_owned(),
            ..PythonParams::default()
        };
        let Some(function) = function(params).await else { return };
        let mut child = Command::new("python3")
            .args(["examples/webhook_server.py", "0", &format!("{}:{name}", file.display())])
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .env("SECRET", "a secret")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let _server = ExampleServer(child);
        let port: u16 = line.trim().rsplit(' ').next().unwrap().parse().unwrap();
        let toml = format!("url = \"http://127.0.0.1:{port}/\"\nsecret_env = \"SECRET\"");
        let mut params: WebhookParams = toml::from_str(&toml).unwrap();
        params.resolve(&|_| Some("a secret".to_owned())).unwrap();
        let metrics = Arc::new(Metrics::new().unwrap());
        let webhook = Webhook::new(&params, "route", "part", &metrics).unwrap();
        let values = webhook.score(&rows).await;
        assert_eq!(values, function.call(&rows).await.unwrap(), "{name}");
        assert!(values.iter().flatten().count() > 1, "{values:?}");
    }
}
