//! Whether a store keeps the promises that a fleet needs.

use hone_core::types::now_ms;
use uuid::Uuid;

use crate::bucket::{Bucket, BucketError, failed};

/// The largest permitted difference from the local clock, in milliseconds.
const LARGEST_SKEW: u64 = 60_000;

impl Bucket {
    /// Tests the store with one object, which is deleted again. The error is the first defect.
    pub async fn probe(&self) -> Result<(), BucketError> {
        let key = format!("probe/{}", Uuid::now_v7());
        let result = self.probe_at(&key).await;
        let deleted = self.delete(&key).await;
        result.and(deleted)
    }

    async fn probe_at(&self, key: &str) -> Result<(), BucketError> {
        let promise = |kept, defect| if kept { Ok(()) } else { Err(failed(key)(defect)) };
        let first = self.swap(key, None, b"first").await?;
        promise(first.is_some(), "the store refuses a create-only put of a new object")?;
        let again = self.swap(key, None, b"second").await?;
        promise(again.is_none(), "a create-only put replaces: the store ignores If-None-Match")?;
        let third = self.swap(key, first.clone(), b"third").await?;
        promise(third.is_some(), "the store refuses a compare-and-swap with the newest ETag")?;
        let stale = self.swap(key, first, b"fourth").await?;
        promise(stale.is_none(), "an old ETag is accepted: the store ignores If-Match")?;
        let read = self.get(key, None).await?;
        promise(read.is_some_and(|(bytes, _)| bytes == b"third"), "the store returns old content")?;
        let skew = self.now()?.abs_diff(now_ms());
        let defect = format!("the clocks of the store and of this machine differ by {skew} ms");
        if skew > LARGEST_SKEW { Err(failed(key)(defect)) } else { Ok(()) }
    }
}
