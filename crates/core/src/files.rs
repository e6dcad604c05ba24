//! Files and directories that are complete or absent after a crash.
//!
//! A write goes to a temporary sibling, is synced, and is renamed over the target; then the parent
//! directory is synced. Without the first sync, a power loss after the rename can leave an empty
//! file under the final name. Without the second, the rename itself can be lost.

use std::ffi::OsString;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::SystemTime;
use std::{fs, io};

/// An I/O error together with the file or directory it concerns.
#[derive(Debug, thiserror::Error)]
#[error("{}: {source}", path.display())]
pub struct FileError {
    /// The file or directory.
    pub path: PathBuf,
    /// The error of the operating system.
    pub source: io::Error,
}

/// Adds `path` to an I/O error, for use with `map_err`.
pub fn at(path: &Path) -> impl FnOnce(io::Error) -> FileError + '_ {
    move |source| FileError { path: path.to_owned(), source }
}

/// Raises the number of files and sockets that this process may have open to the most that the system permits it, and
/// returns the number; `None` if there is no limit.
pub fn raise_open_limit() -> Option<u64> {
    #[cfg(unix)]
    {
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
        let limit = getrlimit(Resource::Nofile);
        let raised = Rlimit { current: limit.maximum, ..limit };
        // Some systems refuse an unlimited number.
        let is_raised = setrlimit(Resource::Nofile, raised).is_ok();
        if is_raised { limit.maximum } else { limit.current }
    }
    #[cfg(not(unix))]
    None
}

/// The files and sockets that this process has open; 0 if the system does not say.
pub fn open_files() -> u64 {
    // Without the one that lists them.
    fs::read_dir("/proc/self/fd").map_or(0, |open| (open.count() as u64).saturating_sub(1))
}

/// The number of files and sockets that this process may have open; `None` if there is no limit.
pub fn open_files_limit() -> Option<u64> {
    #[cfg(unix)]
    {
        use rustix::process::{Resource, getrlimit};
        getrlimit(Resource::Nofile).current
    }
    #[cfg(not(unix))]
    None
}

/// Lets only the owner read what this process creates from now on: prompts, completions and keys are private.
pub fn keep_files_private() {
    #[cfg(unix)]
    rustix::process::umask(rustix::fs::Mode::RWXG | rustix::fs::Mode::RWXO);
}

/// The bytes that this process can still write to the file system of `path`.
///
/// # Errors
/// If the system does not say.
pub fn free_bytes(path: &Path) -> Result<u64, FileError> {
    #[cfg(unix)]
    {
        let stat = rustix::fs::statvfs(path).map_err(|error| at(path)(error.into()))?;
        Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
    }
    #[cfg(not(unix))]
    Err(at(path)(io::ErrorKind::Unsupported.into()))
}

/// Bytes that a file, or the files below a directory, take on the disk, which is less than the length of a file with
/// holes. What does not exist, or is deleted meanwhile, counts nothing.
///
/// # Errors
/// If a directory cannot be read.
pub fn tree_bytes(path: &Path) -> Result<u64, FileError> {
    let Ok(metadata) = fs::symlink_metadata(path) else { return Ok(0) };
    if !metadata.is_dir() {
        #[cfg(unix)]
        return Ok(std::os::unix::fs::MetadataExt::blocks(&metadata) * 512);
        #[cfg(not(unix))]
        return Ok(metadata.len());
    }
    let mut bytes = 0;
    for entry in fs::read_dir(path).map_err(at(path))? {
        bytes += tree_bytes(&entry.map_err(at(path))?.path())?;
    }
    Ok(bytes)
}

/// Replaces the file `path` with `bytes`: after a crash it has either its old or its new content.
///
/// The temporary file is `.NAME.tmp` in the same directory. Concurrent writers of one path are not
/// supported.
///
/// # Errors
/// If the file cannot be written. The file keeps its old content unless only the last step failed,
/// the sync of the parent directory.
pub fn replace_file(path: &Path, bytes: &[u8]) -> Result<(), FileError> {
    let temporary = sibling(path, ".tmp");
    write_synced(&temporary, bytes)?;
    fs::rename(&temporary, path).map_err(at(path))?;
    sync_parent(path)
}

/// Replaces the directory `path` with what `fill` writes into an empty temporary sibling. `fill`
/// does not need to sync its files.
///
/// After a crash `path` is complete: the old directory or the new one. A crash between the two
/// renames that exchange an existing directory leaves the old one as `.NAME.old` and no `path`; the
/// next call moves it back before it calls `fill`.
///
/// # Errors
/// The error of `fill`, or a [`FileError`] of this function. The old directory is then in place,
/// unless only the last steps failed: the sync of the parent directory and the removal of the old
/// directory.
pub fn replace_dir<E: From<FileError>>(
    path: &Path,
    fill: impl FnOnce(&Path) -> Result<(), E>,
) -> Result<(), E> {
    let (temporary, replaced) = (sibling(path, ".tmp"), sibling(path, ".old"));
    let exists = |path: &Path| fs::symlink_metadata(path).is_ok();
    if exists(&replaced) && !exists(path) {
        fs::rename(&replaced, path).map_err(at(path))?;
    }
    remove_any(&temporary)?;
    fs::create_dir_all(&temporary).map_err(at(&temporary))?;
    if let Err(error) = fill(&temporary).and_then(|()| Ok(sync_tree(&temporary)?)) {
        // The first error is the one to report.
        let _second = remove_any(&temporary);
        return Err(error);
    }
    remove_any(&replaced)?;
    let existed = exists(path);
    if existed {
        fs::rename(path, &replaced).map_err(at(path))?;
    }
    if let Err(error) = fs::rename(&temporary, path) {
        if existed {
            let _second = fs::rename(&replaced, path);
        }
        return Err(at(path)(error).into());
    }
    sync_parent(path)?;
    Ok(remove_any(&replaced)?)
}

/// Writes a whole file and syncs it.
///
/// # Errors
/// If the file cannot be written.
pub fn write_synced(path: &Path, bytes: &[u8]) -> Result<(), FileError> {
    let mut file = File::create(path).map_err(at(path))?;
    file.write_all(bytes).map_err(at(path))?;
    file.sync_all().map_err(at(path))
}

/// Syncs a directory's list of entries.
///
/// # Errors
/// If the directory cannot be opened or synced.
pub fn sync_dir(path: &Path) -> Result<(), FileError> {
    // Only Unix can open a directory as a file.
    if cfg!(unix) {
        File::open(path).and_then(|dir| dir.sync_all()).map_err(at(path))?;
    }
    Ok(())
}

/// Syncs the directory that holds `path`, which makes a new name durable.
///
/// # Errors
/// If the directory cannot be opened or synced.
pub fn sync_parent(path: &Path) -> Result<(), FileError> {
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty());
    sync_dir(parent.unwrap_or(Path::new(".")))
}

/// Syncs every file and directory below `dir`, and `dir` itself. Symbolic links are not followed.
///
/// # Errors
/// If a file or directory cannot be read or synced.
pub fn sync_tree(dir: &Path) -> Result<(), FileError> {
    for entry in fs::read_dir(dir).map_err(at(dir))? {
        let entry = entry.map_err(at(dir))?;
        let (path, kind) = (entry.path(), entry.file_type().map_err(at(dir))?);
        if kind.is_dir() {
            sync_tree(&path)?;
        } else if kind.is_file() {
            File::open(&path).and_then(|file| file.sync_all()).map_err(at(&path))?;
        }
    }
    sync_dir(dir)
}

/// Removes a file, a link or a whole directory; succeeds if `path` does not exist.
///
/// # Errors
/// If the entry exists and cannot be removed.
pub fn remove_any(path: &Path) -> Result<(), FileError> {
    let removed = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => Err(error),
        Ok(meta) if meta.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
    };
    removed.map_err(at(path))
}

/// The hidden sibling `.NAME` + `suffix` of `path`.
pub fn sibling(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(suffix);
    path.with_file_name(name)
}

// Whether a file is the one that was read before.

/// The identity and the state of a file as the file system records them, without its content.
///
/// Two stamps of one path are equal only if the file was neither replaced nor written in between. The one
/// exception is a write in place of as many bytes within the resolution of the file system's clock, which
/// is a few milliseconds. [`replace_dir`] creates new files, so it always changes
/// the stamp.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileStamp {
    bytes: u64,
    modified: SystemTime,
    /// Device, inode, and the time of the last change of content or attributes.
    #[cfg(unix)]
    unix: [i128; 4],
}

impl FileStamp {
    /// The stamp of a file. Follows symbolic links.
    ///
    /// # Errors
    /// If the file does not exist or its attributes cannot be read.
    pub fn of(path: &Path) -> io::Result<Self> {
        let file = fs::metadata(path)?;
        Ok(Self {
            bytes: file.len(),
            modified: file.modified()?,
            #[cfg(unix)]
            unix: {
                use std::os::unix::fs::MetadataExt;
                let changed = [file.ctime(), file.ctime_nsec()].map(i128::from);
                [file.dev().into(), file.ino().into(), changed[0], changed[1]]
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(dir: &Path) -> Vec<String> {
        let entries = fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name());
        let mut names: Vec<String> = entries.map(|n| n.into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_system_has_free_bytes() {
        let dir = tempfile::tempdir().unwrap();
        assert!(free_bytes(dir.path()).unwrap() > 0);
        let missing = free_bytes(&dir.path().join("missing")).unwrap_err();
        assert!(missing.to_string().contains("missing"), "{missing}");
    }

    #[test]
    fn a_file_is_replaced_or_the_old_one_stays_and_the_error_names_the_path() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state.json");
        replace_file(&path, b"old").unwrap();
        replace_file(&path, b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(names(dir.path()), ["state.json"]);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state.json");
        replace_file(&path, b"old").unwrap();
        fs::create_dir(sibling(&path, ".tmp")).unwrap();
        let error = replace_file(&path, b"new").unwrap_err().to_string();
        assert!(error.contains(".state.json.tmp"), "{error}");
        assert_eq!(fs::read(&path).unwrap(), b"old");
    }

    #[test]
    fn a_directory_is_replaced_as_a_whole_or_the_old_one_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("best");
        for round in ["one", "two"] {
            replace_dir::<FileError>(&path, |new| {
                fs::create_dir(new.join("inner")).map_err(at(new))?;
                write_synced(&new.join("inner").join(round), round.as_bytes())
            })
            .unwrap();
        }
        assert_eq!(names(&path.join("inner")), ["two"]);
        assert_eq!(names(dir.path()), ["best"]);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("best");
        replace_dir::<FileError>(&path, |new| write_synced(&new.join("a"), b"1")).unwrap();
        let failed = replace_dir::<FileError>(&path, |new| {
            write_synced(&new.join("b"), b"2")?;
            write_synced(&new.join("missing").join("c"), b"3")
        });
        assert!(failed.unwrap_err().path.ends_with("missing/c"));
        assert_eq!(names(&path), ["a"]);
        assert_eq!(names(dir.path()), ["best"]);
    }

    /// What each step of `replace_file` can leave: a temporary file that is empty, cut or complete, then the new name.
    #[test]
    fn a_file_is_old_or_new_after_a_crash_at_any_step() {
        for (temporary, content) in
            [(Some(""), "old"), (Some("ne"), "old"), (Some("new"), "old"), (None, "new")]
        {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("state.json");
            fs::write(&path, content).unwrap();
            if let Some(left) = temporary {
                fs::write(sibling(&path, ".tmp"), left).unwrap();
            }
            assert_eq!(fs::read_to_string(&path).unwrap(), content);
            replace_file(&path, b"newer").unwrap();
            assert_eq!(fs::read(&path).unwrap(), b"newer");
            assert_eq!(names(dir.path()), ["state.json"]);
        }
    }

    /// Every state that a crash inside `replace_dir` can leave, by the entries of the parent.
    #[test]
    fn a_directory_is_complete_after_a_crash_at_any_step() {
        let filled = |new: &Path| write_synced(&new.join("new"), b"new");
        for left in [
            &["best", ".best.tmp"][..],
            &["best", ".best.tmp", ".best.old"],
            &[".best.tmp", ".best.old"],
            &["best", ".best.old"],
        ] {
            for fails in [true, false] {
                let dir = tempfile::tempdir().unwrap();
                for name in left {
                    fs::create_dir(dir.path().join(name)).unwrap();
                    fs::write(dir.path().join(name).join(name), name).unwrap();
                }
                let path = dir.path().join("best");
                let result = replace_dir::<FileError>(&path, |new| {
                    filled(new)?;
                    if fails { Err(at(new)(io::Error::other("planned"))) } else { Ok(()) }
                });
                assert_eq!(result.is_err(), fails, "{left:?}");
                let old = if left.contains(&"best") { "best" } else { ".best.old" };
                assert_eq!(names(&path), [if fails { old } else { "new" }], "{left:?}");
                assert!(!sibling(&path, ".tmp").exists(), "{left:?}");
            }
        }
    }

    #[test]
    fn replaced_and_rewritten_files_have_other_stamps() {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("v000001");
        let file = dir.join("weights");
        let write = |content: &str| {
            replace_dir::<FileError>(&dir, |new| {
                write_synced(&new.join("weights"), content.as_bytes())
            })
            .unwrap();
            FileStamp::of(&file).unwrap()
        };
        let first = write("one");
        assert_eq!(FileStamp::of(&file).unwrap(), first);
        // As many bytes, at once.
        let second = write("two");
        assert_ne!(second, first);
        fs::write(&file, "three").unwrap();
        assert_ne!(FileStamp::of(&file).unwrap(), second);
        fs::remove_file(&file).unwrap();
        assert_eq!(FileStamp::of(&file).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_renamed_directory_keeps_the_stamps_of_its_files() {
        let parent = tempfile::tempdir().unwrap();
        let [from, to] = ["a", "b"].map(|name| parent.path().join(name));
        fs::create_dir(&from).unwrap();
        fs::write(from.join("weights"), "one").unwrap();
        let before = FileStamp::of(&from.join("weights")).unwrap();
        fs::rename(&from, &to).unwrap();
        assert_eq!(FileStamp::of(&to.join("weights")).unwrap(), before);
    }
}
