//! Namespaces, and a root directory that contains only the interpreter's files.

use std::collections::BTreeSet;
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

use rustix::fs::Mode;
use rustix::mount::{
    MountAttrFlags, MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_bind_recursive,
    mount_change, mount_remount, unmount,
};
use rustix::process::{getegid, geteuid, pivot_root, umask};
use rustix::thread::UnshareFlags;

use super::sys::{self, at};

/// The program's working directory, which is empty and cannot be written.
pub(super) const DIRECTORY: &str = "/scratch";

/// The user and group id of programs: the conventional unprivileged id, to which the child switches if the daemon is
/// root, and which it has in a user namespace.
pub(super) const USER: u32 = 65_534;

/// The devices that a program may use.
pub(super) const DEVICES: [&str; 3] = ["/dev/null", "/dev/zero", "/dev/urandom"];

const NAMESPACES: UnshareFlags = UnshareFlags::NEWNS
    .union(UnshareFlags::NEWPID)
    .union(UnshareFlags::NEWNET)
    .union(UnshareFlags::NEWIPC)
    .union(UnshareFlags::NEWUTS);

/// Directories on which the new root can be mounted. The mount hides their content in the new mount
/// namespace only.
const MOUNT_POINTS: [&str; 3] = ["/sys", "/mnt", "/srv"];

/// Enters new mount, pid (for children), network, IPC and UTS namespaces: directly as root, else
/// through a user namespace in which this process is [`USER`]. Returns whether a user namespace
/// was entered.
/// Errors: names the step that the kernel refused.
pub(super) fn enter() -> Result<bool, String> {
    let (user, group) = (geteuid(), getegid());
    if user.is_root() {
        sys::unshare(NAMESPACES).map_err(at("unshare as root"))?;
        return Ok(false);
    }
    sys::unshare(NAMESPACES | UnshareFlags::NEWUSER)
        .map_err(at("unshare with a user namespace"))?;
    let maps = [
        ("setgroups", "deny".to_owned()),
        ("uid_map", format!("{USER} {} 1", user.as_raw())),
        ("gid_map", format!("{USER} {} 1", group.as_raw())),
    ];
    for (file, text) in maps {
        fs::write(format!("/proc/self/{file}"), text).map_err(at(file))?;
    }
    Ok(true)
}

/// Builds a root with the `readable` paths, read-only, [`DEVICES`] and [`DIRECTORY`], and moves into it.
/// Errors: names the mount that the kernel refused.
pub(super) fn new_root(readable: &[PathBuf]) -> Result<(), String> {
    // The program is another user than this process, whose files may be private.
    umask(Mode::WGRP | Mode::WOTH);
    mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)
        .map_err(at("making mounts private"))?;
    let base = MOUNT_POINTS.map(Path::new).into_iter().find(|path| path.is_dir());
    let base = base.ok_or_else(|| format!("no directory among {}", MOUNT_POINTS.join(", ")))?;
    let plain = MountFlags::NOSUID | MountFlags::NODEV;
    mount(c"tmpfs", base, c"tmpfs", plain, c"size=1m,mode=755").map_err(at("the new root"))?;

    let read_only = MountAttrFlags::MOUNT_ATTR_RDONLY | MountAttrFlags::MOUNT_ATTR_NOSUID;
    let mut links = BTreeSet::new();
    for path in readable {
        bind(base, path, read_only | MountAttrFlags::MOUNT_ATTR_NODEV)
            .map_err(at(&path.display().to_string()))?;
        links.extend(top_level_links(path));
    }
    for device in DEVICES {
        if Path::new(device).exists() {
            bind(base, Path::new(device), read_only | MountAttrFlags::MOUNT_ATTR_NOEXEC)
                .map_err(at(device))?;
        }
    }
    for (link, target) in links {
        std::os::unix::fs::symlink(target, inside(base, &link)).map_err(at("a link"))?;
    }

    fs::create_dir(inside(base, Path::new(DIRECTORY))).map_err(at("the working directory"))?;
    env::set_current_dir(base).map_err(at("the new root"))?;
    // Pivoting onto itself stacks the old root on the new one, from where it is detached
    // (pivot_root(2), "pivot_root(".", ".")").
    pivot_root(".", ".")
        .and_then(|()| unmount(".", UnmountFlags::DETACH))
        .map_err(io::Error::from)
        .and_then(|()| env::set_current_dir("/"))
        .map_err(at("pivot_root"))?;
    mount_remount("/", MountFlags::BIND | MountFlags::RDONLY | plain, c"")
        .map_err(at("making the root read-only"))
}

/// Makes `path` visible below `base` and adds `attributes` to the mount.
fn bind(base: &Path, path: &Path, attributes: MountAttrFlags) -> io::Result<()> {
    let target = inside(base, path);
    if path.is_dir() {
        fs::create_dir_all(&target)?;
    } else {
        target.parent().map_or(Ok(()), fs::create_dir_all)?;
        fs::File::create(&target)?;
    }
    mount_bind_recursive(path, &target)?;
    sys::add_mount_attributes(&CString::new(target.as_os_str().as_bytes())?, attributes)
}

fn inside(base: &Path, path: &Path) -> PathBuf {
    base.join(path.strip_prefix("/").unwrap_or(path))
}

/// The links `/lib` and `/lib64` with their targets, if they lead into `path`. The path of the ELF
/// loader goes through them.
fn top_level_links(path: &Path) -> Vec<(PathBuf, PathBuf)> {
    ["/lib", "/lib64"]
        .map(Path::new)
        .into_iter()
        .filter(|link| fs::canonicalize(link).is_ok_and(|target| target.starts_with(path)))
        .filter_map(|link| Some((link.to_owned(), fs::read_link(link).ok()?)))
        .collect()
}
