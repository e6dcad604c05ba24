//! What constrains the text of a completion.

use serde::{Deserialize, Serialize};

/// The texts that a completion may have. `hone_engine::grammar` compiles and enforces it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GrammarSpec {
    /// Any JSON object.
    JsonObject,
    /// The JSON values that a schema accepts; the schema as JSON text, whose order of properties is
    /// that of the completion.
    JsonSchema(String),
    /// The texts that a regular expression matches from their beginning to their end.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// The texts of a grammar in llguidance's variant of Lark.
    Lark(String),
}
