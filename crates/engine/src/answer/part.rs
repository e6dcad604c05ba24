//! The parts of an answer.

/// A part of an answer, in the answer's order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerPart {
    /// More of the reasoning.
    Reasoning(String),
    /// More of the text.
    Text(String),
    /// A call begins. Its arguments follow.
    Call {
        /// The number of the call within the answer, from 0.
        index: usize,
        /// The function.
        name: String,
    },
    /// More of a call's arguments.
    Arguments {
        /// The number of the call.
        index: usize,
        /// The next part of the JSON text.
        json: String,
    },
}
