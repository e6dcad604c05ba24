//! The asynchronous tasks that no client waits for, on threads that give way.

use tokio::runtime::{Builder, Runtime};

use hone_core::threads::to_background;

/// A runtime for rollouts, their rewards and the trainer's calls.
pub(super) struct Background(Option<Runtime>);

impl Background {
    pub fn start() -> std::io::Result<Self> {
        let mut runtime = Builder::new_multi_thread();
        let runtime = runtime.thread_name("hone-background").on_thread_start(to_background);
        Ok(Self(Some(runtime.enable_all().build()?)))
    }

    /// Runs `f` so that whatever it spawns runs here.
    pub fn enter<T>(&self, f: impl FnOnce() -> T) -> T {
        let _guard = self.0.as_ref().map(Runtime::enter);
        f()
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        // An asynchronous context may not wait for the threads.
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}
