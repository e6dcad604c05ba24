//! The file format: tables, stored records and their encoding.

pub(crate) mod codec;
mod records;
pub(crate) mod schema;
mod stored;
