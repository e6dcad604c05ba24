//! Runs on a dataset: the commands, and data directories of earlier commits.

mod commands;
mod upgrade;
