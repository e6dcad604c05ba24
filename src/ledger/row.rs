//! Rows in the columns of TRL's dataset formats.

use clap::ValueEnum;

use hone_core::types::Message;

/// The columns of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TrlColumns {
    /// prompt, completion, reward: every completion with its reward
    Reward,
    /// prompt, chosen, rejected: the best and the worst completion of a prompt, and corrections
    Preference,
    /// prompt, completion, label: whether the reward is above --threshold
    Label,
}

/// A value of a row.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Cell {
    Conversation(Vec<Message>),
    Text(String),
    Number(f64),
    Integer(i64),
    Flag(bool),
}

/// The values of a row by column, in one order for all rows.
pub(super) type TrlRow = Vec<(&'static str, Cell)>;
