//! API keys of the running binary: SIGHUP, and addresses beyond loopback.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use hone_engine::EngineBackend;

use crate::daemon::Daemon;
use crate::hone;

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
