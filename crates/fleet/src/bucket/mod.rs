//! Requests to one prefix of a bucket.
//!
//! The crate `object_store` repeats a failed request. If the answer of a conditional put is lost, its repetition
//! conflicts with its own effect. After a conflict or an error, read the object to see which content it has.

use std::error::Error;
use std::fs;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures::TryStreamExt;
use hone_core::files::{FileError, at};
use hone_core::types::{UnixMillis, now_ms};
/// Which content of an object a compare-and-swap replaces: its ETag or generation.
pub use object_store::UpdateVersion as Tag;
use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::buffered::BufWriter;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::memory::InMemory;
use object_store::path::Path as Location;
use object_store::prefix::PrefixStore;
use object_store::{
    BackoffConfig, Certificate, Error as StoreError, GetOptions, ObjectStore, ObjectStoreExt,
    PutMode, RetryConfig,
};

#[cfg(test)]
mod tests;
mod wire;

pub use wire::BucketUse;
use wire::{Wire, WireConnector};

/// The bytes of a large object that one request transfers. Stores have at most 10,000 parts in an object.
pub(crate) const PART: usize = 8 << 20;
/// Parts that are sent at the same time.
const SENDING: usize = 3;

/// What is wrong with an object or a file, or why it was not read or written.
#[derive(Debug, thiserror::Error)]
#[error("{key}: {reason}")]
pub struct BucketError {
    /// The object's key, the bucket's URL or the file's path.
    pub key: String,
    /// The reason; that of the last attempt if a request failed.
    pub reason: Box<dyn Error + Send + Sync>,
}

impl BucketError {
    /// Whether the store did not answer or failed by itself, so that a later request may succeed.
    pub fn is_passing(&self) -> bool {
        matches!(self.reason.downcast_ref(), Some(StoreError::Generic { .. }))
    }
}

/// Adds the key to an error, for use with `map_err`.
pub(crate) fn failed<E: Into<Box<dyn Error + Send + Sync>>>(
    key: &str,
) -> impl FnOnce(E) -> BucketError + '_ {
    |reason| BucketError { key: key.to_owned(), reason: reason.into() }
}

impl From<FileError> for BucketError {
    fn from(FileError { path, source }: FileError) -> Self {
        failed(&path.to_string_lossy())(source)
    }
}

/// One prefix of a bucket. Clones share connections, clock and counters.
#[derive(Clone, Debug)]
pub struct Bucket {
    store: Arc<dyn ObjectStore>,
    wire: Arc<Wire>,
}

impl Bucket {
    /// Opens `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX` or `az://CONTAINER/PREFIX` without a request.
    ///
    /// The certificates in `ca_file`, as PEM, are trusted in addition to the system's. The environment has the
    /// rest, credentials and endpoint included, under the names that `object_store` documents.
    pub fn open(url: &str, ca_file: Option<&Path>) -> Result<Self, BucketError> {
        let unknown = "the URL of a fleet's store is s3://…, gs://… or az://… with BUCKET/PREFIX";
        let (scheme, rest) = url.split_once("://").ok_or(unknown).map_err(failed(url))?;
        let prefix = rest.split_once('/').map_or("", |(_, prefix)| prefix);
        let (wire, mut certificates) = (Arc::new(Wire::new()), Vec::new());
        if let Some(path) = ca_file {
            let pem = fs::read(path).map_err(at(path))?;
            let bundle = Certificate::from_pem_bundle(&pem);
            certificates = bundle.map_err(failed(&path.to_string_lossy()))?;
        }
        let connector = WireConnector { wire: Arc::clone(&wire), certificates };
        macro_rules! store {
            ($builder:expr) => {{
                let builder = $builder.with_url(url).with_retry(retries());
                let store = builder.with_http_connector(connector).build().map_err(failed(url))?;
                Arc::new(PrefixStore::new(store, prefix))
            }};
        }
        let store: Arc<dyn ObjectStore> = match scheme {
            "s3" => store!(AmazonS3Builder::from_env()),
            "gs" => store!(GoogleCloudStorageBuilder::from_env()),
            "az" => store!(MicrosoftAzureBuilder::from_env()),
            _ => return Err(failed(url)(unknown)),
        };
        Ok(Self { store, wire })
    }

    /// A new and empty store in memory, for tests. Its clock is the local one; its requests are not counted.
    pub fn memory() -> Self {
        let wire = Wire::new();
        wire.observe(now_ms());
        Self { store: Arc::new(InMemory::new()), wire: Arc::new(wire) }
    }

    /// An estimate of the store's time, which is never ahead of it. An error before the first answer that has a date.
    pub fn now(&self) -> Result<UnixMillis, BucketError> {
        self.wire.now().ok_or("the store sends no Date").map_err(failed("the store's clock"))
    }

    /// What was requested since the bucket was opened.
    pub fn used(&self) -> BucketUse {
        self.wire.used()
    }

    /// Writes an object, whether or not it exists.
    pub async fn put(&self, key: &str, bytes: &[u8]) -> Result<(), BucketError> {
        let put = self.store.put(&Location::from(key), bytes.to_vec().into()).await;
        put.map(drop).map_err(failed(key))
    }

    /// Writes an object that still has the content of `tag`, or without `tag` does not exist. Returns the new tag, or
    /// `None` if the object is another one.
    pub async fn swap(
        &self,
        key: &str,
        tag: Option<Tag>,
        bytes: &[u8],
    ) -> Result<Option<Tag>, BucketError> {
        let mode = tag.map_or(PutMode::Create, PutMode::Update);
        let bytes = bytes.to_vec();
        match self.store.put_opts(&Location::from(key), bytes.into(), mode.into()).await {
            Ok(put) => Ok(Some(put.into())),
            Err(StoreError::AlreadyExists { .. } | StoreError::Precondition { .. }) => Ok(None),
            Err(error) => Err(failed(key)(error)),
        }
    }

    /// A writer of an object of any size, which has its content once the writer is shut down.
    pub(crate) fn writer(&self, key: &str) -> BufWriter {
        BufWriter::with_capacity(Arc::clone(&self.store), Location::from(key), PART)
            .with_max_concurrency(SENDING)
    }

    /// Reads an object; `None` if it does not exist, or still has the content of `known`.
    pub async fn get(
        &self,
        key: &str,
        known: Option<&Tag>,
    ) -> Result<Option<(Vec<u8>, Tag)>, BucketError> {
        let e_tag = known.and_then(|tag| tag.e_tag.clone());
        let options = GetOptions::new().with_if_none_match(e_tag);
        let found = match self.store.get_opts(&Location::from(key), options).await {
            Err(StoreError::NotFound { .. } | StoreError::NotModified { .. }) => return Ok(None),
            found => found.map_err(failed(key))?,
        };
        let tag = Tag { e_tag: found.meta.e_tag.clone(), version: found.meta.version.clone() };
        Ok(Some((found.bytes().await.map_err(failed(key))?.into(), tag)))
    }

    /// Reads a part of an object.
    pub(crate) async fn part(&self, key: &str, range: Range<u64>) -> Result<Vec<u8>, BucketError> {
        let read = self.store.get_range(&Location::from(key), range).await;
        read.map(Vec::from).map_err(failed(key))
    }

    /// The keys below the folder `prefix`, in order; with `after`, only those after that key.
    pub async fn list(
        &self,
        prefix: &str,
        after: Option<&str>,
    ) -> Result<Vec<String>, BucketError> {
        let after = Location::from(after.unwrap_or(prefix));
        let listed = self.store.list_with_offset(Some(&Location::from(prefix)), &after);
        let keys = listed.map_ok(|meta| meta.location.into()).try_collect::<Vec<String>>().await;
        let mut keys = keys.map_err(failed(prefix))?;
        keys.sort();
        Ok(keys)
    }

    /// The folders directly in the folder `prefix`.
    pub async fn list_folders(&self, prefix: &str) -> Result<Vec<String>, BucketError> {
        let listed = self.store.list_with_delimiter(Some(&Location::from(prefix))).await;
        let folders = listed.map_err(failed(prefix))?.common_prefixes;
        Ok(folders.into_iter().map(String::from).collect())
    }

    /// Deletes an object; succeeds if it does not exist.
    pub async fn delete(&self, key: &str) -> Result<(), BucketError> {
        match self.store.delete(&Location::from(key)).await {
            Ok(()) | Err(StoreError::NotFound { .. }) => Ok(()),
            Err(error) => Err(failed(key)(error)),
        }
    }
}

/// A request may take 30 seconds, the default of `object_store`, which the environment can change.
fn retries() -> RetryConfig {
    let backoff = BackoffConfig { max_backoff: Duration::from_secs(3), ..Default::default() };
    RetryConfig { backoff, max_retries: 5, retry_timeout: Duration::from_secs(15) }
}
