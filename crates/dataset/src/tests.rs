use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use insta::assert_snapshot;
use proptest::prelude::*;
use tempfile::TempDir;

use hone_core::types::{Message, Role};

use super::*;

struct Files(TempDir);

impl Files {
    fn new() -> Self {
        Self(TempDir::new().unwrap())
    }

    fn put(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    /// The error without the directory.
    fn error(&self, config: &DatasetConfig) -> String {
        let error = Dataset::open(config).unwrap_err().to_string();
        error.replace(&format!("{}/", self.0.path().display()), "")
    }
}

pub(crate) fn open(name: &str, text: &str, change: impl FnOnce(&mut DatasetConfig)) -> Dataset {
    let files = Files::new();
    let mut config = DatasetConfig::at(&files.put(name, text));
    change(&mut config);
    Dataset::open(&config).unwrap()
}

pub(crate) fn error(name: &str, text: &str, change: impl FnOnce(&mut DatasetConfig)) -> String {
    let files = Files::new();
    let mut config = DatasetConfig::at(&files.put(name, text));
    change(&mut config);
    files.error(&config)
}

pub(crate) fn turns(prompt: &Prompt) -> Vec<String> {
    prompt.messages.iter().map(|m| format!("{}: {}", m.role.as_str(), m.content)).collect()
}

pub(crate) fn metadata(prompt: &Prompt) -> Vec<(&str, &str)> {
    prompt.metadata.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect()
}

/// JSONL rows `n + n = ?`.
fn lines(numbers: std::ops::Range<usize>) -> String {
    numbers.map(|n| format!("{{\"prompt\":\"{n} + {n} = ?\",\"answer\":{}}}\n", 2 * n)).collect()
}

#[test]
fn columns_become_metadata() {
    let text = concat!(
        r#"{"messages":[{"role":"system","content":"Add."},{"role":"user","content":"1+1="}],"#,
        r#""answer":2,"level":"easy","tags":["a","b"],"hard":false,"note":null,"prompt":"p"}"#,
        "\n\n",
        r#"{"messages":[{"role":"user","content":"é"}],"answer":" x "}"#,
        "\n",
    );
    let dataset = open("a.jsonl", text, |_| {});
    let [first, second] = &dataset.train[..] else { panic!("{dataset:?}") };
    assert_eq!((first.place, second.place), (RowPlace::Line(1), RowPlace::Line(3)));
    assert_eq!(turns(first), ["system: Add.", "user: 1+1="]);
    let expected = [
        ("answer", "2"),
        ("hard", "false"),
        ("level", "easy"),
        ("prompt", "p"),
        ("tags", r#"["a","b"]"#),
    ];
    assert_eq!(metadata(first), expected);
    assert_eq!(second.metadata["answer"], " x ");
    let report = &dataset.report;
    assert_eq!((report.rows, report.bad, report.train, report.held_out), (2, 0, 2, 0));
    assert_eq!(report.columns, ["answer", "hard", "level", "messages", "note", "prompt", "tags"]);
}

#[test]
fn errors_name_the_line_and_the_column() {
    let with = |row: &str| {
        let good = r#"{"messages":[{"role":"user","content":"x"}],"answer":"y"}"#;
        error("a.jsonl", &format!("{good}\n{row}\n{good}\n"), |_| {})
    };
    let message = |message: &str| with(&format!(r#"{{"messages":[{message}],"answer":"y"}}"#));
    assert_snapshot!(with("{"), @"`a.jsonl`, line 2: not JSON: EOF while parsing an object at column 1");
    assert_snapshot!(with("[1]"), @"`a.jsonl`, line 2: not a JSON object");
    assert_snapshot!(with(r#"{"answer":"y"}"#), @"`a.jsonl`, line 2: `messages` is missing, and so is `prompt`");
    assert_snapshot!(with(r#"{"messages":"x","answer":"y"}"#), @"`a.jsonl`, line 2: `messages` is not a list of {role, content}");
    assert_snapshot!(with(r#"{"prompt":" ","answer":"y"}"#), @"`a.jsonl`, line 2: `prompt` is empty");
    assert_snapshot!(with(r#"{"prompt":3,"answer":"y"}"#), @"`a.jsonl`, line 2: `prompt` is neither a text nor a list of messages");
    assert_snapshot!(with(r#"{"messages":[{"role":"user","content":"x"}]}"#), @"`a.jsonl`, line 2: `answer` is missing");
    assert_snapshot!(with(r#"{"prompt":"x","answer":null}"#), @"`a.jsonl`, line 2: `answer` is missing");
    assert_snapshot!(message(""), @"`a.jsonl`, line 2: `messages` is empty");
    assert_snapshot!(message("3"), @"`a.jsonl`, line 2: `messages[0]` is not an object {role, content}");
    assert_snapshot!(message(r#"{"content":"x"}"#), @"`a.jsonl`, line 2: `messages[0].role` is missing: it must be system, developer, user, assistant or tool");
    assert_snapshot!(message(r#"{"role":"owner","content":"x"}"#), @r#"`a.jsonl`, line 2: `messages[0].role` is "owner": it must be system, developer, user, assistant or tool"#);
    assert_snapshot!(message(r#"{"role":"user"}"#), @"`a.jsonl`, line 2: `messages[0].content` is missing");
    assert_snapshot!(message(r#"{"role":"user","content":["x"]}"#), @"`a.jsonl`, line 2: `messages[0].content` is not a text");
    assert_snapshot!(message(r#"{"role":"assistant","content":"x"}"#), @"`a.jsonl`, line 2: `messages` ends with the assistant's turn, so there is no reply to sample");
    assert_snapshot!(message(r#"{"role":"system","content":"x"}"#), @"`a.jsonl`, line 2: `messages` ends with a system message, so there is no question to answer");
}

#[test]
fn many_bad_rows_are_counted_and_the_first_shown() {
    let text = [lines(0..2), "{}\n".repeat(12), lines(2..3)].concat();
    assert_snapshot!(error("a.jsonl", &text, |_| {}), @r#"
`a.jsonl` has 12 bad rows, the first 10 of which are
  line 3: `messages` is missing, and so is `prompt`
  line 4: `messages` is missing, and so is `prompt`
  line 5: `messages` is missing, and so is `prompt`
  line 6: `messages` is missing, and so is `prompt`
  line 7: `messages` is missing, and so is `prompt`
  line 8: `messages` is missing, and so is `prompt`
  line 9: `messages` is missing, and so is `prompt`
  line 10: `messages` is missing, and so is `prompt`
  line 11: `messages` is missing, and so is `prompt`
  line 12: `messages` is missing, and so is `prompt`
dataset.on_bad_row = "skip" leaves them out
"#);
    let skip = |config: &mut DatasetConfig| config.on_bad_row = OnBadRow::Skip;
    let dataset = open("a.jsonl", &text, skip);
    let report = &dataset.report;
    assert_eq!((report.rows, report.bad, report.bad_rows.len(), report.train), (15, 12, 10, 3));
    assert_eq!(
        report.to_string().split(": ").nth(1),
        Some("3 prompts to train on, 0 held out, 12 bad rows left out")
    );
    assert_snapshot!(error("a.jsonl", "{}\n[]\n", skip), @"`a.jsonl` holds no prompt: all of its 2 rows are bad; line 1: `messages` is missing, and so is `prompt`");
}

#[test]
fn files_that_are_not_datasets_are_errors() {
    assert_snapshot!(error("a.jsonl", "", |_| {}), @"`a.jsonl` holds no prompt");
    assert_snapshot!(error("a.csv", "", |_| {}), @"`a.csv` holds no prompt");
    assert_snapshot!(error("a.csv", "prompt,answer\n", |_| {}), @"`a.csv` holds no prompt");
    assert_snapshot!(error("a.csv", "prompt,prompt\n", |_| {}), @"`a.csv`: two columns are named `prompt`");
    assert_snapshot!(error("a.jsonl", "\u{feff}\n \n", |_| {}), @"`a.jsonl` holds no prompt");
    assert_snapshot!(error("a.jsonl", "PAR1", |_| {}), @"`a.jsonl`: it is not JSONL but Parquet; name the file *.parquet");
    assert_snapshot!(error("a.csv", "PK\u{3}\u{4}", |_| {}), @"`a.csv`: it is not CSV but a zip archive or a spreadsheet; export it first");
    assert_snapshot!(error("a.parquet", "prompt", |_| {}), @"`a.parquet`: it is not Parquet that can be read: EOF: Parquet file too small. Size is 6 but need 8");
    let files = Files::new();
    let missing = files.error(&DatasetConfig::at(&files.0.path().join("nowhere.csv")));
    assert!(missing.starts_with("`nowhere.csv`: No such file"), "{missing}");
    let directory = Dataset::open(&DatasetConfig::at(files.0.path())).unwrap_err().to_string();
    assert!(directory.ends_with(": it is a directory"), "{directory}");
}

#[test]
fn column_names_are_configurable() {
    let csv = "question,solution,level\n\"What is\n1 + 1?\",2,easy\n2 + 2?,4,\n";
    let names = |config: &mut DatasetConfig| {
        (config.prompt_column, config.answer_column) = ("question".into(), "solution".into());
    };
    let dataset = open("a.csv", csv, names);
    assert_eq!(turns(&dataset.train[0]), ["user: What is\n1 + 1?"]);
    assert_eq!(metadata(&dataset.train[0]), [("answer", "2"), ("level", "easy")]);
    assert_eq!(metadata(&dataset.train[1]), [("answer", "4")], "an empty cell is missing");
    assert_eq!(dataset.train[1].place, RowPlace::Line(4));
    let both = "question,solution,answer\nx,2,3\n";
    assert_snapshot!(error("a.csv", both, names), @"`a.csv`, line 2: `answer` conflicts with dataset.answer_column, `solution`");
    // Without an answer column, a column `answer` is ordinary metadata.
    let none = open("a.csv", "prompt,answer\nx,\ny,3\n", |c| c.answer_column.clear());
    assert_eq!(metadata(&none.train[0]), []);
    assert_eq!(metadata(&none.train[1]), [("answer", "3")]);
}

#[test]
fn conversations_may_be_in_cells_and_in_the_prompt_column() {
    let csv = "messages,answer\n\"[{\"\"role\"\":\"\"user\"\",\"\"content\"\":\"\"1+1\"\"}]\",2\n";
    let row = open("a.csv", csv, |_| {}).train[0].clone();
    assert_eq!(
        (turns(&row), metadata(&row)),
        (vec!["user: 1+1".to_owned()], vec![("answer", "2")])
    );
    assert_snapshot!(error("a.csv", "messages,answer\nhello,2\n", |_| {}), @"`a.csv`, line 2: `messages` is not JSON: expected value at line 1 column 1");
    let trl = r#"{"prompt":[{"role":"user","content":"1+1"}],"answer":"2"}"#;
    let trl = open("a.jsonl", trl, |_| {}).train[0].clone();
    assert_eq!((trl.id, &trl.messages, &trl.metadata), (row.id, &row.messages, &row.metadata));
}

#[test]
fn templates_render_the_columns() {
    let text = r#"{"question":"1+1","n":[3,4],"answer":2,"hint":null,"prompt":"raw"}"#;
    let with = |template: &'static str| {
        move |config: &mut DatasetConfig| config.template = template.into()
    };
    let dataset = open("a.jsonl", text, with("Question: {{ question }} ({{ n[1] }})"));
    assert_eq!(turns(&dataset.train[0]), ["user: Question: 1+1 (4)"]);
    assert_eq!(dataset.train[0].metadata["prompt"], "raw");
    assert_snapshot!(error("a.jsonl", text, with("{{ quest }}")), @"`a.jsonl`, line 1: dataset.template fails: undefined value (in template:1); the row's columns are answer, n, prompt, question");
    assert_snapshot!(error("a.jsonl", text, with("{{ hint }}")), @"`a.jsonl`, line 1: dataset.template fails: undefined value (in template:1); the row's columns are answer, n, prompt, question");
    assert_snapshot!(error("a.jsonl", text, with("{% if false %}x{% endif %}")), @"`a.jsonl`, line 1: dataset.template renders to nothing");
    assert_snapshot!(error("a.jsonl", text, with("{{ question")), @r#"dataset.template = "{{ question": unexpected end of input, expected end of variable block"#);
}

#[test]
fn system_message_and_examples_precede_the_question() {
    let text = lines(0..4)
        + r#"{"messages":[{"role":"developer","content":"Own."},{"role":"user","content":"9"}],"answer":9}"#;
    let plain = open("a.jsonl", &text, |_| {});
    let dataset = open("a.jsonl", &text, |config| {
        config.system_prompt = "Add.".into();
        config.few_shot = vec![FewShot { user: "u".into(), assistant: "a".into() }];
        config.few_shot_rows = 2;
        config.few_shot_answer = "<answer>{{ answer }}</answer>".into();
    });
    let examples = [
        "user: u",
        "assistant: a",
        "user: 0 + 0 = ?",
        "assistant: <answer>0</answer>",
        "user: 1 + 1 = ?",
        "assistant: <answer>2</answer>",
    ];
    let expected = |system: &str, own: &str| {
        let mut all = vec![format!("system: {system}")];
        all.extend(examples.map(str::to_owned));
        all.push(format!("user: {own}"));
        all
    };
    assert_eq!(dataset.train.len(), 3, "the examples are not trained on");
    assert_eq!(turns(&dataset.train[0]), expected("Add.", "2 + 2 = ?"));
    let own = expected("Own.", "9");
    assert_eq!(turns(&dataset.train[2])[1..], own[1..]);
    assert_eq!(turns(&dataset.train[2])[0], "developer: Own.");
    assert_eq!(dataset.report.few_shot, 2);
    // System message and examples do not change the id.
    assert_eq!(dataset.train[0].id, plain.train[2].id);
    let long = r#"{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"},{"role":"user","content":"c"}],"answer":1}"#;
    assert_snapshot!(error("a.jsonl", long, |c| c.few_shot_rows = 1), @"`a.jsonl`, line 1: cannot be an example of dataset.few_shot_rows: its conversation is not one question of the user");
}

#[test]
fn duplicates_are_counted_and_never_on_both_sides() {
    let text = [&lines(0..40), &lines(0..40), "{\"prompt\":\"3 + 3 = ?\",\"answer\":7}\n"].concat();
    let dataset = open("a.jsonl", &text, |config| config.held_out = 0.3);
    assert_eq!((dataset.report.duplicates, dataset.report.contradictions), (41, 1));
    let ids = |side: &[Arc<Prompt>]| side.iter().map(|p| p.id).collect::<BTreeSet<_>>();
    assert!(ids(&dataset.train).is_disjoint(&ids(&dataset.held_out)));
    assert_eq!(dataset.train.len() + dataset.held_out.len(), 81);
    assert!((12..40).contains(&dataset.held_out.len()), "{}", dataset.report);
}

#[test]
fn prompts_of_a_separate_file_are_never_trained_on() {
    let files = Files::new();
    let mut config = DatasetConfig::at(&files.put("a.jsonl", &lines(0..10)));
    config.eval_path = files.put("b.csv", "prompt,answer\n3 + 3 = ?,6\n77 + 1 = ?,78\n");
    let dataset = Dataset::open(&config).unwrap();
    let report = &dataset.report;
    assert_eq!((report.train, report.held_out, report.leaked), (9, 2, 1));
    assert!(dataset.train.iter().all(|p| p.metadata["answer"] != "6"));
    config.eval_path = config.path.clone();
    assert_snapshot!(files.error(&config), @"`a.jsonl`: no prompt is left to train on: every prompt is held out");
}

#[test]
fn ids_are_stable_and_round_trip() {
    let id = PromptId::of(&[Message::new(Role::User, "x")]);
    assert_eq!(id.to_string(), "391e5898628ea3369200353981545d04", "saved states contain ids");
    assert_eq!(PromptId::parse(&id.to_string()), Some(id));
    let json = serde_json::to_string(&id).unwrap();
    assert_eq!(serde_json::from_str::<PromptId>(&json).unwrap(), id);
    for wrong in ["", "+123456789012345678901234567890ab", "é", &id.to_string()[1..]] {
        assert_eq!(PromptId::parse(wrong), None, "{wrong}");
    }
    // The boundaries between messages are part of the content.
    let two = |a: &str, b: &str| {
        let user = |content: &str| Message::new(Role::User, content);
        PromptId::of(&[user(a), user(b)])
    };
    assert_ne!(two("ab", "c"), two("a", "bc"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn new_rows_do_not_move_other_prompts(
        ids in prop::collection::btree_set(any::<u128>(), 2..60),
        more in prop::collection::btree_set(any::<u128>(), 1..30),
        share in 0.0..0.9_f64,
        count in 1_u32..40,
        seed: u64,
    ) {
        let old: BTreeSet<PromptId> = ids.into_iter().map(PromptId).collect();
        let all: BTreeSet<PromptId> = more.into_iter().map(PromptId).chain(old.iter().copied()).collect();
        let (before, after) = (crate::prompt::held_out(&old, share, seed), crate::prompt::held_out(&all, share, seed));
        // The rule that one prompt must be left to train on may move the last one.
        if before.len() + 1 < old.len() && after.len() + 1 < all.len() {
            prop_assert!(old.iter().all(|id| before.contains(id) == after.contains(id)));
        }
        let (before, after) =
            (crate::prompt::held_out(&old, f64::from(count), seed), crate::prompt::held_out(&all, f64::from(count), seed));
        prop_assert_eq!(before.len(), (count as usize).min(old.len() - 1));
        // No prompt that was trained on is held out now.
        if (count as usize) < old.len() {
            prop_assert!(old.iter().all(|id| before.contains(id) || !after.contains(id)));
        }
    }
}
