//! Python graders, each call in a sandbox process.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::Value;
use tokio::sync::OnceCell;

use crate::code::{PythonGrader, PythonGraderError};
use crate::grader::{CodeFailure, CodeRunner};
use crate::sandbox::{Limits, Sandbox, SandboxError, Setup};

/// A sandbox that is tried before it is trusted: once, when it is first needed.
pub struct LazySandbox {
    setup: Setup,
    tried: OnceCell<Arc<Sandbox>>,
}

impl LazySandbox {
    /// Nothing is started yet.
    pub fn new(setup: Setup) -> Self {
        Self { setup, tried: OnceCell::new() }
    }

    /// The sandbox.
    ///
    /// # Errors
    /// If code cannot be confined here; the next call tries again.
    pub async fn get(&self) -> Result<Arc<Sandbox>, SandboxError> {
        let start = async || {
            let sandbox = Sandbox::new(self.setup.clone()).await?;
            let isolation = sandbox.probe().await?;
            tracing::info!(?isolation, "sandbox tried");
            Ok(Arc::new(sandbox))
        };
        self.tried.get_or_try_init(start).await.cloned()
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
