//! Requests to the hub: the files of a commit, and resumable downloads.

use std::path::{Path, PathBuf};
use std::time::Duration;

use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderValue, RANGE};
use reqwest::{Client, RequestBuilder, Response, StatusCode, Url};
use tokio::fs::{self, File};
use tokio::io::AsyncWriteExt;

use hone_core::config::{Problem, Secret, quoted};
use hone_core::files::{FileError, at, sync_parent};

use crate::cache::{ListedFile, Listing, Repo, RepoCache, RepoKind, is_commit, is_inside};
use crate::error::{HubError, HubErrorKind, root_cause};

/// Attempts after the first.
const RETRIES: u32 = 2;
/// Time before the first retry; doubles for the second.
const BACKOFF: Duration = Duration::from_millis(300);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest time without a byte of an answer.
const READ_TIMEOUT: Duration = Duration::from_secs(60);
/// How often a download that another process does is looked at.
const LOCK_INTERVAL: Duration = Duration::from_millis(200);

/// The hub and the cache of what it served.
pub struct Hub {
    config: HubConfig,
    pub(crate) cache: PathBuf,
}

impl Hub {
    /// The configured hub. `data` is the data directory, which has the cache unless another one is
    /// configured.
    pub fn new(config: &HubConfig, data: &Path) -> Self {
        let cache = Some(&config.cache).filter(|path| !path.as_os_str().is_empty());
        Self { config: config.clone(), cache: cache.cloned().unwrap_or_else(|| data.join("hub")) }
    }

    fn endpoint(&self) -> &str {
        let endpoint = self.config.endpoint.as_str();
        if endpoint.is_empty() { PUBLIC } else { endpoint.trim_end_matches('/') }
    }

    /// The HTTP client, which sends the token to the endpoint. Proxies are those of the environment
    /// (`HTTPS_PROXY`, `NO_PROXY`). A redirect to another host carries no token.
    fn client(&self) -> Result<Client, HubError> {
        let mut headers = HeaderMap::new();
        if let Some(token) = self.config.token() {
            let value = HeaderValue::from_str(&format!("Bearer {}", token.expose()));
            let reason = "the token in HF_TOKEN or in the token file must be printable ASCII";
            let mut value = value.map_err(|_| HubError::other(reason.to_owned()))?;
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        }
        let builder = || {
            Client::builder()
                .user_agent(concat!("hone/", env!("CARGO_PKG_VERSION")))
                .default_headers(headers.clone())
                .referer(false)
                .connect_timeout(CONNECT_TIMEOUT)
                .read_timeout(READ_TIMEOUT)
        };
        let client = builder().build().or_else(|error| {
            // A mirror on plain HTTP needs no system certificates, which a minimal container lacks.
            let plain = self.endpoint().starts_with("http://");
            if plain { builder().tls_certs_only([]).build() } else { Err(error) }
        });
        client.map_err(|error| client_error(&root_cause(&error)))
    }

    /// The commit of a revision and its files, from the hub; recorded in the cache. `configured` is
    /// the revision that the user set, for errors.
    pub(crate) async fn list(
        &self,
        repo: &Repo<'_>,
        revision: &str,
        configured: &str,
    ) -> Result<Listing, HubError> {
        let mut url = self.url(repo, &["api", repo.kind.as_str()], &["revision", revision])?;
        // Adds the sizes.
        url.set_query(Some("blobs=true"));
        let client = self.client()?;
        let body = retried(async || {
            let response = client.get(url.clone()).send().await;
            let response = self.success(repo, "the list of files", response)?;
            response.bytes().await.map_err(|error| self.unreachable(repo, &error))
        });
        let (name, endpoint) = (repo.name(), self.endpoint());
        let body = body.await.map_err(|error| {
            if error.kind != HubErrorKind::Status(404) {
                return error;
            }
            let or = if configured.is_empty() { "" } else { ", or has no revision " };
            let sentence = format!("{name} does not exist on {endpoint}{or}{configured}");
            HubError::new(HubErrorKind::Missing, sentence)
        })?;
        let answer = |reason: String| {
            HubError::other(format!("{name}: {endpoint} does not answer as a hub does: {reason}"))
        };
        let mut listing: Listing =
            serde_json::from_slice(&body).map_err(|error| answer(error.to_string()))?;
        if !is_commit(&listing.commit) {
            return Err(answer(format!("sha is {:?}", listing.commit)));
        }
        listing.files.retain(|file| is_inside(&file.name));
        RepoCache::new(&self.cache, repo).record(revision, &listing)?;
        Ok(listing)
    }

    /// Downloads the files of a commit that the cache lacks.
    pub(crate) async fn fetch(
        &self,
        repo: &Repo<'_>,
        commit: &str,
        files: &[&ListedFile],
    ) -> Result<(), HubError> {
        let dir = RepoCache::new(&self.cache, repo).snapshot(commit);
        let missing: Vec<_> = files.iter().filter(|file| !dir.join(&file.name).exists()).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let client = self.client()?;
        for file in missing {
            let mut segments = vec!["resolve", commit];
            segments.extend(file.name.split('/'));
            let prefix: &[&str] = if repo.kind == RepoKind::Dataset { &["datasets"] } else { &[] };
            let url = self.url(repo, prefix, &segments)?;
            tracing::info!(repo = repo.name(), file = file.name, size = file.size, "fetching");
            let target = dir.join(&file.name);
            retried(async || self.download(repo, file, &target, client.get(url.clone())).await)
                .await?;
        }
        Ok(())
    }

    /// Continues a download in `NAME.part`, which is renamed when it is complete.
    async fn download(
        &self,
        repo: &Repo<'_>,
        file: &ListedFile,
        target: &Path,
        mut request: RequestBuilder,
    ) -> Result<(), HubError> {
        let Some((part, mut output)) = claim(target).await? else { return Ok(()) };
        let mut start = length(&output, &part).await?;
        if file.size.is_none_or(|size| start != size) {
            if start > 0 {
                request = request.header(RANGE, format!("bytes={start}-"));
            }
            let response = self.success(repo, &file.name, request.send().await);
            // With status 416, what is there is no beginning of the file, so the next attempt begins again.
            let is_refused =
                response.as_ref().is_err_and(|error| error.kind == HubErrorKind::Status(416));
            let is_whole =
                response.as_ref().is_ok_and(|r| r.status() != StatusCode::PARTIAL_CONTENT);
            if is_refused || is_whole {
                output.set_len(0).await.map_err(at(&part))?;
                start = 0;
            }
            let ended = copy(&mut response?, &mut output, &part).await?;
            let received = length(&output, &part).await?;
            let reason = match (ended, file.size) {
                (Err(error), _) => Some(root_cause(&error)),
                (Ok(()), Some(size)) if received != size => {
                    if received > size {
                        output.set_len(0).await.map_err(at(&part))?;
                    }
                    Some(format!("it has {size} bytes"))
                }
                (Ok(()), _) => None,
            };
            if let Some(reason) = reason {
                let (repo, file) = (repo.name(), &file.name);
                let sentence = format!(
                    "{repo}: the download of {file} ended after {received} bytes: {reason}"
                );
                return Err(HubError::new(HubErrorKind::Interrupted, sentence));
            }
            tracing::debug!(file = file.name, start, received, "downloaded");
        }
        output.sync_all().await.map_err(at(&part))?;
        fs::rename(&part, target).await.map_err(at(target))?;
        Ok(sync_parent(target)?)
    }

    /// The endpoint followed by segments, each of which is percent-encoded.
    fn url(&self, repo: &Repo<'_>, before: &[&str], after: &[&str]) -> Result<Url, HubError> {
        let mut url = Url::parse(self.endpoint()).ok();
        if let Some(mut path) = url.as_mut().and_then(|url| url.path_segments_mut().ok()) {
            path.pop_if_empty().extend(before).extend(repo.id.split('/')).extend(after);
        }
        // Validation of the configuration refuses a URL that cannot have a path.
        url.ok_or_else(|| client_error(&format!("{} is no URL", self.endpoint())))
    }

    fn unreachable(&self, repo: &Repo<'_>, error: &reqwest::Error) -> HubError {
        let (name, endpoint, reason) = (repo.name(), self.endpoint(), root_cause(error));
        let instead = match repo.kind {
            RepoKind::Model => "model.path to a directory",
            RepoKind::Dataset => "dataset.path to a file",
        };
        let sentence = format!(
            "{name}: the hub at {endpoint} cannot be reached ({reason}); without it, set {instead}"
        );
        HubError::new(HubErrorKind::Interrupted, sentence)
    }

    /// Turns a failed request and a status other than success into errors.
    fn success(
        &self,
        repo: &Repo<'_>,
        file: &str,
        response: reqwest::Result<Response>,
    ) -> Result<Response, HubError> {
        let response = response.map_err(|error| self.unreachable(repo, &error))?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let (repo, endpoint, status) = (repo.name(), self.endpoint(), status.as_u16());
        if !matches!(status, 401 | 403) {
            let sentence =
                format!("{repo}: the hub at {endpoint} answered with status {status} for {file}");
            return Err(HubError::new(HubErrorKind::Status(status), sentence));
        }
        let reason = match self.config.token() {
            Some(_) => "the token gives no access to it, or it does not exist",
            None => "it is private, gated or does not exist; HF_TOKEN is not set",
        };
        Err(HubError::other(format!(
            "{repo}: the hub at {endpoint} refuses access (status {status}): {reason}"
        )))
    }
}

fn client_error(reason: &str) -> HubError {
    HubError::other(format!("the HTTP client cannot be built: {reason}"))
}

/// Repeats a request that may succeed later.
async fn retried<T>(request: impl AsyncFn() -> Result<T, HubError>) -> Result<T, HubError> {
    let mut retries = 0;
    loop {
        match request().await {
            Err(error) if retries < RETRIES && error.is_transient() => {
                tracing::debug!(%error, "retrying");
                tokio::time::sleep(BACKOFF * 2_u32.pow(retries)).await;
                retries += 1;
            }
            result => return result,
        }
    }
}

/// Opens and locks the incomplete file, so that one process at a time writes it. `None` if `target`
/// is complete.
async fn claim(target: &Path) -> Result<Option<(PathBuf, File)>, HubError> {
    let mut part = target.to_owned();
    part.as_mut_os_string().push(".part");
    let parent = target.parent().unwrap_or(target);
    fs::create_dir_all(parent).await.map_err(at(parent))?;
    loop {
        let file = std::fs::OpenOptions::new().append(true).create(true).open(&part);
        let file = file.map_err(at(&part))?;
        let locked = file.try_lock();
        if target.exists() {
            // Another process completed it. A failure leaves an unused file.
            let _unused = fs::remove_file(&part).await;
            return Ok(None);
        }
        match locked {
            Ok(()) => return Ok(Some((part, File::from_std(file)))),
            Err(std::fs::TryLockError::WouldBlock) => tokio::time::sleep(LOCK_INTERVAL).await,
            Err(std::fs::TryLockError::Error(error)) => return Err(at(&part)(error).into()),
        }
    }
}

async fn length(file: &File, path: &Path) -> Result<u64, FileError> {
    Ok(file.metadata().await.map_err(at(path))?.len())
}

/// Appends the body to a file. The inner error is that of the connection.
async fn copy(
    response: &mut Response,
    output: &mut File,
    path: &Path,
) -> Result<reqwest::Result<()>, HubError> {
    let ended = loop {
        match response.chunk().await {
            Ok(Some(chunk)) => output.write_all(&chunk).await.map_err(at(path))?,
            Ok(None) => break Ok(()),
            Err(error) => break Err(error),
        }
    };
    output.flush().await.map_err(at(path))?;
    Ok(ended)
}

/// The hub that `HF_ENDPOINT` replaces.
const PUBLIC: &str = "https://huggingface.co";

/// Where models and datasets named by id come from, and where they are kept: the variables of the hub's own
/// clients, so that those and Hone share one setting.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HubConfig {
    /// `HF_ENDPOINT`, the URL of the hub or of a mirror; empty is the public hub.
    pub endpoint: String,
    /// `HF_TOKEN`.
    pub token: Option<Secret>,
    /// File of the token, which may not exist.
    pub token_file: PathBuf,
    /// `HF_HUB_CACHE` or `HF_HOME/hub`, the directory of downloads; empty is `hub` in the data directory.
    pub cache: PathBuf,
}

impl HubConfig {
    /// Reads the environment with `lookup`. An empty variable counts as unset.
    ///
    /// # Errors
    /// A sentence, if `HF_ENDPOINT` is no URL.
    pub fn from_environment(lookup: impl Fn(&str) -> Option<String>) -> Result<Self, String> {
        let set = |name: &str| lookup(name).filter(|value| !value.is_empty());
        let path = |name: &str| set(name).map(PathBuf::from);
        let home = path("HF_HOME");
        let endpoint = set("HF_ENDPOINT").unwrap_or_default();
        if !endpoint.is_empty() && !is_url(&endpoint) {
            let allowed = "an http:// or https:// URL";
            return Err(Problem::value("HF_ENDPOINT", quoted(&endpoint), allowed).sentence());
        }
        let cached = || {
            let cache = path("XDG_CACHE_HOME").or_else(|| Some(path("HOME")?.join(".cache")))?;
            Some(cache.join("huggingface"))
        };
        Ok(Self {
            endpoint,
            token: set("HF_TOKEN").map(Secret::new),
            token_file: path("HF_TOKEN_PATH")
                .or_else(|| Some(home.clone().or_else(cached)?.join("token")))
                .unwrap_or_default(),
            cache: path("HF_HUB_CACHE")
                .or_else(|| Some(home.as_ref()?.join("hub")))
                .unwrap_or_default(),
        })
    }

    /// The token of the environment or of the token file.
    pub(crate) fn token(&self) -> Option<Secret> {
        self.token.clone().or_else(|| {
            let text = std::fs::read_to_string(&self.token_file).ok()?;
            Some(text.trim()).filter(|text| !text.is_empty()).map(Secret::new)
        })
    }
}

fn is_url(text: &str) -> bool {
    Url::parse(text).is_ok_and(|url| matches!(url.scheme(), "http" | "https") && url.has_host())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(env: &[(&str, &str)]) -> HubConfig {
        let lookup =
            |name: &str| env.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
        HubConfig::from_environment(lookup).unwrap()
    }

    #[test]
    fn variables_and_the_token_file_are_those_of_the_hubs_clients() {
        let hub = |env: &[(&str, &str)]| Hub::new(&read(env), Path::new("data"));
        let plain = hub(&[("HF_ENDPOINT", ""), ("HF_TOKEN", "")]);
        assert_eq!(plain.endpoint(), "https://huggingface.co");
        assert_eq!((plain.cache, plain.config.token()), (PathBuf::from("data/hub"), None));
        let env = [("HF_ENDPOINT", "http://mirror/"), ("HF_HOME", "/h"), ("HF_TOKEN", "t1")];
        let set = hub(&env);
        assert_eq!(set.endpoint(), "http://mirror");
        assert_eq!(set.cache, Path::new("/h/hub"));
        assert_eq!(set.config.token(), Some(Secret::new("t1")));
        assert_eq!(hub(&[("HF_HUB_CACHE", "/c"), ("HF_HOME", "/h")]).cache, Path::new("/c"));
        let file = |env: &[(&str, &str)]| read(env).token_file.display().to_string();
        assert_eq!(file(&[("HOME", "/u")]), "/u/.cache/huggingface/token");
        assert_eq!(file(&[("HOME", "/u"), ("XDG_CACHE_HOME", "/x")]), "/x/huggingface/token");
        assert_eq!(file(&[("HF_TOKEN_PATH", "/t"), ("HF_HOME", "/h")]), "/t");
        assert_eq!(file(&[("HF_HOME", "/h")]), "/h/token");
        assert_eq!(file(&[]), "");
        let lookup = |name: &str| (name == "HF_ENDPOINT").then(|| "x".to_owned());
        let found = HubConfig::from_environment(lookup);
        insta::assert_snapshot!(found.unwrap_err(), @r#"HF_ENDPOINT is "x": it must be an http:// or https:// URL"#);
    }
}
