//! The metrics of recorded steps, and warnings about runs that go wrong.

pub mod metric_names;
pub mod warnings;
