//! What the reports of runs, of the demo and of benchmarks consist of: text on the terminal, tables, and
//! statistics with intervals.

pub mod stats;
pub mod terminal;
