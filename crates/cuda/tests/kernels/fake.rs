//! Compiles C++ for tests, and starts tests with the libraries of `fake_cuda.cpp`.

use std::collections::hash_map::DefaultHasher;
use std::env;
use std::fs;
use std::hash::{Hash, Hasher};
use std::io::{self, Write};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
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
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR"));
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

/// A folder with libraries of these names, which are all the fake one.
fn fake(names: &[&str]) -> Option<tempfile::TempDir> {
    let library = built("fake", include_str!("fake_cuda.cpp"), &["-shared", "-fPIC"])?;
    let folder = tempfile::tempdir().unwrap();
    names.iter().for_each(|name| symlink(&library, folder.path().join(name)).unwrap());
    Some(folder)
}

pub const ALL: [&str; 3] = ["libcuda.so", "libnvrtc.so", "libcublasLt.so"];

/// Runs an ignored test, by its path, in a process that finds the fake libraries first.
pub fn run(test: &str, libraries: &[&str], settings: &[(&str, &str)]) {
    let Some(folder) = fake(libraries) else { return };
    // Tests of other crates use this file, too.
    let header = folder.path().join("emulator.h");
    fs::write(&header, include_str!("emulator.h")).unwrap();
    let mut hasher = DefaultHasher::new();
    (include_str!("emulator.h"), include_str!("fake_cuda.cpp")).hash(&mut hasher);
    let cubins = format!("cubins-{:016x}", hasher.finish());
    let output = Command::new(env::current_exe().unwrap())
        .args(["--exact", test, "--ignored"])
        .env("LD_LIBRARY_PATH", folder.path())
        .env("HONE_FAKE_EMULATOR", header)
        .env("HONE_CUBINS", Path::new(env!("CARGO_TARGET_TMPDIR")).join(cubins))
        .envs(settings.iter().copied())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}{errors}");
}
