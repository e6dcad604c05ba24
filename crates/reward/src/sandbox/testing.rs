//! Sandboxes for tests of this crate's dependents.

#![expect(clippy::unwrap_used, reason = "test helpers fail loudly")]

use std::path::Path;
use std::process::Command;
use std::sync::LazyLock;

use hone_core::testing::{has_program, skip};

use super::launch::Sandbox;
use super::{IsolationLayer, Setup};

/// Enters the sandbox's namespaces with util-linux's program; a user who is not root needs a user
/// namespace.
const ENTER_NAMESPACES: &str = "if [ $(id -u) != 0 ]; then user='--user --map-root-user'; fi
    unshare $user --mount --pid --fork --net --ipc --uts true";

/// Exits with 0 if the kernel has Landlock 3: flag 1 of system call 444 asks for the version.
const FIND_LANDLOCK: &str =
    "from ctypes import CDLL; exit(CDLL(None).syscall(444, None, 0, 1) < 3)";

/// The parts of the sandbox that this machine supports, checked without the sandbox's code.
struct MachineSupport {
    python: bool,
    seccomp: bool,
    namespaces: bool,
    landlock: bool,
}

static MACHINE: LazyLock<MachineSupport> = LazyLock::new(|| {
    let succeeds = |program: &str, code: &str| {
        let output = Command::new(program).args(["-c", code]).output();
        output.is_ok_and(|output| output.status.success())
    };
    MachineSupport {
        python: has_program("python3"),
        seccomp: Path::new("/proc/sys/kernel/seccomp").exists(),
        namespaces: succeeds("sh", ENTER_NAMESPACES),
        landlock: succeeds("python3", FIND_LANDLOCK),
    }
});

/// A sandbox that works. Skips the calling test and returns `None` if this machine has no Python,
/// or if its kernel cannot confine programs.
///
/// # Panics
/// If the sandbox does not work where it should.
pub async fn sandbox(setup: &Setup) -> Option<Sandbox> {
    let may_use = |layer| !setup.without.contains(&layer);
    let confined = MACHINE.namespaces && may_use(IsolationLayer::Namespaces)
        || MACHINE.landlock && may_use(IsolationLayer::Landlock);
    let lacking = if !MACHINE.python {
        "python3 is not on the PATH"
    } else if !MACHINE.seccomp {
        "the kernel has no seccomp"
    } else if !confined {
        "the kernel allows neither namespaces nor Landlock 3"
    } else {
        let sandbox = Sandbox::new(setup.clone()).await.unwrap();
        sandbox.probe().await.unwrap();
        return Some(sandbox);
    };
    skip(&format!("{lacking}, without {:?}", setup.without));
    None
}
