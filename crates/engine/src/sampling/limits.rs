//! Which tokens a request permits next: those of its grammar, and stop tokens only where it may end.

use std::time::Instant;

use prometheus::Histogram;

use hone_core::metrics::Metrics;
use hone_core::types::{SamplingParams, TokenId};

use crate::grammar::{AllowedTokens, CompiledGrammar, GrammarError, GrammarMatcher};

/// The limits of one sequence.
#[derive(Debug, Default)]
pub(super) struct TokenLimits {
    /// The model's own stop tokens.
    own_stops: Vec<TokenId>,
    /// Further stop tokens of the request.
    further_stops: Vec<TokenId>,
    min_tokens: u32,
    ignore_eos: bool,
    /// Tokens so far.
    drawn: u32,
    grammar: Option<FollowedGrammar>,
}

#[derive(Debug)]
struct FollowedGrammar {
    matcher: GrammarMatcher,
    mask_duration: Histogram,
}

/// The tokens that may be drawn next.
#[derive(Debug)]
pub(super) enum PermittedTokens {
    /// All but these.
    Without(Vec<TokenId>),
    /// These only.
    Only {
        tokens: AllowedTokens,
        /// Whether there is one, or the text must end.
        forced: bool,
    },
}

impl TokenLimits {
    pub fn new(
        params: &SamplingParams,
        own_stops: &[TokenId],
        grammar: Option<&CompiledGrammar>,
        metrics: &Metrics,
    ) -> Self {
        let further = params.stop_token_ids.iter().filter(|id| !own_stops.contains(id));
        let mut further_stops: Vec<TokenId> = further.copied().collect();
        further_stops.sort_unstable();
        further_stops.dedup();
        Self {
            own_stops: own_stops.to_vec(),
            further_stops,
            min_tokens: params.min_tokens,
            ignore_eos: params.ignore_eos,
            drawn: 0,
            grammar: grammar.map(|grammar| FollowedGrammar {
                matcher: grammar.matcher(),
                mask_duration: metrics.engine_mask_duration.clone(),
            }),
        }
    }

    fn stops(&self) -> impl Iterator<Item = TokenId> {
        self.own_stops.iter().chain(&self.further_stops).copied()
    }

    /// What may be drawn next; `None` if everything may.
    ///
    /// A further stop token may be drawn exactly where the model's own may, also if it has text that the
    /// grammar permits elsewhere.
    pub fn permitted(&mut self) -> Result<Option<PermittedTokens>, GrammarError> {
        if let Some(grammar) = &mut self.grammar {
            let start = Instant::now();
            let mut tokens = grammar.matcher.allowed()?;
            grammar.mask_duration.observe(start.elapsed().as_secs_f64());
            let may_end = self.own_stops.iter().any(|id| tokens.contains(*id));
            self.further_stops.iter().for_each(|id| tokens.set(*id, may_end));
            let stops = self.stops().filter(|id| tokens.contains(*id)).count();
            let count = tokens.count();
            let forced = count == 1 || count == stops;
            return if count == 0 {
                Err(GrammarError::DeadEnd)
            } else {
                Ok(Some(PermittedTokens::Only { tokens, forced }))
            };
        }
        let excluded: Vec<TokenId> = if self.drawn < self.min_tokens {
            self.stops().collect()
        } else if self.ignore_eos {
            self.own_stops.clone()
        } else {
            return Ok(None);
        };
        Ok((!excluded.is_empty()).then_some(PermittedTokens::Without(excluded)))
    }

    /// Adds the token that was drawn.
    pub fn push(&mut self, id: TokenId) -> Result<(), GrammarError> {
        self.drawn += 1;
        let is_stop = self.stops().any(|stop| stop == id);
        match &mut self.grammar {
            // Nothing follows a stop token.
            Some(grammar) if !is_stop => grammar.matcher.push(id),
            _ => Ok(()),
        }
    }
}

impl PermittedTokens {
    /// Sets the logits of all other tokens to minus infinity.
    pub fn mask(&self, logits: &mut [f32]) {
        match self {
            Self::Without(excluded) => {
                for id in excluded {
                    if let Some(logit) = logits.get_mut(*id as usize) {
                        *logit = f32::NEG_INFINITY;
                    }
                }
            }
            Self::Only { tokens, .. } => tokens.mask(logits),
        }
    }

    /// Whether a drawn token says nothing about the policy.
    pub fn is_forced(&self) -> bool {
        matches!(self, Self::Only { forced: true, .. })
    }
}
