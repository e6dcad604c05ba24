//! A hub on loopback, with a second server for the files' contents, as the hub's own storage is.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::header::{AUTHORIZATION, CONTENT_LENGTH, CONTENT_RANGE, LOCATION, RANGE};
use axum::http::{HeaderMap, Response, StatusCode, Uri};
use axum::response::IntoResponse;
use futures::{StreamExt, stream};
use serde_json::json;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

/// The commit of every repository.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// What the hub has, and how it behaves.
#[derive(Clone, Default)]
pub struct HubContent {
    /// Files by `KIND/ID/REVISION` (`datasets/o/n/main`) and name.
    pub files: BTreeMap<String, BTreeMap<String, Vec<u8>>>,
    /// The token that every request to the hub must have.
    pub token: Option<&'static str>,
    /// Whether downloads are redirected to the second server.
    pub redirects: bool,
    /// Ends the body of a download after this many bytes of the file.
    pub truncate_at: Option<usize>,
}

/// A request that arrived.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubRequest {
    pub path: String,
    pub token: Option<String>,
    pub range: Option<String>,
    /// Whether the second server got it.
    pub at_storage: bool,
}

/// A running hub; dropping it stops both servers.
pub struct FakeHub {
    pub url: String,
    requests: Arc<Mutex<Vec<HubRequest>>>,
    _runtime: Runtime,
}

impl FakeHub {
    pub fn start(content: HubContent) -> Self {
        let runtime = Runtime::new().unwrap();
        let requests: Arc<Mutex<Vec<HubRequest>>> = Arc::default();
        let listen = || runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let (hub, storage) = (listen(), listen());
        let url = format!("http://{}", hub.local_addr().unwrap());
        let storage_url = format!("http://{}", storage.local_addr().unwrap());
        for (listener, at_storage) in [(hub, false), (storage, true)] {
            let state = Arc::new(HubState {
                content: content.clone(),
                requests: Arc::clone(&requests),
                storage_url: storage_url.clone(),
                at_storage,
            });
            let app = Router::new().fallback(answer).with_state(state);
            runtime.spawn(async move { axum::serve(listener, app).await });
        }
        Self { url, requests, _runtime: runtime }
    }

    /// The requests since the last call.
    pub fn take_requests(&self) -> Vec<HubRequest> {
        std::mem::take(&mut *self.requests.lock().unwrap())
    }
}

struct HubState {
    content: HubContent,
    requests: Arc<Mutex<Vec<HubRequest>>>,
    storage_url: String,
    at_storage: bool,
}

async fn answer(
    State(state): State<Arc<HubState>>,
    uri: Uri,
    headers: HeaderMap,
) -> Response<Body> {
    let header = |name| headers.get(name).map(|v| v.to_str().unwrap().to_owned());
    let (token, range) = (header(AUTHORIZATION), header(RANGE));
    let at_storage = state.at_storage;
    let (path, sent) = (uri.to_string(), token.clone());
    let request = HubRequest { path, token, range: range.clone(), at_storage };
    state.requests.lock().unwrap().push(request);
    let expected = state.content.token.map(|token| format!("Bearer {token}"));
    if !at_storage && expected.is_some() && sent != expected {
        return StatusCode::UNAUTHORIZED.into_response();
    }
    let path = uri.path().trim_start_matches('/').replace("%2F", "/");
    if let Some(path) = path.strip_prefix("api/") {
        let Some(files) = state.content.files.get(&path.replace("/revision/", "/")) else {
            return StatusCode::NOT_FOUND.into_response();
        };
        let sibling =
            |(name, bytes): (&String, &Vec<u8>)| json!({ "rfilename": name, "size": bytes.len() });
        let siblings: Vec<_> = files.iter().map(sibling).collect();
        return axum::Json(json!({ "sha": COMMIT, "siblings": siblings })).into_response();
    }
    // `datasets/ID/resolve/COMMIT/FILE`, and without `datasets` for models.
    let (repo, file) = path.split_once(&format!("/resolve/{COMMIT}/")).unwrap();
    let kind = if repo.starts_with("datasets/") { "" } else { "models/" };
    let prefix = format!("{kind}{repo}/");
    let found = state.content.files.iter().filter(|(key, _)| key.starts_with(&prefix));
    let Some(bytes) = found.filter_map(|(_, files)| files.get(file)).next() else {
        return StatusCode::NOT_FOUND.into_response();
    };
    if state.content.redirects && !at_storage {
        let location = format!("{}/{path}", state.storage_url);
        return (StatusCode::FOUND, [(LOCATION, location)]).into_response();
    }
    let start = range.map_or(0, |range| {
        range.strip_prefix("bytes=").unwrap().strip_suffix('-').unwrap().parse().unwrap()
    });
    let mut response = Response::builder().header(CONTENT_LENGTH, bytes.len() - start);
    if start > 0 {
        let range = format!("bytes {start}-{}/{}", bytes.len() - 1, bytes.len());
        response = response.status(StatusCode::PARTIAL_CONTENT).header(CONTENT_RANGE, range);
    }
    let Some(end) = state.content.truncate_at else {
        return response.body(Body::from(bytes[start..].to_vec())).unwrap();
    };
    let sent = bytes[start.min(end)..end].to_vec();
    // The connection breaks after the server has sent what it has.
    let broken = async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        Err(io::Error::other("the connection breaks"))
    };
    let body = stream::once(async { Ok(sent) }).chain(stream::once(broken));
    response.body(Body::from_stream(body)).unwrap()
}
