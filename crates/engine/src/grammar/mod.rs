//! Constrained completions: which token may come next so that the text follows a grammar.
//!
//! A [`GrammarSpec`](hone_core::types::GrammarSpec) is compiled once per request by
//! [`Codec::compile_grammar`](crate::Codec::compile_grammar), on a thread `hone-grammar` of its own, and
//! the last grammars are kept. Each sequence has a [`GrammarMatcher`], which the token sampler asks for the
//! permitted tokens and gives every drawn token. The grammars are those of llguidance.
//!
//! # Guarantees
//!
//! - A completion that ended with a stop token follows its grammar, character for character.
//! - Every keyword of a JSON schema is enforced, is an annotation, or is refused with its place.
//! - A stop token is permitted only where the text may end.
//! - The permitted tokens depend only on the grammar, the vocabulary and the tokens before.
//! - Text that the grammar forces has the tokens that a byte-level tokenizer makes of it.

mod calls;
mod compiled;
mod compiler;
mod error;
mod lark;
mod program;
mod queue;
mod schema;
mod vocabulary;

pub use calls::{CallGrammar, CallPiece, FreeText, Thought};
pub use compiled::{AllowedTokens, CompiledGrammar, GrammarMatcher};
pub use error::GrammarError;
pub(crate) use queue::GrammarQueue;
pub use schema::random_schema;
pub(crate) use vocabulary::GrammarVocabulary;

#[cfg(test)]
mod tests;
