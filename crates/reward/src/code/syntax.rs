//! `code_syntax`: whether a completion's code compiles.
//!
//! It is compiled in the sandbox, because nested code can crash the compiler. All samples of a
//! call share a process; the sample that ends it scores 0, and the next process continues after it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use serde_json::json;

use super::{CodeSyntax, extract_block};
use crate::reward_fn::indicator;
use crate::sandbox::{Limits, RunRequest, Sandbox, SandboxError};
use crate::{RewardFn, ScoreInput};

/// The part `kind = "code_syntax"`.
pub struct SyntaxReward {
    params: CodeSyntax,
    sandbox: Arc<Sandbox>,
    warned: AtomicBool,
}

impl SyntaxReward {
    /// The part with these parameters.
    pub fn new(params: CodeSyntax, sandbox: Arc<Sandbox>) -> Self {
        Self { params, sandbox, warned: AtomicBool::new(false) }
    }

    /// The code of a completion; `None` where there is none.
    fn code<'t>(&self, text: &'t str) -> Option<&'t str> {
        let whole = (!self.params.require_block).then_some(text);
        extract_block(text, self.params.block).or(whole).filter(|code| !code.trim().is_empty())
    }
}

#[async_trait]
impl RewardFn for SyntaxReward {
    async fn score(&self, samples: &[ScoreInput]) -> Vec<Option<f64>> {
        let codes: Vec<Option<&str>> = samples.iter().map(|input| self.code(&input.text)).collect();
        let present: Vec<&str> = codes.iter().copied().flatten().collect();
        match compile(&present, &self.sandbox).await {
            Ok(compiled) => {
                let mut compiled = compiled.into_iter();
                let value = |code: &Option<&str>| {
                    Some(indicator(code.is_some() && compiled.next() == Some(true)))
                };
                codes.iter().map(value).collect()
            }
            Err(error) => {
                if !self.warned.swap(true, Ordering::Relaxed) {
                    tracing::warn!(%error, "code was not compiled; later failures are not logged");
                }
                vec![None; samples.len()]
            }
        }
    }
}

async fn compile(codes: &[&str], sandbox: &Sandbox) -> Result<Vec<bool>, SandboxError> {
    let mut compiled = Vec::with_capacity(codes.len());
    while compiled.len() < codes.len() {
        let request = RunRequest {
            code: include_str!("syntax.py").to_owned(),
            stdin: json!(codes[compiled.len()..]).to_string(),
            limits: Limits::default(),
        };
        let outcome = sandbox.run(request).await?;
        let known = outcome.report.chars().take(codes.len() - compiled.len());
        compiled.extend(known.map(|result| result == '1'));
        if compiled.len() < codes.len() {
            // The first one without a result ended the process.
            compiled.push(false);
        }
    }
    Ok(compiled)
}
