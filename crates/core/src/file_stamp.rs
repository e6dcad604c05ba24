//! Whether a file is the one that was read before.

use std::path::Path;
use std::time::SystemTime;
use std::{fs, io};

/// The identity and the state of a file as the file system records them, without its content.
///
/// Two stamps of one path are equal only if the file was neither replaced nor written in between. The one
/// exception is a write in place of as many bytes within the resolution of the file system's clock, which
/// is a few milliseconds. [`replace_dir`](crate::files::replace_dir) creates new files, so it always changes
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
    use crate::files::{FileError, replace_dir, write_synced};

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
