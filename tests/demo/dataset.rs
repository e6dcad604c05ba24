//! The committed dataset: what its script promises, and the same prompts in every format.
#![expect(clippy::unwrap_used, reason = "tests may fail loudly")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;

use hone_dataset::{Dataset, DatasetConfig, Prompt, RowPlace};
use hone_demo::task::{OPERANDS, PHRASING_COUNT, Question};

fn committed(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

fn read(path: &Path) -> Vec<Arc<Prompt>> {
    Dataset::open(&DatasetConfig::at(path)).unwrap().train
}

/// A prompt without its place in the file.
fn content(prompt: &Arc<Prompt>) -> Prompt {
    Prompt { place: RowPlace::Row(0), ..(**prompt).clone() }
}

#[test]
fn additions_are_questions_that_the_demo_does_not_hold_out() {
    let dataset =
        Dataset::open(&DatasetConfig::at(&committed("datasets/additions.jsonl"))).unwrap();
    let report = &dataset.report;
    assert_eq!((report.rows, report.bad, report.duplicates), (600, 0, 0));
    assert_eq!(report.columns, ["answer", "level", "messages"]);
    let all = |a: u32| {
        (0..OPERANDS)
            .flat_map(move |b| (0..PHRASING_COUNT).map(move |phrasing| Question { a, b, phrasing }))
    };
    let asked: BTreeSet<(String, String)> = (0..OPERANDS)
        .flat_map(all)
        .filter(|question| !question.is_held_out())
        .map(|question| (question.text(), question.answer().to_string()))
        .collect();
    for prompt in &dataset.train {
        let row = (prompt.messages[0].content.clone(), prompt.metadata["answer"].clone());
        assert!(asked.contains(&row), "{row:?}");
    }
    for level in ["easy", "medium", "hard"] {
        let count = dataset.train.iter().filter(|p| p.metadata["level"] == level).count();
        assert!(count >= 100, "{count} are {level}");
    }
}

#[test]
fn every_format_holds_the_same_prompts() {
    let jsonl = read(&committed("datasets/additions.jsonl"));
    let csv = read(&committed("tests/fixtures/dataset/additions.csv"));
    assert_eq!(csv.len(), 12);
    assert!(csv.iter().zip(&jsonl).all(|(a, b)| content(a) == content(b)));

    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("additions.parquet");
    write_parquet(&path, &jsonl);
    let parquet = read(&path);
    assert_eq!(parquet.len(), jsonl.len());
    assert!(parquet.iter().zip(&jsonl).all(|(a, b)| content(a) == content(b)));
    assert_eq!(parquet[599].place, RowPlace::Row(600));
}

/// `messages` as a list of structs, the other columns as texts; row groups of 250.
fn write_parquet(path: &Path, prompts: &[Arc<Prompt>]) {
    let schema = "message rows {
        required group messages (LIST) { repeated group list { required group element {
            required binary role (UTF8); required binary content (UTF8);
        } } }
        required binary answer (UTF8);
        optional binary level (UTF8);
    }";
    let file = std::fs::File::create(path).unwrap();
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let properties = Arc::new(WriterProperties::builder().build());
    let mut writer = SerializedFileWriter::new(file, schema, properties).unwrap();
    for prompts in prompts.chunks(250) {
        let mut group = writer.next_row_group().unwrap();
        let text = |text: &str| ByteArray::from(text);
        let ones = vec![1; prompts.len()];
        let zeros = vec![0; prompts.len()];
        let columns: [(Vec<ByteArray>, bool, bool); 4] = [
            (prompts.iter().map(|p| text(p.messages[0].role.as_str())).collect(), true, true),
            (prompts.iter().map(|p| text(&p.messages[0].content)).collect(), true, true),
            (prompts.iter().map(|p| text(&p.metadata["answer"])).collect(), false, false),
            (prompts.iter().map(|p| text(&p.metadata["level"])).collect(), true, false),
        ];
        for (values, defined, repeated) in columns {
            let mut column = group.next_column().unwrap().unwrap();
            let definition = defined.then_some(&ones[..]);
            let repetition = repeated.then_some(&zeros[..]);
            column.typed::<ByteArrayType>().write_batch(&values, definition, repetition).unwrap();
            column.close().unwrap();
        }
        group.close().unwrap();
    }
    writer.close().unwrap();
}
