//! A tokio runtime beside the one that the process runs on.

use tokio::runtime::Runtime;

/// A runtime that may be dropped in a task. Its threads end by themselves then, because a task must not block on
/// them, which the usual end of a runtime does.
pub(crate) struct DetachedRuntime(Option<Runtime>);

impl DetachedRuntime {
    pub fn new(runtime: Runtime) -> Self {
        Self(Some(runtime))
    }

    /// `None` only while it is dropped.
    pub fn get(&self) -> Option<&Runtime> {
        self.0.as_ref()
    }
}

impl Drop for DetachedRuntime {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}
