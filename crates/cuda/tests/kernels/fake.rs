//! Compiles C++ for tests, and starts tests with the libraries of `fake_cuda.cpp`.

use std::collections::hash_map::DefaultHasher;
use std::env;
use std::fs;
use std::hash::{Hash, Hasher};
use std::io::{self, Write};
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Mutex;
use std::thread;

/// Reports that the calling test is skipped, in the form that `.ci/run` counts, or fails with
/// `HONE_CI_STRICT=1`.
pub fn skip(reason: &str) {
    let line = format!("SKIPPED: {}: {reason}\n", thread::current().name().unwrap_or("test"));
    let strict = env::var_os("HONE_CI_STRICT").is_some_and(|value| value == "1");
    assert!(!strict, "HONE_CI_STRICT forbids skipped tests: {line}");
    io::stderr().write_all(line.as_bytes()).unwrap();
}

/// Compiles a C++ text with the system's compiler, unless it was compiled before. The calling test is skipped
/// without a compiler.
pub fn built(name: &str, text: &str, flags: &[&str]) -> Option<PathBuf> {
    static BUILD: Mutex<()> = Mutex::new(());
    if Command::new("c++").arg("--version").output().is_err() {
        skip("no C++ compiler");
        return None;
    }
    let mut hasher = DefaultHasher::new();
    (text, flags).hash(&mut hasher);
    let directory = directory();
    let built = directory.join(format!("{name}-{:016x}", hasher.finish()));
    let _building = BUILD.lock();
    if !built.exists() {
        let (file, new) = (built.with_extension("cpp"), built.with_extension("new"));
        fs::write(&file, text).unwrap();
        let flags = ["-std=c++17", "-Wall", "-Werror"].iter().chain(flags);
        let output = Command::new("c++").args(flags).arg(&file).arg("-o").arg(&new).output();
        let output = output.unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        fs::rename(new, &built).unwrap();
    }
    Some(built)
}

/// Where compiled files are kept. Unit tests have no folder of their own.
fn directory() -> PathBuf {
    let own = option_env!("CARGO_TARGET_TMPDIR").map(PathBuf::from);
    let directory = own.unwrap_or_else(|| env::temp_dir().join("hone-fake-cuda"));
    fs::create_dir_all(&directory).unwrap();
    directory
}

/// A folder with libraries of these names, which are all the fake one.
fn fake(names: &[&str]) -> Option<tempfile::TempDir> {
    let library = built("fake", include_str!("fake_cuda.cpp"), &["-shared", "-fPIC"])?;
    let folder = tempfile::tempdir().unwrap();
    names.iter().for_each(|name| symlink(&library, folder.path().join(name)).unwrap());
    Some(folder)
}

pub const ALL: [&str; 3] = ["libcuda.so", "libnvrtc.so", "libcublasLt.so"];

/// This program, to be started so that it finds the fake libraries first, which are in the folder.
pub fn command(libraries: &[&str]) -> Option<(Command, tempfile::TempDir)> {
    let folder = fake(libraries)?;
    // Tests of other crates use this file, too.
    let header = folder.path().join("emulator.h");
    fs::write(&header, include_str!("emulator.h")).unwrap();
    let mut hasher = DefaultHasher::new();
    (include_str!("emulator.h"), include_str!("fake_cuda.cpp")).hash(&mut hasher);
    let cubins = format!("cubins-{:016x}", hasher.finish());
    let mut command = Command::new(env::current_exe().unwrap());
    command.env("LD_LIBRARY_PATH", folder.path()).env("HONE_FAKE_EMULATOR", header);
    command.env("HONE_CUBINS", directory().join(cubins));
    Some((command, folder))
}

/// Runs an ignored test, by its path, with fake libraries.
pub fn run(test: &str, libraries: &[&str], settings: &[(&str, &str)]) {
    let Some((mut command, _folder)) = command(libraries) else { return };
    let output = command.args(["--exact", test, "--ignored"]).envs(settings.iter().copied());
    let output = output.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}{errors}");
}
