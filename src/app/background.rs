//! A runtime with low-priority threads, for the tasks that no client waits for.

use tokio::runtime::{Builder, Runtime};

use hone_core::threads::to_background;

use super::detached_runtime::DetachedRuntime;

/// The runtime of rollouts, their rewards and the trainer's asynchronous calls.
pub(super) struct Background(DetachedRuntime);

impl Background {
    pub fn start() -> std::io::Result<Self> {
        let mut runtime = Builder::new_multi_thread();
        let runtime = runtime.thread_name("hone-background").on_thread_start(to_background);
        Ok(Self(DetachedRuntime::new(runtime.enable_all().build()?)))
    }

    /// Runs `f` so that the tasks it spawns run on this runtime.
    pub fn enter<T>(&self, f: impl FnOnce() -> T) -> T {
        let _guard = self.0.get().map(Runtime::enter);
        f()
    }
}
