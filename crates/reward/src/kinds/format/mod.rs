//! Kinds that check a completion's form.

pub mod format_incremental;
pub mod format_soft;
pub mod format_strict;
pub mod integer_answer;
pub mod json_schema;
pub mod json_valid;
pub mod regex;
mod tags;
pub mod think_answer;
pub mod think_format;
pub mod think_graded;
