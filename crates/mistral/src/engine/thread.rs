//! Threads that turn a panic of mistral.rs into an error.

use std::any::Any;
use std::{io, thread};

use hone_engine::EngineError;

/// Runs `work` on a new thread and waits for it. The thread may block, and has no adapter applied.
pub(super) fn run_on_thread<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> Result<T, EngineError> + Send + 'static,
) -> Result<T, EngineError> {
    let thread = thread::Builder::new().name(name.to_owned()).spawn(work).map_err(no_thread)?;
    thread.join().unwrap_or_else(|panic| Err(panicked(panic.as_ref())))
}

pub(super) fn no_thread(error: io::Error) -> EngineError {
    EngineError::Internal(format!("a thread cannot be started: {error}"))
}

/// The error of a thread that panicked.
pub(super) fn panicked(panic: &(dyn Any + Send)) -> EngineError {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    EngineError::Internal(format!("panic: {}", text.unwrap_or_default()))
}
