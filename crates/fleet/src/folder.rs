//! Directories in the store under their digest: adapters, states of the trainer, snapshots of a ledger.
//!
//! The files of a directory are `<kind>/<digest>/<file>`; `<kind>/<digest>.json` lists them with their digests. The
//! list is written last, so that a directory is complete if its list exists. The digest is that of the list. Files
//! are sent and received in parts, so that they may be larger than the memory.

use std::fs;
use std::io;
use std::path::{Component, Path};

use hone_core::digest::{Digest, sha256, sha256_file};
use hone_core::files::{FileError, at, remove_any, replace_dir, sibling};
use serde::{Deserialize, Serialize};
use tokio::fs::File;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::spawn_blocking;

use crate::bucket::{Bucket, BucketError, PART, failed};

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct FolderFile {
    path: String,
    size: u64,
    sha256: String,
}

impl FolderFile {
    /// Verifies the file on the way: it may have changed since it was listed.
    async fn upload(&self, bucket: &Bucket, folder: &str, dir: &Path) -> Result<(), BucketError> {
        let (key, path) = (format!("{folder}/{}", self.path), &dir.join(&self.path));
        let mut file = File::open(path).await.map_err(at(path))?;
        let mut writer = bucket.writer(&key);
        let (mut digest, mut block) = (Digest::new(), vec![0; PART / 8]);
        loop {
            let length = file.read(&mut block).await.map_err(at(path))?;
            if length == 0 {
                break;
            }
            digest = digest.bytes(&block[..length]);
            writer.write_all(&block[..length]).await.map_err(failed(&key))?;
        }
        verify(&key, digest, &self.sha256)?;
        writer.shutdown().await.map_err(failed(&key))
    }

    async fn download(&self, bucket: &Bucket, folder: &str, dir: &Path) -> Result<(), BucketError> {
        let (key, path) = (format!("{folder}/{}", self.path), &dir.join(&self.path));
        if !Path::new(&self.path).components().all(|part| matches!(part, Component::Normal(_))) {
            return Err(failed(&key)("the name leads out of the directory"));
        }
        let parent = path.parent().unwrap_or(dir);
        fs::create_dir_all(parent).map_err(at(parent))?;
        let mut file = File::create(path).await.map_err(at(path))?;
        let mut digest = Digest::new();
        for start in (0..self.size).step_by(PART) {
            let end = self.size.min(start.saturating_add(PART as u64));
            let bytes = bucket.part(&key, start..end).await?;
            digest = digest.bytes(&bytes);
            file.write_all(&bytes).await.map_err(at(path))?;
        }
        file.flush().await.map_err(at(path))?;
        verify(&key, digest, &self.sha256)
    }
}

/// Uploads a directory as `<kind>/<digest>` and returns the digest. What is there already is not uploaded again.
pub async fn upload(bucket: &Bucket, kind: &str, dir: &Path) -> Result<String, BucketError> {
    let root = dir.to_owned();
    let listed = spawn_blocking(move || {
        let mut files = Vec::new();
        collect(&root, &root, &mut files)?;
        files.sort();
        Ok::<_, FileError>(files)
    });
    let files = listed.await.map_err(io::Error::from).map_err(at(dir))??;
    let list = serde_json::to_vec(&files).map_err(failed(kind))?;
    let digest = sha256(&list);
    let (folder, key) = (format!("{kind}/{digest}"), format!("{kind}/{digest}.json"));
    if bucket.get(&key, None).await?.is_none_or(|(found, _)| found != list) {
        for file in &files {
            file.upload(bucket, &folder, dir).await?;
        }
        bucket.put(&key, &list).await?;
    }
    Ok(digest)
}

/// Deletes the directory `<kind>/<digest>`, its list first.
pub async fn delete(bucket: &Bucket, kind: &str, digest: &str) -> Result<(), BucketError> {
    bucket.delete(&format!("{kind}/{digest}.json")).await?;
    for key in bucket.list(&format!("{kind}/{digest}"), None).await? {
        bucket.delete(&key).await?;
    }
    Ok(())
}

/// Downloads the directory `<kind>/<digest>` and puts it at `target` as a whole, in place of what is there. One
/// caller at a time for each `target`, which does not change if there is an error.
pub async fn download(
    bucket: &Bucket,
    kind: &str,
    digest: &str,
    target: &Path,
) -> Result<(), BucketError> {
    let (to, new) = (target.to_owned(), sibling(target, ".download"));
    remove_any(&new)?;
    let downloaded = download_files(bucket, &format!("{kind}/{digest}"), digest, &new).await;
    let placed = spawn_blocking(move || {
        let placed = downloaded.and_then(|()| {
            replace_dir(&to, |empty| Ok(fs::rename(&new, empty).map_err(at(&new))?))
        });
        remove_any(&new)?;
        placed
    });
    placed.await.map_err(io::Error::from).map_err(at(target))?
}

async fn download_files(
    bucket: &Bucket,
    folder: &str,
    digest: &str,
    dir: &Path,
) -> Result<(), BucketError> {
    let key = format!("{folder}.json");
    let list = bucket.get(&key, None).await?.ok_or("does not exist").map_err(failed(&key))?.0;
    verify(&key, Digest::new().bytes(&list), digest)?;
    let files: Vec<FolderFile> = serde_json::from_slice(&list).map_err(failed(&key))?;
    fs::create_dir_all(dir).map_err(at(dir))?;
    for file in &files {
        file.download(bucket, folder, dir).await?;
    }
    Ok(())
}

fn verify(key: &str, digest: Digest, expected: &str) -> Result<(), BucketError> {
    let is_right = (digest.hex() == expected).then_some(());
    is_right.ok_or("is corrupted: its SHA-256 is not the listed one").map_err(failed(key))
}

fn collect(root: &Path, dir: &Path, files: &mut Vec<FolderFile>) -> Result<(), FileError> {
    for entry in fs::read_dir(dir).map_err(at(dir))? {
        let path = entry.map_err(at(dir))?.path();
        if path.is_dir() {
            collect(root, &path, files)?;
        } else {
            let name = path.strip_prefix(root).unwrap_or(&path).to_string_lossy().into_owned();
            let size = path.metadata().map_err(at(&path))?.len();
            let sha256 = sha256_file(&path).map_err(at(&path))?;
            files.push(FolderFile { path: name, size, sha256 });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn adapter(dir: &Path) -> PathBuf {
        let adapter = dir.join("adapter");
        fs::create_dir_all(adapter.join("inner")).unwrap();
        fs::write(adapter.join("adapter_config.json"), "{}").unwrap();
        fs::write(adapter.join("empty"), "").unwrap();
        let weights: Vec<u8> = (0..2 * PART + 1000).map(|i| (i / 7) as u8).collect();
        fs::write(adapter.join("inner/weights"), weights).unwrap();
        adapter
    }

    #[tokio::test]
    async fn a_directory_is_uploaded_once_and_downloaded_whole() {
        let (dir, bucket) = (tempfile::tempdir().unwrap(), Bucket::memory());
        let adapter = adapter(dir.path());
        let uploads = [(); 4].map(|()| upload(&bucket, "adapters", &adapter));
        let digests = futures::future::join_all(uploads).await;
        let digest = digests[0].as_ref().unwrap().clone();
        assert!(digests.iter().all(|other| *other.as_ref().unwrap() == digest));
        assert_eq!(bucket.list("adapters", None).await.unwrap().len(), 4);
        let target = dir.path().join("got");
        fs::create_dir(&target).unwrap();
        fs::write(target.join("old"), "").unwrap();
        download(&bucket, "adapters", &digest, &target).await.unwrap();
        assert!(!target.join("old").exists());
        let weights = |dir: &Path| fs::read(dir.join("inner/weights")).unwrap();
        assert!(weights(&target) == weights(&adapter));
        assert_eq!(upload(&bucket, "states", &target).await.unwrap(), digest);
        fs::write(target.join("adapter_config.json"), "[]").unwrap();
        assert_ne!(upload(&bucket, "states", &target).await.unwrap(), digest);
    }

    #[tokio::test]
    async fn a_file_that_changes_during_the_upload_is_an_error() {
        let (dir, bucket) = (tempfile::tempdir().unwrap(), Bucket::memory());
        let (path, sha256) = ("inner/weights".to_owned(), sha256("other"));
        let file = FolderFile { path, size: 0, sha256 };
        let error = file.upload(&bucket, "a", &adapter(dir.path())).await.unwrap_err();
        assert!(error.to_string().starts_with("a/inner/weights: is corrupted"), "{error}");
        assert_eq!(bucket.list("a", None).await.unwrap(), Vec::<String>::new());
    }

    #[tokio::test]
    async fn a_corrupted_or_missing_file_is_named_and_nothing_is_visible() {
        let (dir, bucket) = (tempfile::tempdir().unwrap(), Bucket::memory());
        let digest = upload(&bucket, "adapters", &adapter(dir.path())).await.unwrap();
        let (key, target) = (format!("adapters/{digest}"), dir.path().join("got"));
        let weights = format!("{key}/inner/weights");
        bucket.put(&weights, &vec![8; 2 * PART + 1000]).await.unwrap();
        let error = download(&bucket, "adapters", &digest, &target).await.unwrap_err();
        assert_eq!(error.key, weights);
        assert!(error.to_string().contains("corrupted"), "{error}");
        bucket.delete(&weights).await.unwrap();
        let error = download(&bucket, "adapters", &digest, &target).await.unwrap_err();
        assert_eq!(error.key, weights);
        bucket.put(&format!("{key}.json"), b"[]").await.unwrap();
        let error = download(&bucket, "adapters", &digest, &target).await.unwrap_err();
        assert!(error.to_string().contains("corrupted"), "{error}");
        let error = download(&bucket, "adapters", "no", &target).await.unwrap_err();
        assert_eq!(error.to_string(), "adapters/no.json: does not exist");
        let names = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name());
        assert_eq!(names.collect::<Vec<_>>(), ["adapter"]);
    }

    #[tokio::test]
    async fn a_name_that_leads_out_is_refused() {
        let (dir, bucket) = (tempfile::tempdir().unwrap(), Bucket::memory());
        let list = br#"[{"path":"../outside","size":0,"sha256":""}]"#;
        let digest = sha256(list);
        bucket.put(&format!("adapters/{digest}.json"), list).await.unwrap();
        let error = download(&bucket, "adapters", &digest, &dir.path().join("got")).await;
        assert!(error.unwrap_err().to_string().ends_with("leads out of the directory"));
    }
}
