//! TLS and API keys of the running binary: SIGHUP, files that cannot be used, and addresses beyond loopback.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use reqwest::{Certificate, Client};

use hone_engine::EngineBackend;

use crate::daemon::Daemon;
use crate::hone;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tls").join(name)
}

/// The status of a request with an API key on a new connection; `None` unless the daemon shows this
/// certificate.
async fn status(daemon: &Daemon, certificate: &str, key: &str) -> Option<u16> {
    let certificate = fs::read(fixture(&format!("{certificate}.pem"))).unwrap();
    let roots = [Certificate::from_pem(&certificate).unwrap()];
    let client = Client::builder().tls_certs_only(roots).build().unwrap();
    let request = client.get(format!("{}/v1/models", daemon.url)).bearer_auth(key);
    request.send().await.ok().map(|response| response.status().as_u16())
}

/// Waits until a request gets a status.
async fn until(daemon: &Daemon, certificate: &str, key: &str, wanted: u16) {
    let started = Instant::now();
    while status(daemon, certificate, key).await != Some(wanted) {
        assert!(started.elapsed() < Duration::from_secs(60), "{certificate}, {key}: not {wanted}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[cfg(unix)]
#[tokio::test(flavor = "multi_thread")]
async fn a_hangup_signal_reads_the_certificate_and_the_keys_again() {
    let dir = tempfile::tempdir().unwrap();
    let files = ["server.pem", "server.key.pem", "keys.toml"].map(|name| dir.path().join(name));
    let install = |name: &str| {
        let sources = [fixture(&format!("{name}.pem")), fixture(&format!("{name}.key.pem"))];
        for (source, file) in sources.iter().zip(&files) {
            fs::copy(source, file).unwrap();
        }
    };
    let write = |keys: &[&str]| {
        let entry = |key: &&str| {
            format!("[[keys]]\nname = \"{key}\"\nkey = \"{key}\"\nscopes = [\"chat\"]\n")
        };
        fs::write(&files[2], keys.iter().map(entry).collect::<String>()).unwrap();
    };
    install("first");
    write(&["first"]);
    let [certificate, key, keys] = &files;
    let config = format!(
        "[server]\nkeys_file = {keys:?}\n[server.tls]\ncertificate = {certificate:?}\nkey = {key:?}\n\
         [train]\nenabled = false\n[log]\nlevel = \"off\"\n"
    );
    let daemon = Daemon::start(EngineBackend::Native, dir.path(), &config, &[]);
    assert!(daemon.url.starts_with("https://"), "{}", daemon.url);
    let statuses = async |certificate| {
        [status(&daemon, certificate, "first").await, status(&daemon, certificate, "second").await]
    };
    assert_eq!(statuses("first").await, [Some(200), Some(401)]);
    assert_eq!(statuses("second").await, [None; 2]);
    install("second");
    write(&["first", "second"]);
    daemon.hang_up();
    until(&daemon, "second", "second", 200).await;
    // A file with a mistake changes nothing, also not what the other files say.
    fs::write(certificate, "no certificate").unwrap();
    write(&["second"]);
    daemon.hang_up();
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(statuses("second").await, [Some(200), Some(200)]);
    install("first");
    fs::write(keys, "[[keys]]\nname = \"none\"\n").unwrap();
    daemon.hang_up();
    fs::remove_file(keys).unwrap();
    daemon.hang_up();
    assert_eq!(statuses("second").await, [Some(200), Some(200)]);
    assert_eq!(statuses("first").await, [None; 2]);
    // The next correct files are read.
    install("second");
    write(&["second"]);
    daemon.hang_up();
    until(&daemon, "second", "first", 401).await;
    assert_eq!(statuses("second").await, [Some(401), Some(200)]);
    assert_eq!(daemon.terminate(), Some(0));
}

/// The standard errors of `hone serve` and `hone validate` with a configuration that both refuse.
fn refused(dir: &Path, config: &str) -> [String; 2] {
    let (file, data) = (dir.join("hone.toml"), dir.join("data"));
    fs::write(&file, config).unwrap();
    let (config, path) = (file.to_str().unwrap(), data.to_str().unwrap());
    let serve = hone(&["serve", "--config", config, "--data", path]);
    let validate = hone(&["validate", "--config-only", "--config", config]);
    assert!(serve.1.is_empty() && !data.exists(), "{}", serve.1);
    [serve, validate].map(|(code, _, stderr)| {
        assert_eq!(code, Some(2), "{stderr}");
        stderr
    })
}

#[test]
fn files_that_cannot_be_used_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    for (certificate, key, expected) in [
        ("first.pem", "second.key.pem", "server.tls.key is "),
        ("none.pem", "first.key.pem", "server.tls.certificate is "),
        ("first.pem", "", "server.tls.key is \"\": it must be the path of a file beside"),
    ] {
        let path = |name: &str| match name {
            "" => PathBuf::new(),
            name => fixture(name),
        };
        let (certificate, key) = (path(certificate), path(key));
        let config = format!("[server.tls]\ncertificate = {certificate:?}\nkey = {key:?}\n");
        for stderr in refused(dir.path(), &config) {
            assert!(stderr.contains(expected), "{stderr}");
        }
    }
}

#[cfg(unix)]
#[test]
fn a_short_key_and_a_key_file_that_everyone_can_read_are_logged() {
    use std::os::unix::fs::PermissionsExt;

    let dir = tempfile::tempdir().unwrap();
    let key = dir.path().join("server.key.pem");
    fs::copy(fixture("second.key.pem"), &key).unwrap();
    // A certificate of another key ends the start after the warnings.
    let logged = |bearer: &str, mode: u32| {
        fs::set_permissions(&key, fs::Permissions::from_mode(mode)).unwrap();
        let certificate = fixture("first.pem");
        let config = format!(
            "[server]\nclient_keys = [\"{bearer}\"]\n[server.tls]\ncertificate = {certificate:?}\nkey = {key:?}\n"
        );
        let [stderr, _] = refused(dir.path(), &config);
        (
            stderr.contains("short enough to be guessed"),
            stderr.contains("every user of this machine"),
        )
    };
    assert_eq!(logged("sesame", 0o644), (true, true));
    assert_eq!(logged("sixteen-characters", 0o640), (false, false));
}

#[test]
fn an_exposed_address_without_keys_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let [stderr, _] = refused(dir.path(), "[server]\nbind = \"0.0.0.0:0\"\n");
    for part in ["server.bind is 0.0.0.0:0", "server.client_keys", "--insecure"] {
        assert!(stderr.contains(part), "{stderr}");
    }
    let [stderr, _] = refused(dir.path(), "[server]\nkeys_file = \"no-such-file.toml\"\n");
    assert!(stderr.contains("server.keys_file is no-such-file.toml"), "{stderr}");
    let config = dir.path().join("hone.toml");
    fs::write(&config, "[server]\nbind = \"0.0.0.0:0\"\ninsecure = true\n").unwrap();
    let (code, _, stderr) =
        hone(&["validate", "--config-only", "--config", config.to_str().unwrap()]);
    assert_eq!(code, Some(0), "{stderr}");
}
