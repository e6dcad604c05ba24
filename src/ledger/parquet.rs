//! Writes rows as Parquet.

use std::io::Write;
use std::sync::Arc;

use ::parquet::basic::{Compression, ZstdLevel};
use ::parquet::data_type::{BoolType, ByteArray, ByteArrayType, DoubleType, Int64Type};
use ::parquet::errors::ParquetError;
use ::parquet::file::properties::WriterProperties;
use ::parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use ::parquet::schema::parser::parse_message_type;
use anyhow::Context;

use super::row::{Cell, TrlColumns, TrlRow};

/// Rows of a row group.
const GROUP: usize = 4096;

/// A Parquet file that is being written.
pub(super) struct ParquetRows<W: Write + Send> {
    writer: SerializedFileWriter<W>,
    rows: Vec<TrlRow>,
}

impl<W: Write + Send> ParquetRows<W> {
    pub(super) fn new(out: W, columns: TrlColumns) -> anyhow::Result<Self> {
        let list = |name: &str| {
            format!(
                "required group {name} (LIST) {{ repeated group list {{ required group element {{ \
                 required binary role (STRING); required binary content (STRING); }} }} }} "
            )
        };
        let own = match columns {
            TrlColumns::Reward => list("completion") + "required double reward; ",
            TrlColumns::Label => list("completion") + "required boolean label; ",
            TrlColumns::Preference => list("chosen") + &list("rejected"),
        };
        let schema = format!(
            "message hone {{ {}{own}required int64 version; required binary completion_id (STRING); }}",
            list("prompt")
        );
        let schema = Arc::new(parse_message_type(&schema)?);
        let compression = Compression::ZSTD(ZstdLevel::default());
        let properties = Arc::new(WriterProperties::builder().set_compression(compression).build());
        let writer = SerializedFileWriter::new(out, schema, properties)?;
        Ok(Self { writer, rows: Vec::new() })
    }

    pub(super) fn add(&mut self, row: TrlRow) -> anyhow::Result<()> {
        self.rows.push(row);
        if self.rows.len() == GROUP { self.write_group() } else { Ok(()) }
    }

    pub(super) fn finish(mut self) -> anyhow::Result<()> {
        if !self.rows.is_empty() {
            self.write_group()?;
        }
        self.writer.close()?;
        Ok(())
    }

    fn write_group(&mut self) -> anyhow::Result<()> {
        let rows = std::mem::take(&mut self.rows);
        let width = rows.first().map_or(0, Vec::len);
        let mut group = self.writer.next_row_group()?;
        for column in 0..width {
            let cells = || rows.iter().filter_map(|row| row.get(column).map(|(_, cell)| cell));
            match cells().next() {
                Some(Cell::Conversation(_)) => write_conversations(&mut group, cells)?,
                Some(Cell::Text(_)) => {
                    let texts = cells().filter_map(|cell| match cell {
                        Cell::Text(text) => Some(ByteArray::from(text.as_str())),
                        _ => None,
                    });
                    write::<ByteArrayType>(&mut group, &texts.collect::<Vec<_>>(), None)?;
                }
                Some(Cell::Number(_)) => {
                    let numbers = cells().filter_map(|cell| match cell {
                        Cell::Number(number) => Some(*number),
                        _ => None,
                    });
                    write::<DoubleType>(&mut group, &numbers.collect::<Vec<_>>(), None)?;
                }
                Some(Cell::Integer(_)) => {
                    let numbers = cells().filter_map(|cell| match cell {
                        Cell::Integer(number) => Some(*number),
                        _ => None,
                    });
                    write::<Int64Type>(&mut group, &numbers.collect::<Vec<_>>(), None)?;
                }
                Some(Cell::Flag(_)) => {
                    let flags = cells().filter_map(|cell| match cell {
                        Cell::Flag(flag) => Some(*flag),
                        _ => None,
                    });
                    write::<BoolType>(&mut group, &flags.collect::<Vec<_>>(), None)?;
                }
                None => {}
            }
        }
        group.close()?;
        Ok(())
    }
}

/// Writes the two leaves of a list of messages. At each value, the repetition level is 0 where a row begins, and the
/// definition level is 0 for a list without messages, which has no value.
fn write_conversations<'a, W: Write + Send, I: Iterator<Item = &'a Cell>>(
    group: &mut SerializedRowGroupWriter<'_, W>,
    cells: impl Fn() -> I,
) -> anyhow::Result<()> {
    let (mut roles, mut contents) = (Vec::new(), Vec::new());
    let (mut definition, mut repetition) = (Vec::new(), Vec::new());
    for cell in cells() {
        let Cell::Conversation(messages) = cell else { continue };
        for (number, message) in messages.iter().enumerate() {
            roles.push(ByteArray::from(message.role.as_str()));
            contents.push(ByteArray::from(message.content.as_str()));
            definition.push(1);
            repetition.push(i16::from(number > 0));
        }
        if messages.is_empty() {
            definition.push(0);
            repetition.push(0);
        }
    }
    let levels = Some((&definition[..], &repetition[..]));
    write::<ByteArrayType>(group, &roles, levels)?;
    write::<ByteArrayType>(group, &contents, levels)
}

/// Writes the next column: values and, for lists, definition and repetition levels.
fn write<T: ::parquet::data_type::DataType>(
    group: &mut SerializedRowGroupWriter<'_, impl Write + Send>,
    values: &[T::T],
    levels: Option<(&[i16], &[i16])>,
) -> anyhow::Result<()> {
    let mut column = group.next_column()?.context("the schema has too few columns")?;
    let (definition, repetition) = levels.unzip();
    column.typed::<T>().write_batch(values, definition, repetition)?;
    Ok::<_, ParquetError>(column.close()?)?;
    Ok(())
}
