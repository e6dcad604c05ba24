//! Hostile programs in the sandbox, with the binary as launcher. Every attack bounds itself, so that a
//! hole in the sandbox does not harm the machine that runs these tests.

#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "tests may fail loudly")]

use std::path::PathBuf;
use std::time::Duration;

use hone_core::testing::{has_program, skip};
use hone_reward::sandbox::{
    IsolationLayer, Limits, RunOutcome, RunRequest, Sandbox, SandboxError, Setup, Status, testing,
};

fn setup(without: &[IsolationLayer]) -> Setup {
    let launcher = PathBuf::from(env!("CARGO_BIN_EXE_hone"));
    Setup { launcher, concurrency: 4, without: without.to_vec(), ..Setup::default() }
}

/// The sandbox with every layer that this machine supports, and without each replaceable layer.
async fn every_sandbox() -> Vec<(&'static str, Sandbox)> {
    let mut found = Vec::new();
    for (name, without) in [
        ("all layers", &[][..]),
        ("no landlock", &[IsolationLayer::Landlock]),
        ("no namespaces", &[IsolationLayer::Namespaces]),
    ] {
        let mut setup = setup(without);
        // Without a mount namespace, the id that root switches to cannot reach an interpreter in
        // root's home.
        if name == "no namespaces" {
            setup.python = PathBuf::from("/usr/bin/python3");
            if !setup.python.exists() {
                skip("no namespaces: /usr/bin/python3 does not exist");
                continue;
            }
        }
        found.extend(testing::sandbox(&setup).await.map(|sandbox| (name, sandbox)));
    }
    found
}

fn small() -> Limits {
    Limits { wall_ms: 1_500, memory_mb: 96, output_bytes: 4_096 }
}

async fn run(sandbox: &Sandbox, code: &str, limits: Limits) -> RunOutcome {
    let request = RunRequest { code: code.into(), stdin: String::new(), limits };
    sandbox.run(request).await.unwrap()
}

/// Runs a program in every sandbox, checks each outcome, and then that the sandbox still works.
async fn everywhere(code: &str, limits: Limits, check: impl Fn(&str, &RunOutcome)) {
    for (name, sandbox) in every_sandbox().await {
        let outcome = run(&sandbox, code, limits).await;
        check(name, &outcome);
        let after = run(&sandbox, "print('well')", small()).await;
        assert_eq!((after.status, after.stdout.as_str()), (Status::Ok, "well\n"), "{name}");
    }
}

/// The ids of processes whose arguments contain `mark`.
fn running(mark: &str) -> Vec<String> {
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    let ids = entries.map(|e| e.file_name().to_string_lossy().into_owned());
    ids.filter(|id| id.bytes().all(|b| b.is_ascii_digit()))
        .filter(|id| {
            let line = std::fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&line).contains(mark)
        })
        .collect()
}

#[tokio::test]
async fn an_ordinary_program_runs() {
    let code = "import sys, json, math, re, collections, typing, dataclasses, itertools\n\
                print(json.dumps({'sum': sum(map(int, sys.stdin.read().split()))}))";
    for (name, sandbox) in every_sandbox().await {
        let request = RunRequest { code: code.into(), stdin: "1 2 39".into(), limits: small() };
        let outcome = sandbox.run(request).await.unwrap();
        assert_eq!(outcome.status, Status::Ok, "{name}: {outcome:?}");
        assert_eq!(outcome.stdout, "{\"sum\": 42}\n", "{name}");
        assert!(outcome.isolation.seccomp, "{name}");
    }
    let Some(sandbox) = testing::sandbox(&setup(&[])).await else { return };
    let failing = run(&sandbox, "raise ValueError('no')", small()).await;
    assert_eq!(failing.status, Status::Error { exit: 1 });
    assert_eq!(failing.stderr_tail(1), "ValueError: no");
}

#[tokio::test]
async fn a_fork_bomb_starts_no_process() {
    let code = "import os\nfor _ in range(64):\n    os.fork()\nprint('bomb')";
    everywhere(code, small(), |name, outcome| {
        assert_eq!(outcome.status, Status::Error { exit: 1 }, "{name}: {outcome:?}");
        assert!(outcome.stderr_tail(1).starts_with("PermissionError"), "{name}: {outcome:?}");
        assert_eq!(outcome.stdout, "", "{name}");
    })
    .await;
}

#[tokio::test]
async fn threads_are_few() {
    let code = "import threading, time\nthreading.stack_size(65536)\nstarted = 0\n\
                try:\n    for _ in range(64):\n\
                \x20       threading.Thread(target=time.sleep, args=(0.2,), daemon=True).start()\n\
                \x20       started += 1\nexcept RuntimeError:\n    pass\nprint(started)";
    everywhere(code, small(), |name, outcome| {
        let started: u32 = outcome.stdout.trim().parse().unwrap_or(u32::MAX);
        assert!(started < 16, "{name}: {outcome:?}");
    })
    .await;
}

#[tokio::test]
async fn an_endless_loop_ends_in_time() {
    let limits = Limits { wall_ms: 300, ..small() };
    everywhere("while True: pass", limits, |name, outcome| {
        assert_eq!(outcome.status, Status::Timeout, "{name}: {outcome:?}");
        assert!(outcome.wall >= Duration::from_millis(300), "{name}");
    })
    .await;
}

#[tokio::test]
async fn ignoring_signals_does_not_prevent_the_timeout() {
    let code = "import signal, time\nfor n in range(1, 65):\n    try:\n        \
                signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError):\n        pass\n\
                print('deaf', flush=True)\nwhile True:\n    time.sleep(60)";
    let limits = Limits { wall_ms: 1_000, ..small() };
    everywhere(code, limits, |name, outcome| {
        assert_eq!(outcome.status, Status::Timeout, "{name}: {outcome:?}");
        assert_eq!(outcome.stdout, "deaf\n", "{name}");
    })
    .await;
}

#[tokio::test]
async fn a_memory_hog_is_refused_memory() {
    let code = "hog = []\nwhile True:\n    hog.append(bytearray(1 << 20))";
    everywhere(code, small(), |name, outcome| {
        assert_eq!(outcome.status, Status::Memory, "{name}: {outcome:?}");
    })
    .await;
    let code = "import mmap\nhog = [mmap.mmap(-1, 1 << 24) for _ in range(64)]";
    everywhere(code, small(), |name, outcome| {
        assert_eq!(outcome.status, Status::Error { exit: 1 }, "{name}: {outcome:?}");
    })
    .await;
}

#[tokio::test]
async fn files_outside_cannot_be_written() {
    let home = tempfile::tempdir().unwrap();
    // The mode allows every user to write.
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    std::fs::set_permissions(home.path(), mode).unwrap();
    let victim = home.path().join("victim");
    std::fs::write(&victim, "precious").unwrap();
    let code = format!(
        "import os\nwrote = []\n\
         for path in [{victim:?}, {:?}, '/tmp/hone-sandbox-was-here', '/hone-was-here', \
         '/usr/lib/hone-was-here', '/scratch/hone-was-here', '/dev/shm/hone-was-here', '/var/tmp/hone-was-here']:\n\
         \x20   for how in (lambda: open(path, 'w').write('x'), lambda: os.truncate(path, 0), \
         lambda: os.unlink(path), lambda: os.mkdir(path + '.d'), lambda: os.chmod(path, 0o777), \
         lambda: os.open(path, os.O_RDONLY | os.O_TRUNC)):\n\
         \x20       try:\n            how()\n            wrote.append(path)\n\
         \x20       except OSError:\n            pass\n\
         print(wrote)",
        home.path().join("new")
    );
    everywhere(&code, small(), |name, outcome| {
        assert_eq!(outcome.stdout, "[]\n", "{name}: {outcome:?}");
        assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious", "{name}");
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 1, "{name}");
    })
    .await;
}

#[tokio::test]
async fn there_is_no_network() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let port = listener.local_addr().unwrap().port();
    let code = format!(
        "import socket\nmade = []\n\
         for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, 16, 17, 40):\n\
         \x20   for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):\n\
         \x20       try:\n            s = socket.socket(family, kind)\n            made.append(family)\n\
         \x20           s.connect(('127.0.0.1', {port}))\n            s.send(b'secret')\n\
         \x20       except OSError:\n            pass\n\
         a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n\
         try:\n    a.sendto(b'x', '\\0abstract')\n    made.append('sendto')\nexcept OSError:\n    pass\n\
         print(made)"
    );
    everywhere(&code, small(), |name, outcome| {
        assert_eq!(outcome.stdout, "[]\n", "{name}: {outcome:?}");
    })
    .await;
    assert!(listener.accept().is_err(), "a connection was made");
}

#[tokio::test]
async fn secrets_and_other_processes_are_invisible() {
    // The test process plays the daemon: it has arguments, an environment and open files.
    let daemon = std::process::id();
    let home = tempfile::tempdir().unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(home.path(), mode).unwrap();
    let secret = home.path().join("secret");
    std::fs::write(&secret, "a secret").unwrap();
    let code = format!(
        "import os, signal\nseen = []\n\
         for path in ['/proc/{daemon}/environ', '/proc/self/environ', '/proc/1/environ', \
         '/proc/self/mounts', '/etc/passwd', '/etc/shadow', {secret:?}, {:?}, '/home', '/proc', '/sys']:\n\
         \x20   try:\n        seen.append(open(path).read()[:9] if not os.path.isdir(path) \
         else os.listdir(path))\n    except OSError:\n        pass\n\
         for pid in ({daemon}, os.getppid(), -1):\n\
         \x20   try:\n        os.kill(pid, 0) if pid > 0 else None\n        seen.append(pid) if pid > 1 \
         else None\n    except OSError:\n        pass\n\
         for fd in range(4, 64):\n\
         \x20   try:\n        os.fstat(fd)\n        seen.append(fd) if fd > 4 else None\n\
         \x20   except OSError:\n        pass\n\
         seen += sorted(k for k in os.environ if k not in ('LANG', 'HOME', 'TMPDIR', 'PATH', \
         'LC_CTYPE'))\n\
         print(seen)",
        home.path()
    );
    everywhere(&code, small(), |name, outcome| {
        assert_eq!(outcome.stdout, "[]\n", "{name}: {outcome:?}");
    })
    .await;
}

#[tokio::test]
async fn dangerous_calls_are_refused() {
    let code = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nallowed = []\n\
                calls = {'ptrace': 101, 'mount': 165, 'unshare': 272, 'bpf': 321, 'keyctl': 250, \
                'io_uring_setup': 425, 'kexec_load': 246, 'memfd_create': 319, 'userfaultfd': 323, \
                'perf_event_open': 298, 'process_vm_readv': 310, 'clone3': 435, 'setns': 308, \
                'open_by_handle_at': 304, 'shmget': 29, 'add_key': 248, 'chroot': 161, \
                'x32 getpid': 0x40000000 + 39, 'seccomp': 317, 'init_module': 175}\n\
                for name, number in calls.items():\n\
                \x20   ctypes.set_errno(0)\n\
                \x20   answer = libc.syscall(number, 0, 0, 0, 0, 0, 0)\n\
                \x20   if answer != -1 or ctypes.get_errno() not in (1, 38):\n        \
                allowed.append((name, answer, ctypes.get_errno()))\n\
                print(allowed)";
    if !cfg!(target_arch = "x86_64") {
        return skip("the numbers of system calls are x86-64's");
    }
    everywhere(code, small(), |name, outcome| {
        if outcome.stderr.contains("No module named '_ctypes'") {
            return skip("this Python has no ctypes");
        }
        assert_eq!(outcome.stdout, "[]\n", "{name}: {outcome:?}");
    })
    .await;
}

#[tokio::test]
async fn too_much_output_ends_the_run() {
    for code in [
        "while True: print('x' * 1000)",
        "import sys\nwhile True: sys.stderr.write('x' * 1000)",
        "import os\nwhile True: os.write(4, b'x' * 1000)",
    ] {
        everywhere(code, Limits { wall_ms: 10_000, ..small() }, |name, outcome| {
            assert_eq!(outcome.status, Status::Output, "{name}: {:?}", outcome.status);
            assert!(outcome.stdout.len() <= 4_096 && outcome.stderr.len() <= 4_096, "{name}");
        })
        .await;
    }
}

#[tokio::test]
async fn a_dropped_run_leaves_no_process() {
    let Some(sandbox) = testing::sandbox(&setup(&[])).await else { return };
    let mark = format!("dropped-{}", std::process::id());
    // `-c` shows in the arguments only the bootstrap, so the program renames itself by exec.
    let code = format!(
        "import os, sys\nos.execv(sys.executable, [sys.executable, '-I', '-S', '-c', \
         'import time; time.sleep(20)', {mark:?}])"
    );
    let request =
        RunRequest { code, limits: Limits { wall_ms: 20_000, ..small() }, ..RunRequest::default() };
    let task = tokio::spawn(async move { sandbox.run(request).await });
    let seen = until(|| !running(&mark).is_empty()).await;
    assert!(seen, "it never started");
    let ids = running(&mark);
    task.abort();
    // Not even as a zombie.
    let gone = || !ids.iter().any(|id| std::path::Path::new("/proc").join(id).exists());
    assert!(until(gone).await, "the process still exists");
}

async fn until(holds: impl Fn() -> bool) -> bool {
    for _ in 0..100 {
        if holds() {
            return true;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    false
}

#[tokio::test]
async fn concurrent_runs_do_not_mix() {
    let Some(sandbox) = testing::sandbox(&setup(&[])).await else { return };
    let runs = (0..50).map(|n| {
        let sandbox = sandbox.clone();
        let code = match n % 5 {
            0 => "while True: pass".to_owned(),
            1 => "bytearray(1 << 30)".to_owned(),
            _ => format!("print({n} * {n})"),
        };
        // Long enough for the harmless programs on a busy machine.
        let wall_ms = if n % 5 == 0 { 200 } else { 20_000 };
        async move { (n, run(&sandbox, &code, Limits { wall_ms, ..small() }).await) }
    });
    for (n, outcome) in futures::future::join_all(runs).await {
        match n % 5 {
            0 => assert_eq!(outcome.status, Status::Timeout, "{n}"),
            1 => assert_eq!(outcome.status, Status::Memory, "{n}: {outcome:?}"),
            _ => assert_eq!(outcome.stdout, format!("{}\n", n * n), "{n}: {outcome:?}"),
        }
    }
    // Other tests of this process have short-lived children too.
    assert!(until(|| zombies() == 0).await, "zombies are left");
}

/// The number of ended children of this process that have not been waited for.
fn zombies() -> usize {
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    let is_zombie = |id: &str| {
        let status = std::fs::read_to_string(format!("/proc/{id}/status")).unwrap_or_default();
        status.contains(&format!("\nPPid:\t{}\n", std::process::id()))
            && status.contains("\nState:\tZ")
    };
    entries.filter(|e| is_zombie(&e.file_name().to_string_lossy())).count()
}

#[tokio::test]
async fn programs_that_cannot_be_confined_are_not_run() {
    if !has_program("python3") {
        return skip("python3 is not on the PATH");
    }
    for (without, what) in [
        (&[IsolationLayer::Seccomp][..], "system calls cannot be filtered"),
        (&[IsolationLayer::Namespaces, IsolationLayer::Landlock], "files cannot be protected"),
    ] {
        let sandbox = Sandbox::new(setup(without)).await.unwrap();
        let error = sandbox.probe().await.unwrap_err();
        assert!(matches!(error, SandboxError::Unavailable(_)), "{error}");
        assert!(error.to_string().contains(what), "{error}");
    }
}

#[tokio::test]
async fn errors_name_an_unusable_interpreter() {
    for python in ["/nowhere/python3", "/bin/true"] {
        let setup = Setup { python: python.into(), ..setup(&[]) };
        let error = Sandbox::new(setup).await.unwrap_err().to_string();
        assert!(
            error.starts_with(&format!("sandbox: python = `{python}` cannot be used")),
            "{error}"
        );
    }
}
