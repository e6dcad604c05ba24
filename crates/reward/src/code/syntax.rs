//! `code_syntax`: whether a completion's code compiles.
//!
//! Python is compiled in the sandbox, because nested code can crash the compiler. All samples of a
//! call share a process; the sample that ends it scores 0, and the next process continues after it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use serde_json::json;

use super::params::CodeSyntax;
use super::{extract_block, sandbox_of};
use crate::sandbox::{Limits, RunRequest, Sandbox, SandboxError};
use crate::script::engine;
use crate::{RewardFn, ScoreInput};

/// The part `kind = "code_syntax"`.
pub struct SyntaxReward {
    params: CodeSyntax,
    sandbox: Option<Arc<Sandbox>>,
    warned: AtomicBool,
}

impl SyntaxReward {
    /// Prepares the part; Python needs `sandbox`.
    /// Errors: if the language is Python and `sandbox` is `None`.
    pub fn new(params: CodeSyntax, sandbox: Option<Arc<Sandbox>>) -> Result<Self, SandboxError> {
        let sandbox = sandbox_of(params.language, sandbox)?;
        Ok(Self { params, sandbox, warned: AtomicBool::new(false) })
    }

    /// The code of a completion; `None` where there is none.
    fn code<'t>(&self, text: &'t str) -> Option<&'t str> {
        let whole = (!self.params.require_block).then_some(text);
        extract_block(text, self.params.block, self.params.language)
            .or(whole)
            .filter(|code| !code.trim().is_empty())
    }
}

#[async_trait]
impl RewardFn for SyntaxReward {
    async fn score(&self, samples: &[ScoreInput]) -> Vec<Option<f64>> {
        let codes: Vec<Option<&str>> = samples.iter().map(|input| self.code(&input.text)).collect();
        let present: Vec<&str> = codes.iter().copied().flatten().collect();
        let compiled = match &self.sandbox {
            Some(sandbox) => python(&present, sandbox).await,
            None => Ok(rhai(&present)),
        };
        match compiled {
            Ok(compiled) => {
                let mut compiled = compiled.into_iter();
                let value = |code: &Option<&str>| {
                    let holds = code.is_some() && compiled.next() == Some(true);
                    Some(f64::from(u8::from(holds)))
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

async fn python(codes: &[&str], sandbox: &Sandbox) -> Result<Vec<bool>, SandboxError> {
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

fn rhai(codes: &[&str]) -> Vec<bool> {
    let engine = engine::restricted(0);
    codes.iter().map(|code| engine.compile(code).is_ok()).collect()
}
