//! Grammars of answers that contain calls of tools in a textual format.

use serde_json::Value;

use hone_core::types::{GrammarSpec, TokenId};

use super::error::GrammarError;
use super::lark;

/// A piece of a call.
#[derive(Clone, Debug, PartialEq)]
pub enum CallPiece {
    /// Exactly this text.
    Text(String),
    /// This token, such as a special one.
    Token(TokenId),
    /// A JSON value that this schema accepts.
    Json(Value),
}

/// Where text may stand in place of calls, or before them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FreeText {
    /// Nowhere: the answer consists of calls.
    Never,
    /// Before the first call, which must follow.
    Before,
    /// Before the first call or without any call.
    Instead,
}

/// An answer of calls in a textual format, with or without text.
///
/// Text ends where the trigger begins: what follows a trigger is always a call.
///
/// ```text
/// answer = [text] trigger call { separator trigger call }
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct CallGrammar {
    /// What begins every call: a text or a token. Without it, calls begin with `{` or `[`, and text must
    /// not begin with either.
    pub trigger: Option<CallPiece>,
    /// What may follow the trigger: the pieces of each kind of call, in turn.
    pub calls: Vec<Vec<CallPiece>>,
    /// The text between two calls; `None` permits a single call.
    pub separator: Option<String>,
    /// Where text is permitted.
    pub text: FreeText,
}

impl CallGrammar {
    /// The grammar for a request.
    ///
    /// # Errors
    /// [`GrammarError::Schema`] with the place of a keyword that cannot be enforced, or
    /// [`GrammarError::Refused`] without any call or with a JSON value as the trigger.
    pub fn spec(&self) -> Result<GrammarSpec, GrammarError> {
        let refuse = |reason: &str| Err(GrammarError::Refused(reason.to_owned()));
        if self.calls.is_empty() || self.calls.iter().any(Vec::is_empty) {
            return refuse("a grammar of calls needs at least one call, and each call a piece");
        }
        let trigger = match &self.trigger {
            Some(CallPiece::Json(_)) => {
                return refuse("the trigger of a call is a text or a token");
            }
            Some(piece) => Some(rule(piece)?),
            None => None,
        };
        let mut rules = vec![format!("start: {}", self.start())];
        rules.push(match &trigger {
            Some(trigger) => format!("call: {trigger} body"),
            None => "call: body".to_owned(),
        });
        let bodies: Result<Vec<String>, GrammarError> =
            self.calls.iter().map(|pieces| sequence(pieces)).collect();
        rules.push(format!("body: {}", bodies?.join(" | ")));
        rules.push(match &self.separator {
            Some(separator) => format!("more: ({} call)*", lark::literal(separator)),
            None => "more: \"\"".to_owned(),
        });
        rules.extend(self.text_rules());
        Ok(GrammarSpec::Lark(rules.join("\n") + "\n"))
    }

    fn start(&self) -> &'static str {
        match self.text {
            FreeText::Never => "call more",
            FreeText::Before => "first more",
            FreeText::Instead => "TEXT | first more | \"\"",
        }
    }

    /// `first`, a call with or without text before it, and `TEXT`, text without a call.
    fn text_rules(&self) -> Vec<String> {
        if self.text == FreeText::Never {
            return Vec::new();
        }
        match &self.trigger {
            Some(CallPiece::Text(trigger)) => {
                let outside = format!("(?s:.*){}(?s:.*)", regex::escape(trigger));
                vec![
                    "first: lead body".to_owned(),
                    // Ends with the first trigger.
                    format!("lead[lazy]: ANY {}", lark::literal(trigger)),
                    "ANY: /(?s:.*)/".to_owned(),
                    format!("TEXT: /(?s:.+)/ & ~{}", lark::pattern(&outside)),
                ]
            }
            // Special tokens are never part of a text.
            Some(_) => vec!["first: TEXT? call".to_owned(), "TEXT: /(?s:.+)/".to_owned()],
            None => vec!["first: call".to_owned(), "TEXT: /(?s:[^{\\[].*)/".to_owned()],
        }
    }
}

fn sequence(pieces: &[CallPiece]) -> Result<String, GrammarError> {
    Ok(pieces.iter().map(rule).collect::<Result<Vec<String>, _>>()?.join(" "))
}

fn rule(piece: &CallPiece) -> Result<String, GrammarError> {
    match piece {
        CallPiece::Text(text) => Ok(lark::literal(text)),
        CallPiece::Token(id) => Ok(lark::token(*id)),
        CallPiece::Json(schema) => lark::json(schema),
    }
}
