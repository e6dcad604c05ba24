//! Parquet. Nested lists, structs and maps become JSON.

use std::any::Any;
use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};

use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::Field;
use parquet::record::reader::RowIter;
use serde_json::{Map, Number, Value};

use hone_core::text::shortened;

use super::row::{DatasetRow, Visit, not_text, text_of, too_long};
use crate::error::{BadRow, RowPlace};

pub(super) fn rows(file: File, limit: usize, visit: &mut Visit) -> Result<(), String> {
    let reader =
        guarded(|| SerializedFileReader::new(file))?.map_err(|error| parquet_error(&error))?;
    let expected = reader.metadata().file_metadata().num_rows();
    let mut iterator: RowIter =
        guarded(|| RowIter::from_file_into(Box::new(reader)).with_batch_size(256))?;
    let mut number = 0;
    loop {
        let place = RowPlace::Row(number + 1);
        let row = match guarded(|| iterator.next()) {
            Ok(None) => break,
            Ok(Some(Ok(row))) => row,
            Ok(Some(Err(error))) => return Err(format!("{place}: {}", parquet_error(&error))),
            Err(reason) => return Err(format!("{place}: {reason}")),
        };
        number += 1;
        visit(columns(place, row.get_column_iter(), limit));
    }
    if i64::try_from(number).is_ok_and(|number| number == expected) {
        return Ok(());
    }
    Err(format!("it is damaged: it should have {expected} rows but has {number}"))
}

/// Converts a panic into an error. The parquet crate panics on damaged files and unsupported types.
fn guarded<T>(read: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(read)).map_err(|panic| {
        format!("it is damaged, or has a type that is not supported: {}", message(&*panic))
    })
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no reason given");
    first_line(text)
}

fn parquet_error(error: &parquet::errors::ParquetError) -> String {
    format!("it is not Parquet that can be read: {}", first_line(&error.to_string()))
}

/// The beginning of an error's text, which may contain a whole value.
fn first_line(text: &str) -> String {
    shortened(text.lines().next().unwrap_or_default(), 160).into_owned()
}

fn columns<'a>(
    place: RowPlace,
    fields: impl Iterator<Item = (&'a String, &'a Field)>,
    limit: usize,
) -> Result<DatasetRow, BadRow> {
    let mut columns = Map::new();
    let mut bytes = 0;
    for (name, field) in fields {
        let value = value(field, &mut bytes)
            .map_err(|reason| BadRow::column(place, name.clone(), reason))?;
        columns.insert(name.clone(), value);
    }
    if bytes > limit {
        return Err(BadRow::whole(place, too_long(limit)));
    }
    Ok(DatasetRow { place, columns, cells_are_text: true })
}

/// Converts a field to JSON and adds its approximate size to `bytes`. NaN and infinities, which
/// JSON lacks, become null; dates and decimals become texts in the format of Parquet's tools.
fn value(field: &Field, bytes: &mut usize) -> Result<Value, String> {
    *bytes += 8;
    Ok(match field {
        Field::Null => Value::Null,
        Field::Bool(value) => Value::from(*value),
        Field::Byte(value) => Value::from(*value),
        Field::Short(value) => Value::from(*value),
        Field::Int(value) => Value::from(*value),
        Field::Long(value) => Value::from(*value),
        Field::UByte(value) => Value::from(*value),
        Field::UShort(value) => Value::from(*value),
        Field::UInt(value) => Value::from(*value),
        Field::ULong(value) => Value::from(*value),
        // Through its shortest decimal form, because `f64::from` would turn 0.1 into 0.10000000149.
        Field::Float(value) => number(value.to_string().parse().unwrap_or(f64::NAN)),
        Field::Float16(value) => number(value.to_f64()),
        Field::Double(value) => number(*value),
        Field::Str(text) => {
            *bytes += text.len();
            Value::from(text.as_str())
        }
        Field::Bytes(raw) => {
            let raw = raw.data();
            *bytes += raw.len();
            Value::from(std::str::from_utf8(raw).map_err(|error| not_text(raw, &error))?)
        }
        Field::Group(row) => {
            let mut object = Map::new();
            for (name, field) in row.get_column_iter() {
                object.insert(name.clone(), value(field, bytes)?);
            }
            Value::Object(object)
        }
        Field::ListInternal(list) => {
            let items = list.elements().iter().map(|item| value(item, bytes));
            Value::Array(items.collect::<Result<_, _>>()?)
        }
        Field::MapInternal(map) => {
            let mut object = Map::new();
            for (key, item) in map.entries() {
                let key = text_of(value(key, bytes)?);
                object.insert(key, value(item, bytes)?);
            }
            Value::Object(object)
        }
        Field::Decimal(_)
        | Field::Date(_)
        | Field::TimeMillis(_)
        | Field::TimeMicros(_)
        | Field::TimestampMillis(_)
        | Field::TimestampMicros(_) => {
            Value::from(guarded(|| field.to_string()).map_err(|_| "is out of range".to_owned())?)
        }
    })
}

fn number(value: f64) -> Value {
    Number::from_f64(value).map_or(Value::Null, Value::Number)
}
