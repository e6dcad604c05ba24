//! The names that most kinds use.

pub(super) use hone_core::config::{Checked, Problem, quoted};
pub(super) use hone_core::config::{at_least, between, texts};

pub(super) use super::answer::{AnswerFinder, answer_key, answer_pattern};
pub(super) use super::define::define_kind;
pub(super) use super::kind::{BuildContext, Built, Kind, indicator, per_sample, share_of_target};
