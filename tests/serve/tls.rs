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

/// Whether a new connection to the daemon shows this certificate.
async fn shows(daemon: &Daemon, name: &str) -> bool {
    let certificate = fs::read(fixture(&format!("{name}.pem"))).unwrap();
    let roots = [Certificate::from_pem(&certificate).unwrap()];
    let client = Client::builder().tls_certs_only(roots).build().unwrap();
    client.get(format!("{}/livez", daemon.url)).send().await.is_ok()
}

#[cfg(unix)]
#[tokio::test(flavor = "multi_thread")]
async fn a_hangup_signal_reads_the_certificate_again() {
    let dir = tempfile::tempdir().unwrap();
    let files = [dir.path().join("server.pem"), dir.path().join("server.key.pem")];
    let install = |name: &str| {
        let sources = [fixture(&format!("{name}.pem")), fixture(&format!("{name}.key.pem"))];
        for (source, file) in sources.iter().zip(&files) {
            fs::copy(source, file).unwrap();
        }
    };
    install("first");
    let config = format!(
        "[server.tls]\ncertificate = {:?}\nkey = {:?}\n[train]\nenabled = false\n[log]\nlevel = \"off\"\n",
        files[0].display(),
        files[1].display()
    );
    let daemon = Daemon::start(EngineBackend::Native, dir.path(), &config, &[]);
    assert!(daemon.url.starts_with("https://"), "{}", daemon.url);
    assert!(shows(&daemon, "first").await && !shows(&daemon, "second").await);
    install("second");
    daemon.hang_up();
    let started = Instant::now();
    while !shows(&daemon, "second").await {
        assert!(started.elapsed() < Duration::from_secs(60), "the certificate is not replaced");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // A file with a mistake changes nothing.
    fs::write(&files[0], "no certificate").unwrap();
    daemon.hang_up();
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(shows(&daemon, "second").await && !shows(&daemon, "first").await);
    assert_eq!(daemon.terminate(), Some(0));
}

#[test]
fn files_that_cannot_be_used_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("hone.toml");
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
        fs::write(&file, config).unwrap();
        let data = dir.path().join("data");
        let (config, data) = (file.to_str().unwrap(), data.to_str().unwrap());
        let (code, _, stderr) = hone(&["serve", "--config", config, "--data", data]);
        assert_eq!(code, Some(2), "{stderr}");
        assert!(stderr.contains(expected), "{stderr}");
        let (code, _, stderr) = hone(&["validate", "--config-only", "--config", config]);
        assert_eq!(code, Some(2), "{stderr}");
        assert!(stderr.contains(expected), "{stderr}");
    }
}

#[cfg(unix)]
#[test]
fn a_short_key_and_a_key_file_that_everyone_can_read_are_logged() {
    use std::os::unix::fs::PermissionsExt;

    let dir = tempfile::tempdir().unwrap();
    let (file, key) = (dir.path().join("hone.toml"), dir.path().join("server.key.pem"));
    fs::copy(fixture("second.key.pem"), &key).unwrap();
    // A certificate of another key ends the start after the warnings.
    let logged = |bearer: &str, mode: u32| {
        fs::set_permissions(&key, fs::Permissions::from_mode(mode)).unwrap();
        let certificate = fixture("first.pem");
        let config = format!(
            "[server]\nclient_keys = [\"{bearer}\"]\n[server.tls]\ncertificate = {certificate:?}\nkey = {key:?}\n"
        );
        fs::write(&file, config).unwrap();
        let data = dir.path().join("data");
        let (config, data) = (file.to_str().unwrap(), data.to_str().unwrap());
        let (code, _, stderr) = hone(&["serve", "--config", config, "--data", data]);
        assert_eq!(code, Some(2), "{stderr}");
        (
            stderr.contains("short enough to be guessed"),
            stderr.contains("every user of this machine"),
        )
    };
    assert_eq!(logged("sesame", 0o644), (true, true));
    assert_eq!(logged("sixteen-characters", 0o640), (false, false));
}

fn entry(key: &str) -> String {
    format!("[[keys]]\nname = \"{key}\"\nkey = \"{key}\"\nscopes = [\"chat\"]\n")
}

async fn status(daemon: &Daemon, key: &str) -> u16 {
    let request = reqwest::Client::new().get(format!("{}/v1/models", daemon.url));
    request.bearer_auth(key).send().await.unwrap().status().as_u16()
}

/// Waits until a key gets a status.
async fn until(daemon: &Daemon, key: &str, wanted: u16) {
    let started = Instant::now();
    while status(daemon, key).await != wanted {
        assert!(started.elapsed() < Duration::from_secs(60), "{key} does not get {wanted}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[cfg(unix)]
#[tokio::test(flavor = "multi_thread")]
async fn a_hangup_signal_reads_the_keys_again() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("keys.toml");
    fs::write(&file, entry("first")).unwrap();
    let config = format!(
        "[server]\nkeys_file = {:?}\n[train]\nenabled = false\n[log]\nlevel = \"off\"\n",
        file.display()
    );
    let daemon = Daemon::start(EngineBackend::Native, dir.path(), &config, &[]);
    assert_eq!((status(&daemon, "first").await, status(&daemon, "second").await), (200, 401));
    fs::write(&file, [entry("first"), entry("second")].concat()).unwrap();
    daemon.hang_up();
    until(&daemon, "second", 200).await;
    // A file with a mistake changes nothing, and the next correct one is read.
    fs::write(&file, "[[keys]]\nname = \"none\"\n").unwrap();
    daemon.hang_up();
    fs::remove_file(&file).unwrap();
    daemon.hang_up();
    assert_eq!((status(&daemon, "first").await, status(&daemon, "second").await), (200, 200));
    fs::write(&file, entry("second")).unwrap();
    daemon.hang_up();
    until(&daemon, "first", 401).await;
    assert_eq!(status(&daemon, "second").await, 200);
    assert_eq!(daemon.terminate(), Some(0));
}

#[test]
fn an_exposed_address_without_keys_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("hone.toml");
    fs::write(&config, "[server]\nbind = \"0.0.0.0:0\"\n").unwrap();
    let serve = |config: &Path| {
        let data = dir.path().join("data");
        let [config, data] = [config, &data].map(|path| path.to_str().unwrap().to_owned());
        let (code, stdout, stderr) = hone(&["serve", "--config", &config, "--data", &data]);
        assert!(stdout.is_empty() && !Path::new(&data).exists(), "{stdout}");
        let (checked, _, _) = hone(&["validate", "--config-only", "--config", &config]);
        assert_eq!(code, checked);
        (code, stderr)
    };
    let (code, stderr) = serve(&config);
    assert_eq!(code, Some(2), "{stderr}");
    for part in ["server.bind is 0.0.0.0:0", "server.client_keys", "--insecure"] {
        assert!(stderr.contains(part), "{stderr}");
    }
    fs::write(&config, "[server]\nkeys_file = \"no-such-file.toml\"\n").unwrap();
    let (code, stderr) = serve(&config);
    assert_eq!(code, Some(2), "{stderr}");
    assert!(stderr.contains("server.keys_file is no-such-file.toml"), "{stderr}");
    fs::write(&config, "[server]\nbind = \"0.0.0.0:0\"\ninsecure = true\n").unwrap();
    let (code, _, stderr) =
        hone(&["validate", "--config-only", "--config", config.to_str().unwrap()]);
    assert_eq!(code, Some(0), "{stderr}");
}
