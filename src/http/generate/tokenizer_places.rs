//! Bounds how many long texts of `/tokenize` and `/detokenize` are computed at once.

use tokio::sync::{Semaphore, SemaphorePermit};

/// Texts longer than this are tokenized on a blocking thread.
pub(super) const INLINE_BYTES: usize = 16 << 10;
/// Long texts that are computed at once.
const PLACES: usize = 4;

/// The places of long texts.
pub struct TokenizerPlaces(Semaphore);

impl Default for TokenizerPlaces {
    fn default() -> Self {
        Self(Semaphore::new(PLACES))
    }
}

impl TokenizerPlaces {
    /// Waits for a place, if what is computed has more than [`INLINE_BYTES`] bytes or tokens.
    pub(super) async fn wait(&self, size: usize) -> Option<SemaphorePermit<'_>> {
        // The semaphore is never closed.
        if size > INLINE_BYTES { self.0.acquire().await.ok() } else { None }
    }
}
