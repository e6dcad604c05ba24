use std::fmt;

use async_trait::async_trait;
use futures::stream::BoxStream;
use object_store::{
    CopyOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, PutMultipartOptions,
    PutOptions, PutPayload, PutResult, Result,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::*;

impl Bucket {
    pub(crate) fn shift_clock(&self, millis: i64) {
        self.wire.shift(millis);
    }
}

/// A store in memory with a defect.
#[derive(Clone, Copy, Debug)]
enum Fault {
    IgnoresCreate,
    IgnoresReplace,
    ForgetsWrites,
}

#[derive(Debug)]
struct Faulty {
    inner: InMemory,
    fault: Fault,
}

impl fmt::Display for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.fault)
    }
}

#[async_trait]
impl ObjectStore for Faulty {
    async fn put_opts(
        &self,
        key: &Location,
        bytes: PutPayload,
        how: PutOptions,
    ) -> Result<PutResult> {
        let mode = match (self.fault, how.mode) {
            (Fault::IgnoresCreate, PutMode::Create)
            | (Fault::IgnoresReplace, PutMode::Update(_)) => PutMode::Overwrite,
            (Fault::ForgetsWrites, PutMode::Update(tag)) => {
                let kept = self.inner.get(key).await?.bytes().await?;
                self.inner.put_opts(key, kept.into(), PutMode::Update(tag).into()).await?;
                return self.inner.put(&Location::from("elsewhere"), bytes).await;
            }
            (_, mode) => mode,
        };
        self.inner.put_opts(key, bytes, mode.into()).await
    }

    async fn put_multipart_opts(
        &self,
        key: &Location,
        how: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(key, how).await
    }

    async fn get_opts(&self, key: &Location, how: GetOptions) -> Result<GetResult> {
        self.inner.get_opts(key, how).await
    }

    fn delete_stream(
        &self,
        keys: BoxStream<'static, Result<Location>>,
    ) -> BoxStream<'static, Result<Location>> {
        self.inner.delete_stream(keys)
    }

    fn list(&self, prefix: Option<&Location>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Location>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Location, to: &Location, how: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, how).await
    }
}

#[tokio::test]
async fn the_probe_names_each_defect() {
    Bucket::memory().probe().await.unwrap();
    let defect = async |fault| {
        let faulty = Faulty { inner: InMemory::new(), fault };
        let bucket = Bucket { store: Arc::new(faulty), ..Bucket::memory() };
        bucket.probe().await.unwrap_err().to_string()
    };
    assert!(defect(Fault::IgnoresCreate).await.contains("ignores If-None-Match"));
    assert!(defect(Fault::IgnoresReplace).await.contains("ignores If-Match"));
    assert!(defect(Fault::ForgetsWrites).await.contains("returns old content"));
    for shift in [-3_600_000, 3_600_000] {
        let skewed = Bucket::memory();
        skewed.shift_clock(shift);
        let error = skewed.probe().await.unwrap_err().to_string();
        assert!(error.contains("differ by 36000") || error.contains("3599"), "{error}");
        assert_eq!(skewed.list("probe", None).await.unwrap(), Vec::<String>::new());
    }
    let silent = Bucket { wire: Arc::new(Wire::new()), ..Bucket::memory() };
    assert!(silent.probe().await.unwrap_err().to_string().contains("no Date"));
}

#[tokio::test]
async fn conditional_requests_have_distinct_outcomes() {
    let store = Arc::new(PrefixStore::new(InMemory::new(), "some/prefix"));
    let bucket = Bucket { store, ..Bucket::memory() };
    assert_eq!(bucket.get("a/b", None).await.unwrap(), None);
    let first = bucket.swap("a/b", None, b"1").await.unwrap().unwrap();
    assert_eq!(bucket.swap("a/b", None, b"2").await.unwrap(), None);
    assert_eq!(bucket.get("a/b", Some(&first)).await.unwrap(), None);
    assert!(bucket.swap("a/b", Some(first.clone()), b"three").await.unwrap().is_some());
    assert_eq!(bucket.swap("a/b", Some(first.clone()), b"4").await.unwrap(), None);
    let changed = bucket.get("a/b", Some(&first)).await.unwrap();
    assert_eq!(changed.unwrap().0, b"three");
    bucket.put("a/c/d", b"5").await.unwrap();
    bucket.put("a/e/f", b"6").await.unwrap();
    assert_eq!(bucket.list("a", None).await.unwrap(), ["a/b", "a/c/d", "a/e/f"]);
    assert_eq!(bucket.list("a", Some("a/c/d")).await.unwrap(), ["a/e/f"]);
    assert_eq!(bucket.list_folders("a").await.unwrap(), ["a/c", "a/e"]);
    bucket.delete("a/b").await.unwrap();
    bucket.delete("a/b").await.unwrap();
    assert_eq!(bucket.get("a/b", Some(&first)).await.unwrap(), None);
}

/// A server that gives each connection the next answer and then closes it.
async fn answer(listener: TcpListener, answers: &[(&str, &str)]) {
    for (status, headers) in answers {
        let (mut connection, _) = listener.accept().await.unwrap();
        let mut request = Vec::new();
        // A body of these requests ends with a dot.
        let is_whole = |request: &[u8]| {
            request.ends_with(b".") || request.starts_with(b"G") && request.ends_with(b"\r\n\r\n")
        };
        while !is_whole(&request) {
            assert_ne!(connection.read_buf(&mut request).await.unwrap(), 0);
        }
        let answer =
            format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n{headers}\r\n");
        connection.write_all(answer.as_bytes()).await.unwrap();
    }
}

#[tokio::test]
async fn failures_are_repeated_and_counted_and_answers_set_the_clock() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let wire = Arc::new(Wire::new());
    let store = AmazonS3Builder::new()
        .with_endpoint(format!("http://{}", listener.local_addr().unwrap()))
        .with_allow_http(true)
        .with_bucket_name("fleet")
        .with_access_key_id("fleet")
        .with_secret_access_key("secret")
        .with_retry(retries())
        .with_http_connector(WireConnector { wire: Arc::clone(&wire), certificates: Vec::new() });
    let bucket = Bucket { store: Arc::new(store.build().unwrap()), wire };
    let date = "date: Sat, 29 Nov 2025 00:00:00 GMT\r\n";
    let answers = [
        ("503 Busy", ""),
        ("200 OK", "etag: \"a\"\r\n"),
        // The first attempt took effect, but its answer was lost.
        ("500 Error", ""),
        ("412 Precondition Failed", date),
        ("304 Not Modified", ""),
        ("404 Not Found", ""),
    ];
    let requests = async {
        let tag = bucket.swap("key", None, b"content.").await.unwrap().unwrap();
        assert!(bucket.now().is_err());
        assert_eq!(bucket.swap("key", Some(tag.clone()), b"content.").await.unwrap(), None);
        let now = bucket.now().unwrap();
        assert!((1_764_374_400_000..1_764_374_460_000).contains(&now), "{now}");
        assert_eq!(bucket.get("key", Some(&tag)).await.unwrap(), None);
        assert_eq!(bucket.get("key", None).await.unwrap(), None);
    };
    tokio::join!(answer(listener, &answers), requests);
    let used = BucketUse { requests: 6, writes: 4, failures: 2, sent: 32, received: 0 };
    assert_eq!(bucket.used(), used);
}

#[test]
fn wrong_urls_and_files_are_errors() {
    let open =
        |url: &str, ca_file: Option<&Path>| Bucket::open(url, ca_file).unwrap_err().to_string();
    for url in ["", "bucket", "file:///tmp", "https://example.org/bucket"] {
        assert!(open(url, None).contains("the URL of a fleet's store"), "{url}");
    }
    assert!(open("s3://", None).starts_with("s3://: "));
    let missing = open("s3://bucket/prefix", Some(Path::new("no-such-file.pem")));
    assert!(missing.starts_with("no-such-file.pem: "), "{missing}");
}
