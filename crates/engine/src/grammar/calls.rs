//! Grammars of answers that call functions in a textual format, with or without reasoning and text before.

use serde_json::Value;

use hone_core::types::{GrammarSpec, TokenId};

use super::GrammarError;
use super::lark;

/// The first line of these grammars, a comment.
const HEADER: &str = "// Calls of functions.";

/// A piece of an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum CallPiece {
    /// Exactly this text.
    Text(String),
    /// This token, such as a special one.
    Token(TokenId),
    /// A JSON value that this schema accepts.
    Json(Value),
}

/// Reasoning at the beginning of an answer. Any text is permitted up to its end.
#[derive(Clone, Debug, PartialEq)]
pub struct Thought {
    /// The text or token with which an answer may begin it; `None` if the prompt has begun it already.
    pub open: Option<CallPiece>,
    /// The text or token that ends it.
    pub close: CallPiece,
}

/// An answer of calls in a textual format.
///
/// ```text
/// answer = [thought] [text] open call { separator call } close
/// ```
///
/// A text ends where `open` begins: what follows is always a call.
#[derive(Clone, Debug, PartialEq)]
pub struct CallGrammar {
    /// Reasoning, in models that have it.
    pub thought: Option<Thought>,
    /// Permits text before calls or without any; `None` if the answer must have calls and nothing else. No bracket
    /// follows these texts, which would begin a call too.
    pub text: Option<Vec<String>>,
    /// What begins the calls. Without any piece, the calls begin with `{`, and text must not.
    pub open: Vec<CallPiece>,
    /// The pieces of each kind of call.
    pub calls: Vec<Vec<CallPiece>>,
    /// What is between two calls; `None` permits a single call.
    pub separator: Option<Vec<CallPiece>>,
    /// What ends the calls.
    pub close: Vec<CallPiece>,
}

impl CallGrammar {
    /// Whether [`Self::spec`] made a grammar.
    pub fn made(spec: &GrammarSpec) -> bool {
        matches!(spec, GrammarSpec::Lark(text) if text.starts_with(HEADER))
    }

    /// The grammar for a request.
    ///
    /// # Errors
    /// [`GrammarError::Schema`] with the place of a keyword that cannot be enforced, or
    /// [`GrammarError::Refused`] without any call or with a schema that is too long.
    pub fn spec(&self) -> Result<GrammarSpec, GrammarError> {
        if self.calls.is_empty() || self.calls.iter().any(Vec::is_empty) {
            let reason = "a grammar of calls needs at least one call, and each call a piece";
            return Err(GrammarError::Refused(reason.to_owned()));
        }
        let bodies: Result<Vec<String>, GrammarError> =
            self.calls.iter().map(|pieces| sequence(pieces)).collect();
        let mut rules = vec![HEADER.to_owned()];
        rules.extend(match &self.text {
            None => vec![format!("start: {} calls", self.before("GAP?"))],
            Some(beginnings) => self.answer_rules(beginnings)?,
        });
        let several = match &self.separator {
            Some(separator) => format!("({} call)*", sequence(separator)?),
            None => String::new(),
        };
        let (open, close) = (sequence(self.rest_of_open())?, sequence(&self.close)?);
        rules.push(format!("calls: {open} call {several} {close}"));
        rules.push(format!("call: {}", bodies?.join(" | ")));
        if let Some(thought) = &self.thought {
            rules.extend(thought.rules()?);
        }
        let has_gap = self.text.as_ref().map_or(self.thought.is_some(), |_| self.open.is_empty());
        if has_gap {
            // White space of models that put it between reasoning and a call.
            rules.push(r"GAP: /\s{1,4}/".to_owned());
        }
        Ok(GrammarSpec::Lark(rules.join("\n") + "\n"))
    }

    /// The reasoning before the rest of an answer, with `gap` after it.
    fn before(&self, gap: &str) -> String {
        match &self.thought {
            None => String::new(),
            Some(Thought { open: Some(_), .. }) => format!("(thought {gap})?"),
            Some(Thought { open: None, .. }) => format!("thought {gap}"),
        }
    }

    /// The piece that ends a text.
    fn trigger(&self) -> Option<&CallPiece> {
        self.open.first().filter(|_| self.text.is_some())
    }

    /// The pieces of `open` that belong to the calls rather than to what precedes them.
    fn rest_of_open(&self) -> &[CallPiece] {
        self.open.get(usize::from(self.trigger().is_some())..).unwrap_or_default()
    }

    /// `start` and `answer`, with text before the calls or without any call.
    fn answer_rules(&self, beginnings: &[String]) -> Result<Vec<String>, GrammarError> {
        let mut rules = vec![format!("start: {} answer", self.before(""))];
        let call = |begin: &String| containing(&format!(r"{}\s*[\[{{]", regex::escape(begin)));
        let mut excluded: Vec<String> = beginnings.iter().map(call).collect();
        if let Some(Thought { open: Some(CallPiece::Text(open)), .. }) = &self.thought {
            excluded.push(format!(r"\s*{}(?s:.*)", regex::escape(open)));
        }
        match self.trigger() {
            Some(CallPiece::Text(trigger)) => {
                rules.push("answer: TEXT | lead calls | \"\"".to_owned());
                // Ends with the first trigger.
                rules.push(format!("lead[lazy]: BEFORE {}", lark::literal(trigger)));
                rules.push(format!("BEFORE: {}", text_without("(?s:.*)", &excluded)));
                excluded.push(containing(&regex::escape(trigger)));
            }
            // Special tokens are never part of a text.
            Some(token) => rules.push(format!("answer: TEXT? ({} calls)?", rule(token)?)),
            None => {
                rules.push("answer: TEXT | GAP? calls | \"\"".to_owned());
                excluded.push(r"\s*\{(?s:.*)".to_owned());
            }
        }
        rules.push(format!("TEXT: {}", text_without("(?s:.+)", &excluded)));
        Ok(rules)
    }
}

impl Thought {
    /// `thought`, the reasoning with its tags.
    fn rules(&self) -> Result<Vec<String>, GrammarError> {
        let mut rules = Vec::new();
        let open = match &self.open {
            None => String::new(),
            Some(CallPiece::Text(open)) => {
                rules.push(format!("opening[lazy]: {}", lark::literal(open)));
                "opening".to_owned()
            }
            Some(token) => rule(token)?,
        };
        let close = match &self.close {
            CallPiece::Text(close) => {
                // Ends with the first closing tag.
                rules.push(format!("closing[lazy]: THOUGHTS {}", lark::literal(close)));
                rules.push("THOUGHTS: /(?s:.*)/".to_owned());
                "closing".to_owned()
            }
            token => {
                rules.push("THOUGHTS: /(?s:.+)/".to_owned());
                format!("THOUGHTS? {}", rule(token)?)
            }
        };
        rules.push(format!("thought: {open} {close}"));
        Ok(rules)
    }
}

/// A regular expression of the texts that contain what `regex` matches.
fn containing(regex: &str) -> String {
    format!("(?s:.*)(?:{regex})(?s:.*)")
}

/// A terminal of what `regex` matches, except what one of `excluded` matches.
fn text_without(regex: &str, excluded: &[String]) -> String {
    match excluded {
        [] => lark::pattern(regex),
        _ => format!("{} & ~{}", lark::pattern(regex), lark::pattern(&excluded.join("|"))),
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
