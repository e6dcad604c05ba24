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

    /// Checks that a model that a grader names can be reached.
    /// Errors: the rest of a sentence whose subject is the grader.
    pub(super) fn check_model(&self, model: &str) -> Result<(), String> {
        match model {
            SELF_JUDGE if self.self_judge.is_some() => Ok(()),
            SELF_JUDGE => Err("it asks this server's own model, and none is served".to_owned()),
            _ if self.endpoint.is_some() => Ok(()),
            other => Err(not_answered(other)),
        }
    }
}

fn not_answered(model: &str) -> String {
    format!(
        "it asks the model {model:?}, and graders.base_url names no endpoint that serves it (this \
         server's own base model is {SELF_JUDGE:?})"
    )
}

/// Chooses between this server's own model and the endpoint by the model's name.
#[async_trait]
impl ModelClient for Tools {
    async fn complete(&self, request: &ModelRequest) -> Result<ModelReply, ModelFailure> {
        match (request.model.as_str(), &self.self_judge, &self.endpoint) {
            (SELF_JUDGE, Some(own), _) => own.complete(request).await,
            (SELF_JUDGE, None, _) => Err(ModelFailure::Server("no model is served".to_owned())),
            (_, _, Some(endpoint)) => endpoint.complete(request).await,
            (other, _, None) => Err(ModelFailure::Server(not_answered(other))),
        }
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
