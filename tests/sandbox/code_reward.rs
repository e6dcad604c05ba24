//! The code reward: harmless and hostile completions are executed and scored.

#![cfg(target_os = "linux")]

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use serde_json::json;

use hone_reward::code::{BlockChoice, CodeParams, CodeReward, SyntaxReward, grade_python};
use hone_reward::kinds::CodeSyntax;
use hone_reward::sandbox::{Limits, Sandbox, Setup, testing};
use hone_reward::{RewardFn, ScoreInput};

pub async fn sandbox() -> Option<Arc<Sandbox>> {
    let launcher = PathBuf::from(env!("CARGO_BIN_EXE_hone"));
    let setup = Setup { launcher, concurrency: 4, ..Setup::default() };
    testing::sandbox(&setup).await.map(Arc::new)
}

fn params() -> CodeParams {
    CodeParams { timeout_ms: 3_000, memory_mb: 128, ..CodeParams::default() }
}

/// Scores each completion against the same metadata.
async fn score(metadata: &[(&str, &str)], texts: &[&str]) -> Option<Vec<Option<f64>>> {
    let reward = CodeReward::new(params(), sandbox().await?);
    Some(score_with(&reward, metadata, texts).await)
}

async fn score_with(
    reward: &dyn RewardFn,
    metadata: &[(&str, &str)],
    texts: &[&str],
) -> Vec<Option<f64>> {
    let pairs = metadata.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
    let metadata = Arc::new(pairs.collect::<BTreeMap<_, _>>());
    let input = |text: &&str| ScoreInput {
        messages: Arc::default(),
        metadata: Arc::clone(&metadata),
        text: (*text).to_owned(),
        ids: Vec::new(),
    };
    reward.score(&texts.iter().map(input).collect::<Vec<_>>()).await
}

#[tokio::test]
async fn tests_that_pass_are_counted() {
    let tests = "assert add(1, 2) == 3\nassert add(-1, 1) == 0\nassert add('a', 'b') == 'ab'\n\
                 assert add(2, 2) == 5";
    let texts = [
        "Here:\n```python\ndef add(a, b):\n    return a + b\n```\nDone.",
        "def add(a, b): return a - b",
        "```python\ndef add(a, b)\n```",
        "no code at all",
        "",
        "def add(a, b):\n    if b == 2:\n        while True: pass\n    return a + b",
        "def add(a, b): return a + b\nraise SystemExit(0)",
        "import logging, dataclasses, typing, enum, functools\n\
         T = typing.TypeVar('T')\n@dataclasses.dataclass\nclass P:\n    x: int\n\
         class E(enum.Enum):\n    A = 1\nclass N(typing.NamedTuple):\n    y: int\n\
         logging.warning('here')\nprint('noise')\ndef add(a, b): return a + b",
    ];
    let Some(values) = score(&[("tests", tests)], &texts).await else { return };
    let wanted = [0.75, 0.0, 0.0, 0.0, 0.0, 0.5, 0.75, 0.75].map(Some);
    assert_eq!(values, wanted);
}

#[tokio::test]
async fn tests_may_be_a_script_with_setup() {
    let tests = "import math\ncases = [(4, 2), (9, 3)]\nfor n, r in cases:\n    \
                 globals()['last'] = root(n)\nassert last == 3\nassert root(16) == math.isqrt(16)";
    let check = "def check(f):\n    assert f(4) == 2\n    assert f(9) == 3\n\ncheck(root)";
    let right = "def root(n): return int(n ** 0.5)";
    let wrong = "def root(n): return 2";
    let Some(values) = score(&[("tests", tests)], &[right, wrong]).await else { return };
    assert_eq!(values, [Some(1.0), Some(0.0)]);
    let values = score(&[("tests", check)], &[right, wrong]).await.unwrap();
    assert_eq!(values, [Some(1.0), Some(0.0)]);
    // Invalid tests produce no value.
    let values = score(&[("tests", "assert root(")], &[right]).await.unwrap();
    assert_eq!(values, [None]);
    assert_eq!(score(&[], &[right]).await.unwrap(), [None]);
    assert_eq!(score(&[("cases", "{}")], &[right]).await.unwrap(), [None]);
}

#[tokio::test]
async fn tests_that_are_only_defined_are_run() {
    let case = "import unittest\nclass T(unittest.TestCase):\n    def setUp(self): self.sum = 5\n    \
                def test_add(self):\n        with self.subTest(i=1):\n            \
                self.assertEqual(add(2, 3), self.sum)\n        \
                with self.assertRaises(TypeError):\n            add('a', 1)\n\
                if __name__ == '__main__':\n    unittest.main()";
    let right = "def add(a, b): return a + b";
    let wrong = "def add(a, b): return a - b";
    let patched = format!("{wrong}\nimport unittest\nunittest.TestCase.assertEqual = print");
    let ended = format!("{wrong}\nimport os\nos._exit(0)");
    let texts = [right, wrong, patched.as_str(), ended.as_str()];
    for tests in [
        case,
        "def test_add(): assert add(2, 3) == 5",
        "async def test_add(): assert add(2, 3) == 5",
        "class TestAdd:\n    def test_add(self): assert add(2, 3) == 5",
        "METADATA = {}\ndef check(candidate): assert candidate(2, 3) == 5",
        "def test_add(): assert add(2, 3) == 5\nif __name__ == '__main__':\n    test_add()",
        "for i in range(3):\n    assert add(i, 2) == i + 2",
        "try:\n    assert add(2, 3) == 5\nexcept AssertionError:\n    pass",
        "if add(2, 3) != 5:\n    raise ValueError",
        r#"["assert add(2, 3) == 5", "assert add(1, 1) == 2"]"#,
    ] {
        let Some(values) = score(&[("tests", tests)], &texts).await else { return };
        assert_eq!(values, [1.0, 0.0, 0.0, 0.0].map(Some), "{tests}");
    }
    let check = [("tests", "def check(f): assert f(2) == 3"), ("entry_point", "g")];
    let text = "def g(x): return x + 1\ndef f(x): return 0";
    assert_eq!(score(&check, &[text]).await.unwrap(), [Some(1.0)]);
    let catching = "def add(f):\n    try: f()\n    except BaseException: pass";
    let tests = "def test_add():\n    def inner(): assert 1 == 2\n    add(inner)";
    assert_eq!(score(&[("tests", tests)], &[catching]).await.unwrap(), [Some(0.0)]);
}

#[tokio::test]
async fn tests_that_check_nothing_or_cannot_run_give_no_value() {
    for tests in [
        "x = add(2, 3)",
        "add(2, 3) == 5",
        "pass",
        "['assert add(2, 3) == 5']",
        "import pytest\ndef test_add(): assert add(2, 3) == 5",
        "def test_add():\n    import pytest\n    assert add(2, 3) == 5",
        "def test_add(fixture): assert add(2, 3) == 5",
    ] {
        let text = "def add(a, b): return a + b";
        let Some(values) = score(&[("tests", tests)], &[text]).await else { return };
        assert_eq!(values, [None], "{tests}");
    }
}

#[tokio::test]
async fn programs_are_judged_by_their_output() {
    let cases = json!([{"input": "3\n", "output": "6"}, {"input": "4\n", "output": "8"}]);
    let right = [
        "print(int(input()) * 2)\nexit()",
        "import sys\nprint(int(sys.stdin.read()) * 2)\nsys.exit(0)",
        "print(int(input()) * 2)\nraise SystemExit",
        "print(int(open(0).read()) * 2)",
        "import os\nos.write(1, b'%d' % (int(os.read(0, 100)) * 2))\nos._exit(0)",
        "import os\nprint(int(os.fdopen(0).read()) * 2)",
        "import fileinput\nfor line in fileinput.input(): print(int(line) * 2)",
        "import builtins\nif hasattr(builtins, 'k'): print('seen')\nbuiltins.k = 1\n\
         print(int(input()) * 2)",
        "from __future__ import annotations\nprint(int(input()) * 2)",
    ];
    let Some(values) = score(&[("cases", &cases.to_string())], &right).await else { return };
    for (value, text) in values.iter().zip(right) {
        assert_eq!(*value, Some(1.0), "{text}");
    }
    let failing = ["print(int(input()) * 2)\nexit(3)", "print(int(input()) * 2)\n1 / 0"];
    let values = score(&[("cases", &cases.to_string())], &failing).await.unwrap();
    assert_eq!(values, [Some(0.0), Some(0.0)]);
}

#[tokio::test]
async fn input_output_pairs_compare_outputs() {
    let cases = json!([
        {"input": "1 2\n", "output": "3"},
        {"input": "10 -4\n", "output": "6\n"},
        {"input": "0.5 0.5", "output": "1.0"},
    ]);
    let texts = [
        "```python\na, b = map(int, input().split())\nprint(a + b)\n```",
        "import sys\na, b = sys.stdin.buffer.read().split()\n\
         sys.stdout.buffer.write(str(int(a) + int(b)).encode())",
        "a, b = map(float, input().split())\nprint(a + b)",
        "def main():\n    print(3)\nif __name__ == '__main__':\n    main()",
        "print(open('/proc/self/cmdline').read())",
        "while True: print('x' * 10000)",
    ];
    let Some(values) = score(&[("cases", &cases.to_string())], &texts).await else { return };
    let third = 1.0 / 3.0;
    assert_eq!(values, [2.0 * third, 2.0 * third, third, third, 0.0, 0.0].map(Some));
}

#[tokio::test]
async fn calls_compare_returned_values() {
    let calls = json!([[1, 2], [-3, -6], ["ab", "abab"], [[1], [1, 1]]]).to_string();
    let key = |name| [(name, calls.as_str())];
    let texts = [
        "```python\ndef solution(x):\n    return x * 2\n```",
        "def solution(x): return x + x if isinstance(x, int) else None",
        "def solution(x): return float(2 * x)",
        "def solution(x):\n    while isinstance(x, str): pass\n    return 2 * x",
        "def solution(x): raise SystemExit(0)",
        "def solution(x): return 2 * x\n1 / 0",
        "def solution(x, y): return 2 * x",
        "def other(x): return 2 * x",
        "import builtins\nsolution = lambda x: tuple(2 * x) if type(x) is list else 2 * x",
        "import json\njson.dumps = lambda *_: '2'\ndef solution(x): return object()",
        // An object that equals everything is no JSON.
        "class Any:\n    def __eq__(self, other): return True\ndef solution(x): return Any()",
        "import os\ndef solution(x):\n    os.write(4, b'0' * 64 + b' 0 32\\n')\n    os._exit(0)",
        "import sys\ndef solution(x):\n    frame = sys._getframe()\n    return 2 * x",
        "def solution(x):\n    print(x)\n    return float('nan')",
    ];
    let Some(values) = score(&key("test_cases"), &texts).await else { return };
    let wanted = [1.0, 0.5, 0.5, 0.75, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0].map(Some);
    assert_eq!(values, wanted);
    // All kinds of tests are counted together.
    let both = [key("test_cases")[0], ("tests", "assert solution(0) == 0\nassert False")];
    assert_eq!(score(&both, &texts[..1]).await.unwrap(), [Some(5.0 / 6.0)]);
    assert_eq!(score(&[("test_cases", "[1]")], &texts[..1]).await.unwrap(), [None]);
    assert_eq!(score(&[("test_cases", "[]")], &texts[..1]).await.unwrap(), [None]);
    // All or nothing, of the first block and another function.
    let params = CodeParams {
        calls: "pairs".to_owned(),
        function: "double".to_owned(),
        block: BlockChoice::First,
        partial: false,
        ..params()
    };
    let reward = CodeReward::new(params, sandbox().await.unwrap());
    let texts = [
        "```\ndef double(x): return 2 * x\n```\n```\ndef double(x): return x\n```",
        "```\ndef double(x): return x\n```\n```\ndef double(x): return 2 * x\n```",
        "def double(x): return 2 * x if isinstance(x, int) else x",
    ];
    let values = score_with(&reward, &key("pairs"), &texts).await;
    assert_eq!(values, [Some(1.0), Some(0.0), Some(0.0)]);
    let assertions = [("tests", "assert double(1) == 2\nassert double(1) == 3")];
    assert_eq!(score_with(&reward, &assertions, &texts[..1]).await, [Some(0.0)]);
}

#[tokio::test]
async fn syntax_is_checked_without_running_code() {
    let Some(sandbox) = sandbox().await else { return };
    let nested = format!("```\nx = {}\n```", "(".repeat(100_000));
    let minus = format!("```\nx = {}1\n```", "-".repeat(1_000_000));
    let texts = [
        "```python\nx = 1\n```",
        "```python\nx =\n```",
        nested.as_str(),
        "```\nimport os\nos._exit(1)\n```",
        minus.as_str(),
        "```\nreturn 1\n```",
        "no block",
        "```\n \n```",
        "```\nx =\n```\n```\nwhile True: pass",
        "",
    ];
    let wanted = [1, 0, 0, 1, 0, 0, 0, 0, 1, 0].map(|n| Some(f64::from(n)));
    let reward = SyntaxReward::new(CodeSyntax::default(), Arc::clone(&sandbox));
    assert_eq!(score_with(&reward, &[], &texts).await, wanted);
    assert_eq!(score_with(&reward, &[], &[]).await, []);
    let whole = CodeSyntax { require_block: false, block: BlockChoice::First };
    let reward = SyntaxReward::new(whole, sandbox);
    let texts = ["x = 1", "no block", "", texts[8]];
    assert_eq!(score_with(&reward, &[], &texts).await, [1.0, 0.0, 0.0, 0.0].map(Some));
}

#[tokio::test]
async fn attacks_score_nothing() {
    let tests = "assert answer() == 42";
    let texts = [
        // Attacks, each followed by the right answer.
        "import os\nwhile True: os.fork()\ndef answer(): return 42",
        "def answer():\n    while True: pass",
        "hog = []\nwhile True: hog.append(bytearray(1 << 22))",
        "def answer():\n    open('/tmp/hone-code-was-here', 'w').write('x')\n    return 42",
        "import socket\ndef answer():\n    socket.create_connection(('127.0.0.1', 80), 1)\n    \
         return 42",
        // Forged reports.
        "import os\nfor i in range(9): os.write(4, b'%d 1\\n' % i)\nos._exit(0)",
        "import os\nos.write(4, b'0' * 64 + b' 0 1\\n' + b'0' * 64 + b' count 1\\n')\nos._exit(0)",
        "import sys\nframe = sys._getframe()\nwhile frame:\n    nonce = frame.f_locals.get('nonce')\n    \
         frame = frame.f_back\n    if nonce:\n        def answer(): return 42\n        break",
        "try:\n    1 / 0\nexcept Exception as e:\n    frame = e.__traceback__.tb_frame\n    \
         while frame:\n        if 'nonce' in frame.f_locals:\n            def answer(): return 42\n        \
         frame = frame.f_back",
        "import gc\nfor o in gc.get_objects():\n    if isinstance(o, dict) and 'nonce' in o:\n        \
         def answer(): return 42",
        "import signal\ndef catch(n, frame):\n    global answer\n    answer = lambda: 42\n\
         signal.signal(signal.SIGALRM, catch)\nsignal.raise_signal(signal.SIGALRM)",
        "import sys\ndef look(frame, *_):\n    global answer\n    answer = lambda: 42\nsys.settrace(look)\n\
         (lambda: 0)()",
        "import __main__\nassert __main__.nonce\ndef answer(): return 42",
        // Attempts to read the input again.
        "import os\nos.lseek(0, 0, 0)\nassert b'nonce' in os.read(0, 9999)\ndef answer(): return 42",
        "import os\nos.lseek(3, 0, 0)\ndef answer(): return 42",
        "def answer(): raise SystemExit(0)",
    ];
    let Some(values) = score(&[("tests", tests)], &texts).await else { return };
    for (value, text) in values.iter().zip(texts) {
        assert_eq!(*value, Some(0.0), "{text}");
    }
    assert!(!std::path::Path::new("/tmp/hone-code-was-here").exists());
    // The reward still works after the attacks.
    let fine = score(&[("tests", tests)], &["answer = lambda: 42"]).await.unwrap();
    assert_eq!(fine, [Some(1.0)]);
}

#[tokio::test]
async fn a_python_grader_must_return_a_number() {
    let Some(sandbox) = sandbox().await else { return };
    let limits = Limits { wall_ms: 2_000, ..Limits::default() };
    let sample = json!({"output_text": "42", "choices": []});
    let item = json!({"reference": "42", "nested": {"é": [1, 2.5, null]}});
    let grade = async |source: &str| grade_python(source, &sandbox, limits, &sample, &item).await;
    let exact = "def grade(sample, item):\n    print('noise')\n    \
                 return 1.0 if sample['output_text'] == item['reference'] else 0.0";
    assert_eq!(grade(exact).await.unwrap(), 1.0);
    assert_eq!(
        grade("def grade(sample, item): return len(item['nested']['é'])").await.unwrap(),
        3.0
    );
    assert_eq!(grade("def grade(sample, item): return True").await.unwrap(), 1.0);
    let error = grade("def grade(sample, item): return sample['nothing']").await.unwrap_err();
    assert_eq!(error.to_string(), "the grader's source failed: KeyError: 'nothing'");
    let error = grade("def other(): pass").await.unwrap_err();
    assert!(error.to_string().contains("no function grade(sample, item)"), "{error}");
    let error = grade("def grade(s, i): return float('nan')").await.unwrap_err();
    assert_eq!(error.to_string(), "the grader's source returned nan, not a finite number");
    // Python defines `exit` in the module site, which is not loaded.
    for (source, expected) in
        [("exit(0)", "NameError"), ("raise SystemExit", "it ended without a value")]
    {
        let error = grade(&format!("def grade(s, i): {source}")).await.unwrap_err().to_string();
        assert!(error.starts_with(&format!("the grader's source failed: {expected}")), "{error}");
    }
    let error = grade("def grade(s, i):\n    while True: pass").await.unwrap_err();
    assert!(error.to_string().starts_with("the grader's source was stopped: "), "{error}");
}
