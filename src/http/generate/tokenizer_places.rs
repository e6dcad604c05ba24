//! Bounds how many long texts are tokenized at once.
//!
//! No engine slot bounds this work, and a tokenizer needs about 70 bytes of memory for each byte of a text.

use std::sync::Arc;

use tokio::sync::Semaphore;
use tokio::task::{JoinError, spawn_blocking};

/// Long texts that are tokenized at once.
const PLACES: usize = 4;

/// The places of long texts.
pub struct TokenizerPlaces(Arc<Semaphore>);

impl Default for TokenizerPlaces {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(PLACES)))
    }
}

impl TokenizerPlaces {
    /// Waits for a place and runs `work` on a blocking thread.
    ///
    /// # Errors
    /// If `work` panicked.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, JoinError> {
        // The semaphore is never closed.
        let place = Arc::clone(&self.0).acquire_owned().await;
        // The work cannot be interrupted, so it keeps its place if the client leaves.
        let work = move || {
            let _place = place;
            work()
        };
        spawn_blocking(work).await
    }
}
