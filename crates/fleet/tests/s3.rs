//! The promises of the crate on a real S3 server, with `HONE_FLEET_WEED`, SeaweedFS's binary `weed`.

#![expect(clippy::unwrap_used, reason = "tests may fail loudly")]

use std::env;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use futures::future::join_all;
use hone_core::testing::skip;
use hone_fleet::bucket::Bucket;
use hone_fleet::folder::{download, upload};
use hone_fleet::lease::{FleetLease, LeaseOutcome};
use hone_fleet::manifest::{FleetManifest, ManifestError};
use uuid::Uuid;

const PROGRAM: &str = "HONE_FLEET_WEED";
/// The administrator's keys, which server and client read from the environment.
const KEYS: [(&str, &str); 2] =
    [("AWS_ACCESS_KEY_ID", "fleet"), ("AWS_SECRET_ACCESS_KEY", "secret")];

struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ended = self.0.kill();
        let _status = self.0.wait();
    }
}

/// Ports below those that systems give to connections; each has a second port for gRPC, 10000 above, that is free too.
fn ports() -> impl Iterator<Item = u16> {
    let is_free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    let start = 10_000 + std::process::id() % 10_000;
    let ports = (start..).step_by(7).map(|port| (10_000 + port % 12_000) as u16);
    ports.filter(move |port| is_free(port) && is_free(&(port + 10_000)))
}

fn start(program: &str, dir: &Path) -> (Server, u16) {
    let [master, volume, filer, port]: [u16; 4] =
        ports().take(4).collect::<Vec<_>>().try_into().unwrap();
    let mut command = Command::new(program);
    command.arg("server").arg(format!("-dir={}", dir.display()));
    command.args(["-ip=127.0.0.1", "-s3", "-volume.max=20", "-master.volumeSizeLimitMB=64"]);
    command.arg(format!("-master.port={master}")).arg(format!("-volume.port={volume}"));
    command.arg(format!("-filer.port={filer}")).arg(format!("-s3.port={port}"));
    command.envs(KEYS);
    (Server(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()), port)
}

/// The largest resident memory of this process so far, in kB.
fn peak_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    peak.trim().trim_end_matches(" kB").parse().unwrap()
}

/// The test runs itself once more with the variables from which `object_store` reads the endpoint.
#[test]
fn the_crate_keeps_its_promises_on_a_real_server() {
    let Ok(program) = env::var(PROGRAM) else {
        return skip(&format!("{PROGRAM} is not set"));
    };
    let dir = tempfile::tempdir().unwrap();
    let (_server, port) = start(&program, dir.path());
    let status = Command::new(env::current_exe().unwrap())
        .args(["--exact", "on_the_server", "--ignored", "--nocapture"])
        .env("AWS_ENDPOINT", format!("http://127.0.0.1:{port}"))
        .env("AWS_ALLOW_HTTP", "true")
        .envs(KEYS)
        .env("AWS_REGION", "us-east-1")
        .status();
    assert!(status.unwrap().success());
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "`the_crate_keeps_its_promises_on_a_real_server` runs it in its own process"]
async fn on_the_server() {
    let bucket = Bucket::open(&format!("s3://fleet/some/{}", Uuid::now_v7()), None).unwrap();
    let deadline = Instant::now() + Duration::from_secs(90);
    // SeaweedFS makes a bucket with the first object.
    while let Err(error) = bucket.put("ready", b"1").await {
        assert!(Instant::now() < deadline, "{error}");
    }
    bucket.probe().await.unwrap();

    let mut times = Vec::new();
    let bytes: Vec<u8> = (0..20_000_u32).map(|i| ((i * 7919) >> 3) as u8).collect();
    for i in 0..200 {
        let start = Instant::now();
        let put = bucket.swap(&format!("puts/{i:03}"), None, &bytes).await.unwrap();
        assert!(put.is_some());
        times.push(start.elapsed());
    }
    times.sort();
    eprintln!("create-only puts of 20 kB: p50 {:?}, p99 {:?}", times[100], times[198]);
    let listed = bucket.list("puts", Some("puts/197")).await.unwrap();
    assert_eq!(listed, ["puts/198", "puts/199"]);
    assert_eq!(bucket.list("puts", None).await.unwrap().len(), 200);
    let folders = bucket.list_folders("").await.unwrap();
    assert!(folders.contains(&"puts".to_owned()), "{folders:?}");

    let start = Instant::now();
    let increments = (0..8).map(|_| {
        let bucket = bucket.clone();
        tokio::spawn(async move {
            for _ in 0..20 {
                let change = |manifest: &mut FleetManifest| {
                    manifest.policies.entry("default".to_owned()).or_default().activation += 1;
                    Ok(())
                };
                FleetManifest::update(&bucket, None, change).await.unwrap();
            }
        })
    });
    for done in join_all(increments).await {
        done.unwrap();
    }
    let (manifest, tag) = FleetManifest::load(&bucket).await.unwrap().unwrap();
    assert_eq!(manifest.policies["default"].activation, 160);
    eprintln!("160 increments of 8 writers: {:?}", start.elapsed());
    assert_eq!(bucket.get("manifest.json", Some(&tag)).await.unwrap(), None);

    let duration = Duration::from_secs(3);
    let mut former: Option<FleetLease> = None;
    for _ in 0..3 {
        let deadline = Instant::now() + Duration::from_secs(60);
        let lease = loop {
            let candidates = (0..6).map(|_| {
                let bucket = bucket.clone();
                tokio::spawn(async move {
                    FleetLease::acquire(&bucket, Uuid::now_v7(), "trainer", duration).await.unwrap()
                })
            });
            let outcomes = join_all(candidates).await.into_iter().map(Result::unwrap);
            let acquired = outcomes.filter_map(|outcome| match outcome {
                LeaseOutcome::Acquired(lease) => Some(lease),
                LeaseOutcome::Held(_) => None,
            });
            let mut acquired: Vec<_> = acquired.collect();
            acquired.sort_by_key(FleetLease::epoch);
            if let Some(lease) = acquired.pop() {
                // A candidate that waited long for an answer takes an expired lease over.
                assert!(acquired.iter().all(|former| former.remaining().is_zero()));
                break lease;
            }
            assert!(Instant::now() < deadline);
            tokio::time::sleep(Duration::from_millis(100)).await;
        };
        if let Some(mut former) = former {
            assert!(matches!(former.renew().await, Err(ManifestError::Fenced { .. })));
            let change = former.update(|_| Ok(())).await;
            assert!(matches!(change, Err(ManifestError::Fenced { .. })));
        }
        former = Some(lease);
    }

    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("adapter");
    std::fs::create_dir(&source).unwrap();
    let size = 256 << 20;
    let file = std::fs::File::create(source.join("ledger.redb")).unwrap();
    file.set_len(size).unwrap();
    let before = peak_memory();
    let start = Instant::now();
    let digest = upload(&bucket, "snapshots", &source).await.unwrap();
    let uploaded = start.elapsed();
    let target = dir.path().join("got");
    download(&bucket, "snapshots", &digest, &target).await.unwrap();
    eprintln!("256 MiB: uploaded in {uploaded:?}, downloaded in {:?}", start.elapsed() - uploaded);
    eprintln!("memory: {before} kB before, at most {} kB after", peak_memory());
    assert!(peak_memory() < before + (128 << 10));
    assert_eq!(std::fs::metadata(target.join("ledger.redb")).unwrap().len(), size);
    let used = bucket.used();
    assert!(used.sent > size && used.received > size, "{used:?}");
    let Some(last) = former else { panic!("no lease") };
    last.release().await.unwrap();
}
