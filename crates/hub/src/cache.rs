//! The cache, in the layout of the hub's own clients.

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use hone_core::files::{FileError, at, replace_file};

/// File in a snapshot that lists the files of its commit.
const LISTING: &str = "hone-files.json";

/// The kind of a repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RepoKind {
    Model,
    Dataset,
}

impl RepoKind {
    /// The name in addresses and in the cache.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Model => "models",
            Self::Dataset => "datasets",
        }
    }
}

/// A repository on the hub.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Repo<'a> {
    pub kind: RepoKind,
    /// `OWNER/NAME`, or `NAME`.
    pub id: &'a str,
}

impl Repo<'_> {
    /// The repository as the user writes it.
    pub(crate) fn name(&self) -> String {
        match self.kind {
            RepoKind::Model => self.id.to_owned(),
            RepoKind::Dataset => format!("hf://{}", self.id),
        }
    }
}

/// A commit and its files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Listing {
    #[serde(rename = "sha")]
    pub commit: String,
    #[serde(rename = "siblings")]
    pub files: Vec<ListedFile>,
}

/// A file of a commit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ListedFile {
    #[serde(rename = "rfilename")]
    pub name: String,
    /// In bytes; mirrors may leave it out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
}

/// The folder of one repository in the cache.
pub(crate) struct RepoCache(PathBuf);

impl RepoCache {
    pub(crate) fn new(cache: &Path, repo: &Repo<'_>) -> Self {
        let kind = repo.kind.as_str();
        Self(cache.join(format!("{kind}--{}", repo.id.replace('/', "--"))))
    }

    pub(crate) fn snapshot(&self, commit: &str) -> PathBuf {
        self.0.join("snapshots").join(commit)
    }

    /// The commit of a branch at the time of its download. A commit is its own revision.
    pub(crate) fn commit(&self, revision: &str) -> Option<String> {
        let found = fs::read_to_string(self.0.join("refs").join(revision)).ok();
        let commit = found.as_deref().unwrap_or(revision).trim();
        is_commit(commit).then(|| commit.to_owned())
    }

    /// The files of the commit that the cache has for a revision.
    pub(crate) fn listing(&self, revision: &str) -> Option<Listing> {
        let path = self.snapshot(&self.commit(revision)?).join(LISTING);
        serde_json::from_slice(&fs::read(path).ok()?).ok()
    }

    /// Records the files of a commit, and that `revision` is this commit.
    pub(crate) fn record(&self, revision: &str, listing: &Listing) -> Result<(), FileError> {
        let path = self.snapshot(&listing.commit).join(LISTING);
        let reference = self.0.join("refs").join(revision);
        for path in [&path, &reference] {
            let parent = path.parent().unwrap_or(&self.0);
            fs::create_dir_all(parent).map_err(at(parent))?;
        }
        let text = serde_json::to_vec(listing).map_err(|error| at(&path)(error.into()))?;
        replace_file(&path, &text)?;
        replace_file(&reference, listing.commit.as_bytes())
    }
}

/// Whether `text` is a hash of Git, and so one safe folder name.
pub(crate) fn is_commit(text: &str) -> bool {
    (7..=64).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_hexdigit())
}

/// Whether a file name of the hub, or a revision, stays in the folder that it is joined to.
pub(crate) fn is_inside(name: &str) -> bool {
    let plain = |part: &str| {
        !part.is_empty() && part != "." && part != ".." && !part.contains(['\\', '\0'])
    };
    name.split('/').all(plain)
}

/// Whether `text` is `OWNER/NAME` or, with `allow_name`, `NAME`, in the hub's alphabet.
pub(crate) fn is_id(text: &str, allow_name: bool) -> bool {
    let part = |text: &str| {
        !text.is_empty()
            && !text.starts_with('.')
            && text.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
    };
    match text.split_once('/') {
        Some((owner, name)) => part(owner) && part(name),
        None => allow_name && part(text),
    }
}
