//! What the ledger records of sampled tokens.

use hone_core::types::{TokenId, TokenSpan};

use crate::api::Token;

/// The sampled tokens of one completion, as [`Sample`](hone_core::types::Sample) has them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenRecords {
    /// The tokens, the stop token included.
    pub ids: Vec<TokenId>,
    /// The log-probability of each.
    pub logprobs: Vec<f32>,
    kept: Vec<f32>,
    /// Positions of forced tokens, in order.
    pub forced: Vec<TokenSpan>,
}

impl TokenRecords {
    /// Adds a token.
    pub fn push(&mut self, token: &Token) {
        if token.forced {
            TokenSpan::append(&mut self.forced, self.ids.len());
        }
        self.ids.push(token.id);
        self.logprobs.push(token.logprob);
        self.kept.push(token.kept_mass);
    }

    /// The mass that was kept at each token; empty if it was 1 at all of them.
    pub fn kept(&self) -> Vec<f32> {
        let all = self.kept.iter().all(|mass| *mass == 1.0);
        if all { Vec::new() } else { self.kept.clone() }
    }
}

impl<'a> FromIterator<&'a Token> for TokenRecords {
    fn from_iter<T: IntoIterator<Item = &'a Token>>(tokens: T) -> Self {
        let mut records = Self::default();
        tokens.into_iter().for_each(|token| records.push(token));
        records
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(id: TokenId, kept_mass: f32, forced: bool) -> Token {
        Token { id, logprob: -0.5, kept_mass, forced, top: Vec::new(), text: String::new() }
    }

    #[test]
    fn forced_positions_and_kept_masses_are_recorded_if_there_are_any() {
        let plain: TokenRecords = [token(1, 1.0, false), token(2, 1.0, false)].iter().collect();
        assert_eq!((plain.kept(), plain.forced.len()), (Vec::new(), 0));
        let mixed = [token(1, 0.5, true), token(2, 1.0, false), token(3, 0.25, true)];
        let mixed: TokenRecords = mixed.iter().collect();
        assert_eq!((mixed.ids.clone(), mixed.kept()), (vec![1, 2, 3], vec![0.5, 1.0, 0.25]));
        assert_eq!(TokenSpan::mask(&mixed.forced, 3), [true, false, true]);
    }
}
