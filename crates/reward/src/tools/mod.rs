//! Resources that some kinds of reward share: models, the sandbox and metrics.
//!
//! [`Tools`] is built once at startup and passed to [`Routes::with`](crate::Routes::with). A kind
//! whose resource is missing is refused by name. [`Tools::backends`] adapts them to OpenAI's
//! graders. Calls run in the caller's task.

mod endpoint;

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::Value;
use tokio::sync::OnceCell;

use hone_core::metrics::Metrics;

use crate::code::grade_python;
use crate::grader::{
    Backends, CodeFailure, CodeRunner, ModelClient, ModelFailure, ModelReply, ModelRequest,
};
use crate::judge::SELF_JUDGE;
use crate::sandbox::{Limits, Sandbox, SandboxError, Setup};

pub use endpoint::{GraderEndpoint, GradersConfig};

/// The resources that rewards may use.
#[derive(Clone, Default)]
pub struct Tools {
    /// The metrics that count calls.
    pub metrics: Option<Arc<Metrics>>,
    /// This server's base model, for judges with `base_url = "self"`.
    pub self_judge: Option<Arc<dyn ModelClient>>,
    /// The endpoint of every other model that graders name.
    pub endpoint: Option<Arc<GraderEndpoint>>,
    /// The sandbox for the Python of routes.
    pub sandbox: Option<Arc<Sandbox>>,
    /// The sandbox for `python` graders, which may arrive over HTTP although no route needs it.
    pub python: Option<Arc<LazySandbox>>,
}

impl Tools {
    /// The backends of OpenAI graders.
    pub fn backends(&self) -> Backends {
        let code = self.python.clone().map(|python| python as _);
        Backends { model: Some(Arc::new(self.clone())), code }
    }

    /// What answers for the model that a grader names: this server's own model, or the endpoint.
    /// Errors: the rest of a sentence whose subject is the grader.
    pub(super) fn client(&self, model: &str) -> Result<&dyn ModelClient, String> {
        match (model, &self.self_judge, &self.endpoint) {
            (SELF_JUDGE, Some(own), _) => Ok(own.as_ref()),
            (SELF_JUDGE, None, _) => {
                Err("it asks this server's own model, and none is served".to_owned())
            }
            (_, _, Some(endpoint)) => Ok(endpoint.as_ref()),
            (other, _, None) => Err(format!(
                "it asks the model {other:?}, and graders.base_url names no endpoint that serves it (this \
                 server's own base model is {SELF_JUDGE:?})"
            )),
        }
    }
}

#[async_trait]
impl ModelClient for Tools {
    async fn complete(&self, request: &ModelRequest) -> Result<ModelReply, ModelFailure> {
        let client = self.client(&request.model).map_err(ModelFailure::Server)?;
        client.complete(request).await
    }
}

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
    /// Errors: if code cannot be confined on this machine; the next call tries again.
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
        grade_python(source, &sandbox, Limits::default(), sample, item).await
    }
}
