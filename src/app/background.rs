//! A runtime with low-priority threads, for the tasks that no client waits for.

use tokio::runtime::{Builder, Runtime};

use hone_core::threads::to_background;

/// The runtime of rollouts, their rewards and the trainer's asynchronous calls.
pub(super) struct Background(Option<Runtime>);

impl Background {
    pub fn start() -> std::io::Result<Self> {
        let mut runtime = Builder::new_multi_thread();
        let runtime = runtime.thread_name("hone-background").on_thread_start(to_background);
        Ok(Self(Some(runtime.enable_all().build()?)))
    }

    /// Runs `f` so that the tasks it spawns run on this runtime.
    pub fn enter<T>(&self, f: impl FnOnce() -> T) -> T {
        let _guard = self.0.as_ref().map(Runtime::enter);
        f()
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        // An async context must not block on the runtime's threads.
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}
