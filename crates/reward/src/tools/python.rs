//! Runs `python` graders, each call in a sandbox process.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::Value;
use tokio::sync::OnceCell;

use crate::code::{PythonGrader, PythonGraderError};
use crate::grader::{CodeFailure, CodeRunner};
use crate::sandbox::{Limits, Sandbox, SandboxError, Setup};

/// A sandbox that is created and probed on first use.
pub struct LazySandbox {
    setup: Setup,
    sandbox: OnceCell<Arc<Sandbox>>,
}

impl LazySandbox {
    /// Stores the settings; starts nothing.
    pub fn new(setup: Setup) -> Self {
        Self { setup, sandbox: OnceCell::new() }
    }

    /// The sandbox, created and probed by the first successful call.
    ///
    /// # Errors
    /// If code cannot be confined on this machine; the next call tries again.
    pub async fn get(&self) -> Result<Arc<Sandbox>, SandboxError> {
        let start = async || {
            let sandbox = Sandbox::new(self.setup.clone()).await?;
            let isolation = sandbox.probe().await?;
            tracing::info!(?isolation, "sandbox works");
            Ok(Arc::new(sandbox))
        };
        self.sandbox.get_or_try_init(start).await.cloned()
    }
}

#[async_trait]
impl CodeRunner for LazySandbox {
    async fn grade(&self, source: &str, sample: &Value, item: &Value) -> Result<f64, CodeFailure> {
        let sandbox = self.get().await.map_err(|error| CodeFailure::Server(error.to_string()))?;
        let grader = PythonGrader::new(source, sandbox, Limits::default());
        grader.grade(sample, item).await.map_err(|error| match error {
            PythonGraderError::Sandbox(error) => CodeFailure::Server(error.to_string()),
            other => CodeFailure::Runtime(other.to_string()),
        })
    }
}
