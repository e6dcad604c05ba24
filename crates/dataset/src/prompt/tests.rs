use insta::assert_snapshot;

use crate::tests::{error, metadata, open, turns};
use crate::{DatasetConfig, OnBadRow};

/// Rows in the form of GSM8K.
const RAW: &str = concat!(
    r#"{"question":"3 * 4?","answer":"3 * 4 = <<3*4=12>>12\n#### 12"}"#,
    "\n",
    r#"{"question":"Cost?","answer":"It costs 1,234 dollars.\n#### 1,234"}"#,
    "\n",
    r#"{"question":"Debt?","answer":"5 less: #### -5"}"#,
    "\n",
    r#"{"question":"Left?","answer":"7 - 7 = 0\r\n#### 0\r\n"}"#,
    "\n",
    r#"{"question":"Half?","answer":"1/2: #### 0.5"}"#,
    "\n",
);

fn raw(config: &mut DatasetConfig) {
    config.prompt_column = "question".into();
    config.extract_answer = "####".into();
}

#[test]
fn the_answer_is_extracted_from_its_column() {
    let dataset = open("raw.jsonl", RAW, raw);
    let answers: Vec<&str> = dataset.train.iter().map(|p| p.metadata["answer"].as_str()).collect();
    assert_eq!(answers, ["12", "1,234", "-5", "0", "0.5"]);
    assert_eq!(dataset.report.answers, ["12", "1,234", "-5"]);
    assert_eq!(dataset.report.unanswered, 0);
    let plain = open("raw.jsonl", RAW, |c| c.prompt_column = "question".into());
    assert!(plain.train[0].metadata["answer"].starts_with("3 * 4 ="));
    assert_eq!(plain.train[0].id, dataset.train[0].id, "the split does not move");
    assert!(plain.report.answers.is_empty());
    let dataset = open("raw.jsonl", RAW, |config| {
        raw(config);
        config.few_shot_rows = 1;
        config.few_shot_answer = "<reasoning>{{ (answer | split('####'))[0] | trim }}</reasoning>\
                                  <answer>{{ extracted_answer }}</answer>"
            .into();
    });
    let expected = "assistant: <reasoning>3 * 4 = <<3*4=12>>12</reasoning><answer>12</answer>";
    assert_eq!(turns(&dataset.train[0])[1], expected);
}

#[test]
fn rows_without_an_answer_are_bad() {
    let text = RAW.to_owned() + "{\"question\":\"Why?\",\"answer\":\"Because.\"}\n";
    assert_snapshot!(error("raw.jsonl", &text, raw), @r#####"`raw.jsonl`, line 6: `answer` is "Because.", in which dataset.extract_answer = "####" finds no answer"#####);
    let dataset = open("raw.jsonl", &text, |config| {
        raw(config);
        config.on_bad_row = OnBadRow::Skip;
    });
    let report = &dataset.report;
    assert_eq!((report.train, report.bad, report.unanswered), (5, 1, 1));
    // Extraction that finds nothing anywhere is one error, even if bad rows are skipped.
    let none = |on_bad_row| {
        error("raw.jsonl", RAW, |config| {
            raw(config);
            config.extract_answer = r"\boxed{}".into();
            config.on_bad_row = on_bad_row;
        })
    };
    assert_eq!(none(OnBadRow::Skip), none(OnBadRow::Refuse));
    assert_snapshot!(none(OnBadRow::Skip), @r#"`raw.jsonl`: no row has an answer; line 1: `answer` is "3 * 4 = <<3*4=12>>12\n#### 12", in which dataset.extract_answer = "\\boxed{}" finds no answer"#);
}

#[test]
fn missing_columns_are_one_error() {
    let wrong = |change: fn(&mut DatasetConfig)| error("raw.jsonl", RAW, change);
    assert_snapshot!(wrong(|_| {}), @"`raw.jsonl`: no row has the column `prompt` (dataset.prompt_column) or `messages` (dataset.messages_column); the columns are answer, question");
    assert_snapshot!(wrong(|c| {
        c.prompt_column = "question".into();
        c.answer_column = "solution".into();
    }), @"`raw.jsonl`: no row has the column `solution` (dataset.answer_column); the columns are answer, question");
    assert_snapshot!(wrong(|c| c.answer_column = "solution".into()), @"`raw.jsonl`: no row has the column `prompt` (dataset.prompt_column) or `messages` (dataset.messages_column), nor `solution` (dataset.answer_column); the columns are answer, question");
    assert_snapshot!(wrong(|c| c.template = "{{ problem }}".into()), @"`raw.jsonl` holds no prompt: all of its 5 rows are bad; line 1: dataset.template fails: undefined value (in template:1); the row's columns are answer, question");
}

#[test]
fn replies_of_supervised_data_become_completions() {
    let text = concat!(
        r#"{"messages":[{"role":"user","content":"1+1"},{"role":"assistant","content":"2"}]}"#,
        "\n",
        r#"{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"},"#,
        r#"{"role":"user","content":[{"type":"text","text":"c"},{"type":"text","text":"d"}]},"#,
        r#"{"role":"assistant","content":"e"},{"role":"assistant","content":"f"}]}"#,
        "\n",
    );
    let dataset = open("sft.jsonl", text, |c| c.answer_column = "completion".into());
    let [first, second] = &dataset.train[..] else { panic!("{dataset:?}") };
    assert_eq!((turns(first), metadata(first)), (vec!["user: 1+1".into()], vec![("answer", "2")]));
    assert_eq!(turns(second), ["user: a", "assistant: b", "user: cd"]);
    assert_eq!(metadata(second), [("answer", "e\nf")]);
    assert_eq!(
        (dataset.report.replies, &dataset.report.columns[..]),
        (2, &["completion".to_owned(), "messages".to_owned()][..])
    );
    let kept = open("sft.jsonl", text, |c| c.answer_column.clear());
    assert_eq!(metadata(&kept.train[0]), [("completion", "2")]);
    assert_snapshot!(error("sft.jsonl", text, |_| {}), @"`sft.jsonl`: no row has the column `answer` (dataset.answer_column); the columns are completion, messages");
    // A prompt of TRL that ends with the assistant's turn is to be continued, which Hone cannot.
    let prefilled = text.replace("messages", "prompt");
    assert_snapshot!(error("a.jsonl", &prefilled, |c| c.answer_column.clear()), @"`a.jsonl` holds no prompt: all of its 2 rows are bad; line 1: `prompt` ends with the assistant's turn, so there is no reply to sample");
}

#[test]
fn completions_may_be_conversations() {
    let text = concat!(
        r#"{"prompt":[{"role":"user","content":"1+1"}],"#,
        r#""completion":[{"role":"assistant","content":"2"}],"#,
        r#""chosen":[{"role":"user","content":"1+1"},{"role":"assistant","content":"2"}],"#,
        r#""rejected":"3","answer":[{"role":"assistant","content":"so\n\\boxed{2}"}],"#,
        r#""tools":[{"role":"x"}]}"#,
    );
    let dataset = open("trl.jsonl", text, |c| c.extract_answer = r"\boxed{}".into());
    let expected = [
        ("answer", "2"),
        ("chosen", "2"),
        ("completion", "2"),
        ("rejected", "3"),
        ("tools", r#"[{"role":"x"}]"#),
    ];
    assert_eq!(metadata(&dataset.train[0]), expected);
}

#[test]
fn other_parts_than_text_are_refused() {
    let with = |content: &str| {
        let row = format!(r#"{{"prompt":[{{"role":"user","content":{content}}}],"answer":1}}"#);
        error("a.jsonl", &row, |_| {})
    };
    assert_snapshot!(with(r#"[{"type":"image"},{"type":"text","text":"what?"}]"#), @r#"`a.jsonl`, line 1: `prompt[0].content` has a part of type "image": only "text" is supported"#);
    assert_snapshot!(with(r#"[{"type":"text"}]"#), @"`a.jsonl`, line 1: `prompt[0].content` is not a text");
}

mod extract {
    use insta::assert_snapshot;

    use super::super::*;

    fn find<'t>(rule: &str, text: &'t str) -> Option<&'t str> {
        AnswerExtractor::new(rule).unwrap().unwrap().find(text)
    }

    #[test]
    fn a_marker_precedes_the_answer_as_in_the_guides() {
        assert_eq!(find("####", "48/2 = <<48/2=24>>24\n#### 1,234\r\n"), Some("1,234"));
        assert_eq!(find("####", "#### -5 #### 6"), Some("-5"), "up to the next marker");
        assert_eq!(find("####", "####5"), Some("5"));
        for none in ["", "no marker", "at the end ####", "#### \n", "### 4", "#### #### 4"] {
            assert_eq!(find("####", none), None, "{none:?}");
        }
        assert_eq!(find(r"A\d:", r"A1: 3 A\d: 4"), Some("4"), "not a pattern without a group");
        assert!(AnswerExtractor::new("").unwrap().is_none(), "no rule, no change");
        // An empty answer is none, so that its row is refused. The guides keep the row.
        let path =
            concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/reference/guides/guide_cases.json");
        let json = std::fs::read_to_string(path).unwrap();
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        let cases = json["functions"]["dataset_answer"]["cases"].as_array().unwrap();
        assert!(cases.len() >= 20, "{} cases", cases.len());
        for case in cases {
            let expected = case[1].as_str().filter(|answer| !answer.is_empty());
            assert_eq!(find("####", case[0].as_str().unwrap()), expected, "{case}");
        }
    }

    #[test]
    fn a_box_or_the_first_group_of_a_pattern_contains_the_answer() {
        let boxed = |text| find(r"\boxed{}", text);
        assert_eq!(boxed(r"\boxed{1}, so \boxed{\frac{1}{2}}."), Some(r"\frac{1}{2}"));
        for none in ["1", r"\boxed{1", r"\boxed{ }", r"\boxed"] {
            assert_eq!(boxed(none), None, "{none:?}");
        }
        assert_eq!(find(r"answer is (\S+)", "The answer is 12 or the answer is 13"), Some("12"));
        assert_eq!(find(r"(?s)<a>(.*?)</a>", "<a>\n 7 </a>"), Some("7"));
        assert_eq!(find("a(b)?", "ac"), None, "the group takes no part");
        assert_eq!(find("a( *)", "a  "), None, "the group is blank");
        let error = |rule| AnswerExtractor::new(rule).err().unwrap().to_string();
        assert_snapshot!(error(r"answer is (\S+"), @r#"dataset.extract_answer = "answer is (\\S+": not a regular expression: unclosed group"#);
        assert_snapshot!(error(r"\(\d+\)"), @r#"dataset.extract_answer = "\\(\\d+\\)": it needs a group, in parentheses, around the answer"#);
        assert_snapshot!(error("(?:a)"), @r#"dataset.extract_answer = "(?:a)": it needs a group, in parentheses, around the answer"#);
    }
}

mod split {
    use super::super::*;

    /// Saved sampler states and published splits depend on these values.
    #[test]
    fn keys_and_splits_never_change() {
        assert_eq!(key("hold out", &[4], PromptId(5)), 0xb658_bf6d_3da6_12ee);
        let ids: BTreeSet<PromptId> = (0..8).map(PromptId).collect();
        let held = |amount| held_out(&ids, amount, 4).iter().map(|id| id.0).collect::<Vec<_>>();
        assert_eq!((held(0.4), held(2.0)), (vec![0, 4, 7], vec![0, 7]));
    }
}
