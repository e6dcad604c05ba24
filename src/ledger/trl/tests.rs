//! The rows of a small ledger, as JSON and as Parquet that the dataset's reader reads.

use std::sync::Arc;

use ::parquet::file::reader::{FileReader, SerializedFileReader};
use ::parquet::record::Field;

use hone_core::metrics::Metrics;
use hone_core::types::{PolicyVersion, PromptSource, Reward, ToolCall};
use hone_store::{CorrectionEntry, Op, Store, StoreConfig};

use super::*;

/// A prompt whose completions have these texts and rewards, and a correction of the first.
fn ledger(dir: &std::path::Path) -> Ledger {
    let path = dir.join("ledger.redb");
    let store =
        Store::open(&path, &StoreConfig::default(), Arc::new(Metrics::new().unwrap())).unwrap();
    let messages =
        vec![Message::new(Role::System, "Be brief."), Message::new(Role::User, "1 + 1?")];
    let prompt = Interaction::new(PromptSource::Live, "default", messages);
    let mut ops = vec![Op::Interaction(Box::new(prompt.clone()))];
    let rated = [("2", Some(1.0)), ("3", Some(0.25)), ("?", None), ("no value", None)];
    for (number, (text, value)) in (0..).zip(rated) {
        let origin = if number == 0 { SampleOrigin::Served } else { SampleOrigin::Shadow };
        let sample =
            Sample { text: text.into(), ..Sample::new(prompt.id, origin, PolicyVersion(3)) };
        ops.push(Op::Sample(Box::new(sample.clone())));
        if text != "?" {
            ops.push(Op::Reward(Box::new(Reward::graded(sample.id, "exact", value))));
            let half = value.map(|value| value / 2.0);
            ops.push(Op::Reward(Box::new(Reward::graded(sample.id, "form", half))));
        }
    }
    let held_out = Interaction {
        held_out: true,
        ..Interaction::new(PromptSource::Dataset, "default", prompt.messages.clone())
    };
    let mut calls = Interaction::new(PromptSource::Live, "default", prompt.messages.clone());
    let call = ToolCall { id: "c".into(), name: "f".into(), arguments: "{}".into() };
    calls.messages.push(Message { tool_calls: vec![call], ..Message::new(Role::Assistant, "") });
    ops.extend([held_out, calls].map(|prompt| Op::Interaction(Box::new(prompt))));
    ops.push(Op::Correction(Box::new(CorrectionEntry {
        interaction: prompt.id,
        choice: 0,
        text: "two".into(),
        ids: vec![1],
        unused: None,
        rating: None,
        comment: None,
        idempotency_key: None,
        key_id: None,
        created: 1,
    })));
    store.commit_blocking(ops).unwrap();
    drop(store);
    Ledger::open_read_only(&path).unwrap()
}

fn export(columns: TrlColumns, format: TableFormat, part: Option<&str>) -> (Vec<u8>, TrlCounts) {
    let dir = tempfile::tempdir().unwrap();
    let mut out = Vec::new();
    let export = TrlExport { columns, format, part: part.map(str::to_owned), threshold: 0.5 };
    let counts = export.write(&ledger(dir.path()), &mut out).unwrap();
    (out, counts)
}

fn json(columns: TrlColumns, part: Option<&str>) -> Vec<Value> {
    let (out, _) = export(columns, TableFormat::Jsonl, part);
    String::from_utf8(out)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

#[test]
fn rows_have_the_columns_of_trl() {
    let prompt = json!([
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}
    ]);
    let said = |text: &str| json!([{"role": "assistant", "content": text}]);
    let rows = json(TrlColumns::Reward, None);
    assert_eq!((rows.len(), &rows[0]["prompt"], &rows[0]["completion"]), (2, &prompt, &said("2")));
    assert_eq!((&rows[0]["reward"], &rows[1]["reward"]), (&json!(1.5), &json!(0.375)));
    assert_eq!(rows[0]["version"], 3);
    assert!(rows[0]["completion_id"].as_str().unwrap().starts_with("cmpl-"));
    let rows = json(TrlColumns::Label, Some("form"));
    assert_eq!([&rows[0]["label"], &rows[1]["label"]], [&json!(false), &json!(false)]);
    assert_eq!(json(TrlColumns::Label, None)[0]["label"], true);
    let rows = json(TrlColumns::Preference, None);
    let pair = |row: &Value| (row["chosen"].clone(), row["rejected"].clone());
    let expected = [(said("two"), said("2")), (said("2"), said("3"))];
    assert_eq!(rows.iter().map(pair).collect::<Vec<_>>(), expected);
    assert!(json(TrlColumns::Reward, Some("no such part")).is_empty());
}

#[test]
fn what_is_left_out_is_counted() {
    let (_, counts) = export(TrlColumns::Reward, TableFormat::Jsonl, None);
    assert_eq!(
        counts.to_string(),
        "2 rows written; 2 completions without a reward; 1 prompts held out for exams; 1 prompts with calls \
         of tools"
    );
}

/// A row as JSON.
fn object<'a>(columns: impl Iterator<Item = (&'a String, &'a Field)>) -> Value {
    fn value(field: &Field) -> Value {
        match field {
            Field::Str(text) => json!(text),
            Field::Double(number) => json!(number),
            Field::Long(number) => json!(number),
            Field::Bool(flag) => json!(flag),
            Field::Group(row) => object(row.get_column_iter()),
            Field::ListInternal(list) => list.elements().iter().map(value).collect(),
            other => unreachable!("{other:?}"),
        }
    }
    Value::Object(columns.map(|(name, field)| (name.clone(), value(field))).collect())
}

/// The parquet crate reads the same values; `datasets` reads the same files (docs/operations.md).
#[test]
fn parquet_has_the_values_of_the_json_lines() {
    for columns in [TrlColumns::Reward, TrlColumns::Preference, TrlColumns::Label] {
        let (out, counts) = export(columns, TableFormat::Parquet, None);
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&out).unwrap();
        let reader = SerializedFileReader::new(file).unwrap();
        assert_eq!(
            reader.metadata().file_metadata().num_rows(),
            i64::try_from(counts.rows).unwrap()
        );
        let read: Vec<Value> = reader
            .get_row_iter(None)
            .unwrap()
            .map(|row| object(row.unwrap().get_column_iter()))
            .collect();
        let mut expected = json(columns, None);
        // The ledgers differ in their ids.
        let without_ids = |mut row: Value| {
            row["completion_id"].take();
            row
        };
        let read: Vec<Value> = read.into_iter().map(without_ids).collect();
        expected = expected.into_iter().map(without_ids).collect();
        assert_eq!(read, expected, "{columns:?}");
    }
}
