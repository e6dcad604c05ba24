//! A world of its own: namespaces, and a root directory with nothing in it but the interpreter.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::{fs, io};

use super::sys;

/// Where the program may write, if anywhere.
pub(super) const SCRATCH: &str = "/scratch";

/// The id that the program sees itself as in a user namespace: nobody.
pub(super) const INNER_ID: u32 = 65_534;

const NAMESPACES: libc::c_int = libc::CLONE_NEWNS
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUTS;

/// `MOUNT_ATTR_RDONLY`, `_NOSUID`, `_NODEV`, `_NOEXEC` of `linux/mount.h`.
const READ_ONLY: u64 = 1;
const NO_SUID: u64 = 2;
const NO_DEVICES: u64 = 4;
const NO_EXEC: u64 = 8;

/// Directories to mount the new root on: in the new mount namespace only, so what they hold here is
/// hidden from nobody else.
const MOUNT_POINTS: [&str; 3] = ["/sys", "/mnt", "/srv"];

/// Which namespaces were entered.
pub(super) struct Entered {
    /// Whether that took a user namespace (the launcher is not root).
    pub user: bool,
}

/// Enters new mount, pid (for children), network, IPC and UTS namespaces: as root directly, else
/// through a user namespace in which this process is [`INNER_ID`].
///
/// # Errors
/// Says which step the kernel refused. Nothing has changed then.
pub(super) fn enter() -> Result<Entered, String> {
    if sys::is_root() {
        sys::unshare(NAMESPACES).map_err(|e| format!("unshare as root: {e}"))?;
        return Ok(Entered { user: false });
    }
    let (user, group) = sys::ids();
    sys::unshare(NAMESPACES | libc::CLONE_NEWUSER)
        .map_err(|e| format!("unshare with a user namespace: {e}"))?;
    let maps = [
        ("setgroups", "deny".to_owned()),
        ("uid_map", format!("{INNER_ID} {user} 1")),
        ("gid_map", format!("{INNER_ID} {group} 1")),
    ];
    for (file, text) in maps {
        fs::write(format!("/proc/self/{file}"), text).map_err(|e| format!("{file}: {e}"))?;
    }
    Ok(Entered { user: true })
}

/// Builds a root of the `readable` paths, read-only, and a scratch directory of `scratch_mb` MiB
/// owned by `owner`, and moves into it. Nothing else exists there: no `/proc`, no home, no devices
/// but `null`, `zero` and `urandom`.
///
/// # Errors
/// Says which mount the kernel refused.
pub(super) fn new_root(readable: &[PathBuf], scratch_mb: u64, owner: u32) -> Result<(), String> {
    let said = |what: &str| {
        let what = what.to_owned();
        move |error: io::Error| format!("{what}: {error}")
    };
    let private = libc::MS_REC | libc::MS_PRIVATE;
    sys::mount(c"none", c"/", None, private, None).map_err(said("making mounts private"))?;
    let base = MOUNT_POINTS.map(Path::new).into_iter().find(|path| path.is_dir());
    let base = base.ok_or_else(|| format!("none of {} exists", MOUNT_POINTS.join(", ")))?;
    let c_base = sys::c_path(base).map_err(said("the new root"))?;
    let plain = libc::MS_NOSUID | libc::MS_NODEV;
    sys::mount(c"tmpfs", &c_base, Some(c"tmpfs"), plain, Some(c"size=1m,mode=755"))
        .map_err(said("the new root"))?;

    let mut links = BTreeSet::new();
    for path in readable {
        bind(base, path, READ_ONLY | NO_SUID | NO_DEVICES)
            .map_err(said(&path.display().to_string()))?;
        links.extend(top_level_link(path));
    }
    for device in ["/dev/null", "/dev/zero", "/dev/urandom"].map(Path::new) {
        if device.exists() {
            bind(base, device, READ_ONLY | NO_SUID | NO_EXEC)
                .map_err(said(&device.display().to_string()))?;
        }
    }
    for (link, target) in links {
        std::os::unix::fs::symlink(target, inside(base, &link)).map_err(said("a link"))?;
    }

    let scratch = inside(base, Path::new(SCRATCH));
    fs::create_dir(&scratch).map_err(said("the scratch directory"))?;
    if scratch_mb > 0 {
        let options = format!("size={scratch_mb}m,nr_inodes=1024,mode=700,uid={owner},gid={owner}");
        let options = std::ffi::CString::new(options).map_err(|e| e.to_string())?;
        let target = sys::c_path(&scratch).map_err(said("the scratch directory"))?;
        sys::mount(c"tmpfs", &target, Some(c"tmpfs"), plain | libc::MS_NOEXEC, Some(&options))
            .map_err(said("the scratch directory"))?;
    }
    std::env::set_current_dir(base).map_err(said("the new root"))?;
    sys::pivot_here().map_err(said("pivot_root"))?;
    let again = libc::MS_REMOUNT | libc::MS_BIND | libc::MS_RDONLY | plain;
    sys::mount(c"none", c"/", None, again, None).map_err(said("making the root read-only"))
}

/// Makes `path` appear below `base` with these attributes added.
fn bind(base: &Path, path: &Path, attributes: u64) -> io::Result<()> {
    let target = inside(base, path);
    if path.is_dir() {
        fs::create_dir_all(&target)?;
    } else {
        target.parent().map_or(Ok(()), fs::create_dir_all)?;
        fs::File::create(&target)?;
    }
    let (source, target) = (sys::c_path(path)?, sys::c_path(&target)?);
    sys::mount(&source, &target, None, libc::MS_BIND | libc::MS_REC, None)?;
    sys::add_mount_attributes(&target, attributes)
}

fn inside(base: &Path, path: &Path) -> PathBuf {
    base.join(path.strip_prefix("/").unwrap_or(path))
}

/// Where `/usr/lib64/…` is readable and `/lib64` is a link to `usr/lib64`, that link: the ELF
/// loader's own path goes through it.
fn top_level_link(path: &Path) -> Vec<(PathBuf, PathBuf)> {
    ["/lib", "/lib64"]
        .map(Path::new)
        .into_iter()
        .filter(|link| fs::canonicalize(link).is_ok_and(|target| target.starts_with(path)))
        .filter_map(|link| Some((link.to_owned(), fs::read_link(link).ok()?)))
        .collect()
}
