//! What `hone validate` reports about a dataset, and the failures of a run that cannot learn from it.

use std::path::Path;
use std::process::Command;

use insta::assert_snapshot;
use tempfile::TempDir;

/// Rows in the form of GSM8K.
const RAW: &str = concat!(
    r#"{"question":"3 * 4?","answer":"3 * 4 = <<3*4=12>>12\n#### 12"}"#,
    "\n",
    r#"{"question":"2 + 3?","answer":"2 + 3 = 5\n#### 5"}"#,
    "\n",
);
const COLUMNS: &str = "prompt_column = 'question'\nextract_answer = '####'\n";
const CORRECT: &str = "{ name = 'correct', kind = 'numeric_match' }";

/// A directory with a dataset and a configuration.
struct RunDir(TempDir);

impl RunDir {
    fn new(rows: &str, dataset: &str, parts: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("raw.jsonl"), rows).unwrap();
        let config = format!(
            "[dataset]\npath = 'raw.jsonl'\n{dataset}\n[rollout]\ngroup_size = 2\nmax_tokens = 2\n\
             [train]\nsamples_per_step = 4\nmax_steps = 1\n\
             [[route]]\nname = 'default'\nreward = [{parts}]\n"
        );
        std::fs::write(dir.path().join("hone.toml"), config).unwrap();
        Self(dir)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// The exit code and the output, of which paths in the directory are relative.
    fn hone(&self, args: &[&str]) -> (i32, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hone"));
        let output = command.args(args).current_dir(self.path()).output().unwrap();
        let text = [output.stdout, output.stderr].concat();
        (output.status.code().unwrap(), String::from_utf8(text).unwrap())
    }

    fn validate(&self) -> String {
        let (code, text) = self.hone(&["validate", "--config", "hone.toml"]);
        format!("{code}\n{text}")
    }

    /// The exit code and the output without logged warnings: rollout samples while the data is checked, so
    /// whether it warns of an unscored group depends on timing.
    fn train(&self) -> String {
        let (code, text) = self.hone(&["train", "--config", "hone.toml"]);
        let lines = text.split_inclusive('\n').filter(|line| !line.contains("  WARN hone_"));
        format!("{code}\n{}", lines.collect::<String>())
    }
}

#[test]
fn validation_reports_the_dataset() {
    let run = RunDir::new(RAW, COLUMNS, CORRECT);
    let (code, text) = run.hone(&["validate", "--config", "hone.toml"]);
    assert_eq!(code, 0, "{text}");
    let lines: Vec<&str> = text.lines().collect();
    let dataset = "dataset   raw.jsonl: 2 prompts to train on, 0 held out, of 2 rows; columns answer, question";
    assert_eq!(&lines[..2], ["the configuration is valid", dataset]);
    let answers = "answers   dataset.extract_answer = \"####\" finds an answer in every row; the first are \"12\", \"5\"";
    assert_eq!(lines[2], answers);
    assert!(lines[3].starts_with("prompts   ") && lines[3].contains("tokens, median "), "{text}");
    assert_eq!(
        &lines[4..],
        ["rewards   correct (numeric_match) of route `default` can score every prompt"]
    );
    let left: Vec<_> = std::fs::read_dir(run.path()).unwrap().collect();
    assert_eq!(left.len(), 2, "validation writes nothing: {left:?}");
}

#[test]
fn validation_grades_references_and_worked_examples() {
    let examples = "few_shot = [{ user = '1 + 1?', assistant = 'It is 2.' }]\n";
    let strict = "{ name = 'correct', kind = 'numeric_match', extract = 'Answer: (.*)' }";
    let run = RunDir::new(RAW, &format!("{COLUMNS}{examples}"), strict);
    let (code, text) = run.hone(&["validate", "hone.toml"]);
    let warnings: Vec<&str> = text.lines().filter(|line| line.starts_with("warning")).collect();
    assert_snapshot!(format!("{code}\n{}", warnings.join("\n")), @r#"
    0
    warning   correct (numeric_match) of route `default` gives 0 to the references of 2 of 2 prompts as completions; line 1: "12"; change the part's parameters, such as `extract`, or the references
    warning   correct of route `default` finds no answer in the worked example "It is 2."; change `extract` of the part, or the example
    "#);
    // By default a text without tags is the answer.
    let run = RunDir::new(RAW, &format!("{COLUMNS}{examples}"), CORRECT);
    let (code, text) = run.hone(&["validate", "hone.toml"]);
    assert_eq!((code, text.contains("warning")), (0, false), "{text}");
}

#[test]
fn a_missing_dataset_is_one_error() {
    let run = RunDir::new(RAW, COLUMNS, CORRECT);
    std::fs::remove_file(run.path().join("raw.jsonl")).unwrap();
    assert_snapshot!(run.validate(), @r"
    2
    error: `raw.jsonl`: No such file or directory (os error 2)
    ");
    assert_snapshot!(run.train(), @r"
    2
    error: `raw.jsonl`: No such file or directory (os error 2)
    ");
    let (code, text) = run.hone(&["validate", "--config", "hone.toml", "--config-only"]);
    assert_eq!((code, text.as_str()), (0, "the configuration is valid\n"));
}

#[test]
fn a_column_without_answers_is_one_error() {
    let wrong = "prompt_column = 'question'\nanswer_column = 'solution'\n";
    let boxed = COLUMNS.replace("####", r"\boxed{}");
    let [column, extraction] = [wrong, &boxed].map(|keys| {
        let run = RunDir::new(RAW, keys, CORRECT);
        assert_eq!(run.train(), run.validate());
        run.validate()
    });
    assert_snapshot!(column, @r"
    2
    error: `raw.jsonl`: no row has the column `solution` (dataset.answer_column); the columns are answer, question
    ");
    assert_snapshot!(extraction, @r#"
    2
    error: `raw.jsonl`: no row has an answer; line 1: `answer` is "3 * 4 = <<3*4=12>>12\n#### 12", in which dataset.extract_answer = "\\boxed{}" finds no answer
    "#);
}

#[test]
fn parts_that_are_all_missing_end_a_run() {
    // Without extraction the whole derivation is the reference, which is no number.
    let run = RunDir::new(RAW, "prompt_column = 'question'\n", CORRECT);
    assert_snapshot!(run.validate(), @r#"
    2
    error: correct (numeric_match) of route `default` can score no prompt; line 1: it cannot use the metadata `answer`, "3 * 4 = <<3*4=12>>12\n#### 12"
    "#);
    assert_snapshot!(run.train(), @r#"
    2
    error: no completion could be scored: correct (numeric_match) of route `default` can score no prompt; line 1: it cannot use the metadata `answer`, "3 * 4 = <<3*4=12>>12\n#### 12"
    "#);
}

#[test]
fn prompts_that_are_all_too_long_end_a_run() {
    let run = RunDir::new(RAW, &format!("{COLUMNS}max_prompt_tokens = 2\n"), CORRECT);
    let expected =
        "error: every prompt is longer than dataset.max_prompt_tokens (2): the shortest has ";
    let (validated, trained) = (run.validate(), run.train());
    assert!(validated.starts_with("2\n") && validated.contains(expected), "{validated}");
    assert!(trained.starts_with("2\n") && trained.contains(expected), "{trained}");
}

#[test]
fn one_missing_part_does_not_end_a_run() {
    let parts =
        format!("{CORRECT}, {{ name = 'steps', kind = 'exact_match', reference = 'steps' }}");
    let run = RunDir::new(RAW, COLUMNS, &parts);
    let (code, text) = run.hone(&["train", "--config", "hone.toml"]);
    assert_eq!(code, 0, "{text}");
    assert!(text.contains("steps (exact_match) of route `default` can score no prompt"), "{text}");
}
