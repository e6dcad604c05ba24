use std::io::Write;
use std::sync::Arc;

use ::parquet::data_type::{BoolType, ByteArray, ByteArrayType, DoubleType, Int64Type};
use ::parquet::file::properties::WriterProperties;
use ::parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use ::parquet::schema::parser::parse_message_type;
use insta::assert_snapshot;
use proptest::prelude::*;
use serde_json::{Value, json};
use tempfile::NamedTempFile;

use super::row::DatasetRow;
use super::*;
use crate::error::{BadRow, RowPlace};

type ReadRows = Vec<Result<DatasetRow, BadRow>>;

fn read(bytes: &[u8], format: FileFormat, limit: usize) -> Result<ReadRows, String> {
    let mut file = NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    let mut found = Vec::new();
    read_rows(file.path(), format, limit, &mut |row| found.push(row))?;
    Ok(found)
}

/// Place and column `a` of each row, or the error of a bad row.
fn shown(bytes: &[u8], format: FileFormat, limit: usize) -> Vec<String> {
    let shown = |row: Result<DatasetRow, BadRow>| match row {
        Ok(row) => format!("{}: {}", row.place, row.columns["a"]),
        Err(bad) => bad.to_string(),
    };
    read(bytes, format, limit).unwrap().into_iter().map(shown).collect()
}

#[test]
fn the_file_name_determines_the_format() {
    use FileFormat::{Csv, Jsonl, Parquet, Tsv};
    let names = ["a.b/x.CSV", "x.tsv", "x.parquet", "x.pq", "x.jsonl", "prompts"];
    let formats = names.map(|name| FileFormat::of(Path::new(name)));
    assert_eq!(formats, [Csv, Tsv, Parquet, Parquet, Jsonl, Jsonl]);
}

#[test]
fn an_array_has_one_row_per_object() {
    let text = "\u{feff}\n[{\"a\":1},\n  {\"a\": [\"]\", {}]} , 7,\n{\"a\":\"é\"}]\n";
    let expected = ["row 1: 1", "row 2: [\"]\",{}]", "row 3: not a JSON object", "row 4: \"é\""];
    assert_eq!(shown(text.as_bytes(), FileFormat::Jsonl, 1000), expected);
    assert_eq!(read(b" [ ] ", FileFormat::Jsonl, 1000), Ok(Vec::new()));
    let long = shown(b"[{\"a\":12345},{\"a\":1}]", FileFormat::Jsonl, 8);
    assert_eq!(long, ["row 1: longer than 8 bytes", "row 2: 1"]);
}

#[test]
fn a_damaged_array_is_an_error_with_its_place() {
    let error = |text: &str| read(text.as_bytes(), FileFormat::Jsonl, 1000).unwrap_err();
    assert_snapshot!(error("[{\"a\":1}\n{\"a\":2}]"), @"it is not JSON: expected `,` or `]` at line 2, column 1");
    assert_snapshot!(error("[{\"a\":1},\n{\"a\" 2}]"), @"it is not JSON: expected `:` at line 2, column 6");
    assert_snapshot!(error("[{\"a\":1},\n"), @"it is not JSON: the array is not closed at line 2, column 1");
    assert_snapshot!(error("[{\"a\":1},]"), @"it is not JSON: expected value at line 1, column 10");
    assert_snapshot!(error("[{\"a\":1}"), @"it is not JSON: expected `,` or `]` at line 1, column 9");
    assert_snapshot!(error("[{\"a\":1"), @"it is not JSON: EOF while parsing an object at line 1, column 7");
    assert_snapshot!(error("[] x"), @"it is not JSON: text follows the array at line 1, column 3");
    let binary = read(b"[\xff]", FileFormat::Jsonl, 1000).unwrap_err();
    assert_eq!(binary, "it is not UTF-8: byte 2 is 0xff");
}

#[test]
fn line_numbers_are_right_for_both_line_endings() {
    let jsonl = |text: &str| shown(text.as_bytes(), FileFormat::Jsonl, 1000);
    let expected = ["line 1: 1", "line 3: 3", "line 4: 4"];
    assert_eq!(jsonl("\u{feff}{\"a\":1}\r\n\r\n{\"a\":3}\r\n{\"a\":4}"), expected);
    assert_eq!(jsonl("{\"a\":1}\n \n{\"a\":3}\n{\"a\":4}\n\n"), expected);
    let csv = |text: &str| shown(text.as_bytes(), FileFormat::Csv, 1000);
    let expected = ["line 3: \"1\"", "line 4: \"2\\n3\"", "line 7: \"4\""];
    assert_eq!(csv("\u{feff}a,b\n\n1,\n\"2\n3\",\n\n4,x\n"), expected);
    let expected = expected.map(|line| line.replace("\\n", "\\r\\n"));
    assert_eq!(csv("a,b\r\n\r\n1,\r\n\"2\r\n3\",\r\n\r\n4,x"), expected);
    let tsv = shown(b"a\tb\n1,2\tx\n", FileFormat::Tsv, 1000);
    assert_eq!(tsv, ["line 2: \"1,2\""]);
}

#[test]
fn reading_continues_after_bad_rows() {
    let jsonl = shown(b"{\"a\":1}\n{\"a\":\"\xff\"}\n{\"a\n{\"a\":4}\n", FileFormat::Jsonl, 1000);
    let expected = [
        "line 1: 1",
        "line 2: it is not UTF-8: byte 7 is 0xff",
        "line 3: not JSON: EOF while parsing a string at column 3",
        "line 4: 4",
    ];
    assert_eq!(jsonl, expected);
    let csv = shown(b"a,b,\n1,2,3\n1,2\n\xff,2,3\n\"x, y\",,\n", FileFormat::Csv, 1000);
    let expected = [
        "line 2: \"1\"",
        "line 3: it has 2 cells for 3 columns",
        "line 4: `a` is not UTF-8: byte 1 is 0xff",
        "line 5: \"x, y\"",
    ];
    assert_eq!(csv, expected);
}

#[test]
fn long_rows_are_refused_and_reading_continues() {
    let row = |length: usize| format!("{{\"a\":\"{}\"}}\r\n", "x".repeat(length - 8));
    let text = [row(100), row(101), row(20_000), row(50)].concat();
    let found = read(text.as_bytes(), FileFormat::Jsonl, 100).unwrap();
    let places: Vec<bool> = found.iter().map(Result::is_ok).collect();
    assert_eq!(places, [true, false, false, true]);
    let bad = found[2].as_ref().unwrap_err().to_string();
    assert_eq!(bad, "line 3: longer than 100 bytes");
    // An unclosed quotation mark extends its row to the end of the file.
    let csv = format!("a,b\n1,2\n\"3,4\n{}", "5,6\n".repeat(100));
    let found = shown(csv.as_bytes(), FileFormat::Csv, 100);
    assert_eq!(found.len(), 2);
    assert!(found[1].ends_with("is a quotation mark left open?"), "{found:?}");
}

/// Three rows with nested conversations; the second has nulls, the third has two messages.
fn parquet_file() -> Vec<u8> {
    let schema = "message rows {
        optional group messages (LIST) { repeated group list { optional group element {
            optional binary role (UTF8); optional binary content (UTF8);
        } } }
        required int64 answer;
        optional double score;
        optional boolean hard;
        optional binary raw;
    }";
    let mut bytes = Vec::new();
    let properties = Arc::new(WriterProperties::builder().build());
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let mut file = SerializedFileWriter::new(&mut bytes, schema, properties).unwrap();
    let mut group = file.next_row_group().unwrap();
    let texts = |texts: &[&str]| texts.iter().map(|t| ByteArray::from(*t)).collect::<Vec<_>>();
    let nested = (&[4, 4, 4, 4][..], &[0, 0, 0, 1][..]);
    let roles = texts(&["user", "user", "system", "user"]);
    column::<ByteArrayType>(&mut group, &roles, Some(nested.0), Some(nested.1));
    let contents = texts(&["1+1", "2+2", "Add.", "3+3"]);
    column::<ByteArrayType>(&mut group, &contents, Some(nested.0), Some(nested.1));
    column::<Int64Type>(&mut group, &[2, 4, 6], None, None);
    column::<DoubleType>(&mut group, &[0.1, f64::NAN], Some(&[1, 0, 1]), None);
    column::<BoolType>(&mut group, &[true, false], Some(&[1, 0, 1]), None);
    column::<ByteArrayType>(&mut group, &texts(&["é"]), Some(&[1, 0, 0]), None);
    group.close().unwrap();
    file.close().unwrap();
    bytes
}

fn column<T: ::parquet::data_type::DataType>(
    group: &mut SerializedRowGroupWriter<'_, &mut Vec<u8>>,
    values: &[T::T],
    definition: Option<&[i16]>,
    repetition: Option<&[i16]>,
) {
    let mut writer = group.next_column().unwrap().unwrap();
    writer.typed::<T>().write_batch(values, definition, repetition).unwrap();
    writer.close().unwrap();
}

#[test]
fn parquet_rows_are_converted_to_json() {
    let found = read(&parquet_file(), FileFormat::Parquet, 1000).unwrap();
    let rows: Vec<DatasetRow> = found.into_iter().map(Result::unwrap).collect();
    let user = |content: &str| json!({ "role": "user", "content": content });
    let expected = [
        json!({ "messages": [user("1+1")], "answer": 2, "score": 0.1, "hard": true, "raw": "é" }),
        json!({ "messages": [user("2+2")], "answer": 4, "score": null, "hard": null, "raw": null }),
        json!({
            "messages": [{ "role": "system", "content": "Add." }, user("3+3")],
            "answer": 6, "score": null, "hard": false, "raw": null
        }),
    ];
    for (number, (row, expected)) in rows.into_iter().zip(expected).enumerate() {
        assert_eq!(row.place, RowPlace::Row(number as u64 + 1));
        assert_eq!(Value::Object(row.columns), expected);
    }
    let long = read(&parquet_file(), FileFormat::Parquet, 90).unwrap();
    let bad: Vec<String> =
        long.iter().filter_map(|r| Some(r.as_ref().err()?.to_string())).collect();
    assert_eq!(bad, ["row 3: longer than 90 bytes"]);
}

#[test]
fn truncated_parquet_is_an_error() {
    let bytes = parquet_file();
    let error = read(&bytes[..bytes.len() / 2], FileFormat::Parquet, 1000).unwrap_err();
    assert!(error.starts_with("it is not Parquet that can be read: "), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]
    #[test]
    fn reading_any_bytes_does_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        for format in [FileFormat::Jsonl, FileFormat::Csv, FileFormat::Tsv, FileFormat::Parquet] {
            let _ = read(&bytes, format, 100);
        }
    }

    #[test]
    fn reading_any_array_does_not_panic(text in "\\[[\\[\\]{},:\"\\\\a1é \n]{0,60}") {
        let _ = read(text.as_bytes(), FileFormat::Jsonl, 20);
    }

    #[test]
    fn line_numbers_increase_in_any_csv(text in "[ab,\"\r\n\t\u{feff}é]{0,80}") {
        let lines = text.matches(['\n', '\r']).count() as u64 + 1;
        for format in [FileFormat::Csv, FileFormat::Tsv] {
            let mut last = 0;
            for row in read(text.as_bytes(), format, 40).unwrap_or_default() {
                let (Ok(DatasetRow { place, .. }) | Err(BadRow { place, .. })) = row;
                let RowPlace::Line(line) = place else { panic!("{place}") };
                prop_assert!(line > last && line <= lines, "{} after {} of {}", line, last, lines);
                last = line;
            }
        }
    }

    #[test]
    fn reading_damaged_parquet_does_not_panic(at in any::<prop::sample::Index>(), byte: u8, cut in any::<prop::sample::Index>()) {
        let mut bytes = parquet_file();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        let _ = read(&bytes, FileFormat::Parquet, 1000);
        bytes.truncate(cut.index(bytes.len()));
        let _ = read(&bytes, FileFormat::Parquet, 1000);
    }
}
