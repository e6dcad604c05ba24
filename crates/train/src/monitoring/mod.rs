//! TODO

pub mod metric_names;
pub mod warnings;
