//! Failing disks and power losses: acknowledged writes must survive both.

use std::collections::BTreeSet;
use std::io;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use redb::{Builder, ReadableDatabase, StorageBackend};

use super::*;
use crate::file::Opener;
use crate::{FeedbackOutcome, StoreTrouble, migrate};

/// Reproducible random numbers (splitmix64).
#[derive(Clone, Debug)]
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

/// Unit of data that a power loss during a write keeps or loses as a whole.
const SECTOR: usize = 512;

#[derive(Debug)]
struct DiskState {
    /// The bytes that reads return.
    current: Vec<u8>,
    /// The bytes that survive a power loss.
    durable: Vec<u8>,
    /// Writes since the last successful sync.
    pending: Vec<(usize, Vec<u8>)>,
    random: Random,
    /// Number of writes, syncs and resizes so far.
    calls: u64,
    /// The calls that fail.
    outage: std::ops::Range<u64>,
    /// Whether calls do not return.
    hangs: bool,
    /// Possible file contents after a power loss, not checked yet.
    images: Vec<Vec<u8>>,
    /// Average number of calls between two images.
    image_every: u64,
}

impl DiskState {
    /// Counts a call and fails it during the outage. Sometimes adds an image.
    fn call(&mut self) -> io::Result<()> {
        self.calls += 1;
        if self.random.below(self.image_every) == 0 {
            let image = self.survivors();
            self.images.push(image);
        }
        if self.outage.contains(&self.calls) {
            return Err(io::Error::other("planned"));
        }
        Ok(())
    }

    /// The durable bytes with a random half of the pending sectors.
    fn survivors(&mut self) -> Vec<u8> {
        let mut image = self.durable.clone();
        for (offset, data) in &self.pending {
            for (i, sector) in data.chunks(SECTOR).enumerate() {
                if self.random.below(2) == 0 {
                    let at = offset + i * SECTOR;
                    image.resize(image.len().max(at + sector.len()), 0);
                    image[at..at + sector.len()].copy_from_slice(sector);
                }
            }
        }
        image
    }
}

/// A disk in memory that fails during `DiskState::outage`.
#[derive(Clone, Debug)]
pub(super) struct Disk(Arc<Mutex<DiskState>>);

impl Disk {
    pub(super) fn new(image: Vec<u8>, seed: u64) -> Self {
        Self(Arc::new(Mutex::new(DiskState {
            current: image.clone(),
            durable: image,
            pending: Vec::new(),
            random: Random(seed),
            calls: 0,
            outage: 0..0,
            hangs: false,
            images: Vec::new(),
            image_every: u64::MAX,
        })))
    }

    fn state(&self) -> std::sync::MutexGuard<'_, DiskState> {
        self.0.lock().unwrap()
    }

    /// The state once the disk does not hang.
    fn answer(&self) -> std::sync::MutexGuard<'_, DiskState> {
        loop {
            let state = self.state();
            if !state.hangs {
                return state;
            }
            drop(state);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn opener(&self) -> Opener {
        let disk = self.clone();
        Box::new(move || {
            Builder::new()
                .set_cache_size(1 << 20)
                .create_with_backend(disk.clone())
                .map_err(StoreError::from)
        })
    }

    pub(super) fn store(&self) -> Result<Store, StoreError> {
        let config = StoreConfig { group_commit_ms: 0, ..StoreConfig::default() };
        Store::start(Path::new("ledger.redb"), self.opener(), &config, metrics(), |_| {})
    }
}

impl StorageBackend for Disk {
    fn len(&self) -> io::Result<u64> {
        Ok(self.state().current.len() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let state = self.state();
        let at = offset as usize;
        let bytes = state.current.get(at..at + out.len());
        out.copy_from_slice(bytes.ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))?);
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let mut state = self.answer();
        state.call()?;
        state.current.resize(len as usize, 0);
        state.durable.resize(len as usize, 0);
        state.pending.retain(|(offset, data)| offset + data.len() <= len as usize);
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        let mut state = self.answer();
        let result = state.call();
        // As on Linux, a failed sync discards unwritten data, and the next sync succeeds.
        state.durable = if result.is_ok() { state.current.clone() } else { state.survivors() };
        state.pending.clear();
        result
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut state = self.answer();
        let result = state.call();
        let at = offset as usize;
        // A failed write may write a part of the data.
        let kept = match result {
            Ok(()) => data.len(),
            Err(_) => state.random.below(data.len() as u64 + 1) as usize,
        };
        if at + data.len() > state.current.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        state.current[at..at + kept].copy_from_slice(&data[..kept]);
        state.pending.push((at, data[..kept].to_vec()));
        result
    }
}

fn keyed(n: u64) -> FeedbackEntry {
    FeedbackEntry {
        idempotency_key: n.is_multiple_of(2).then(|| format!("key {n}")),
        ..thumbs(n, n as f64, n)
    }
}

/// Asserts that the file contains every acknowledged write and is consistent.
fn assert_holds(image: Vec<u8>, acknowledged: &BTreeSet<u64>, context: &str) {
    let disk = Disk::new(image, 0);
    let store = disk.store().unwrap_or_else(|error| panic!("{context}: {error}"));
    for n in acknowledged {
        let rewards = store.rewards_of(sample_id(10 * n)).unwrap();
        let thumbs = rewards.iter().find(|r| r.name == "thumbs");
        assert_eq!(thumbs.and_then(|r| r.value), Some(*n as f64), "{context}: {n}");
    }
    let problems = problems(&store);
    assert_eq!(problems.count, 0, "{context}: {:?}", problems.first);
}

/// Writes to a ledger while the disk fails for `length` calls. Returns the number of failed
/// commits.
fn run(seed: u64, length: u64) -> usize {
    let mut random = Random(seed);
    let disk = Disk::new(Vec::new(), seed);
    let store = disk.store().unwrap();
    let start = disk.state().calls + 1 + random.below(600);
    disk.state().outage = start..start + length;
    disk.state().image_every = 60;
    let mut acknowledged = BTreeSet::new();
    let mut failed = 0;
    let mut n = 0;
    // Continue until 50 calls after the outage.
    while n < 40 || disk.state().calls < start + length + 50 {
        n += 1;
        let before = acknowledged.clone();
        store.enqueue(prompt_ops(n, 1)).unwrap();
        match store.commit_blocking(vec![feedback(keyed(n))]) {
            Ok(done) => {
                let expected = vec![FeedbackOutcome::Recorded(sample_id(10 * n))];
                assert_eq!(done.feedback, expected, "seed {seed}");
                acknowledged.insert(n);
            }
            Err(_) => failed += 1,
        }
        for image in std::mem::take(&mut disk.state().images) {
            assert_holds(image, &before, &format!("seed {seed}, power lost during {n}"));
        }
    }
    // The ledger recovers with the disk, and no served sample is missing.
    let last = n + 1;
    store.enqueue(prompt_ops(last, 0)).unwrap();
    store.commit_blocking(vec![feedback(keyed(last))]).unwrap();
    acknowledged.insert(last);
    assert_eq!(store.trouble(), None, "seed {seed}");
    let stats = store.stats().unwrap();
    assert_eq!(stats.interactions, last, "seed {seed}");
    // A failed commit may be in the file, but not twice.
    let feedback = stats.feedback as usize;
    assert!((acknowledged.len()..=acknowledged.len() + failed).contains(&feedback), "seed {seed}");
    let problems = problems(&store);
    assert_eq!(problems.count, 0, "seed {seed}: {:?}", problems.first);
    drop(store);
    let image = disk.state().durable.clone();
    assert_holds(image, &acknowledged, &format!("seed {seed}, at the end"));
    failed
}

#[test]
fn a_single_failed_disk_call_fails_no_commit() {
    for seed in 0..40 {
        assert_eq!(run(seed, 1), 0, "seed {seed}: the retry should have succeeded");
    }
}

#[test]
fn an_outage_loses_no_acknowledged_write() {
    let mut failed = 0;
    for seed in 100..140 {
        failed += run(seed, 2 + seed % 30);
    }
    assert!(failed > 0, "no commit failed during an outage");
}

#[test]
fn a_migration_that_the_disk_interrupted_can_be_repeated() {
    for seed in 0..60 {
        let disk = Disk::new(Vec::new(), seed);
        drop(disk.opener()().unwrap());
        let start = disk.state().calls + 1 + seed;
        disk.state().outage = start..start + 1 + seed % 3;
        let opened = (0..10).find_map(|_| disk.store().ok());
        let store = opened.unwrap_or_else(|| panic!("seed {seed}: never opened"));
        disk.state().outage = 0..0;
        store.commit_blocking(prompt_ops(1, 0)).unwrap();
        drop(store);
        let database = disk.opener()().unwrap();
        assert_eq!(
            migrate::version(&database.begin_read().unwrap()).unwrap(),
            super::super::format::VERSION
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hanging_disk_refuses_clients_sheds_recordings_and_bounds_the_memory() {
    let (disk, metrics, limit) = (Disk::new(Vec::new(), 1), metrics(), 256 << 10);
    let config = StoreConfig { group_commit_ms: 0, queue_bytes: limit, ..StoreConfig::default() };
    let path = Path::new("ledger.redb");
    let store = Store::start(path, disk.opener(), &config, metrics.clone(), |_| {}).unwrap();
    store.commit(prompt_ops(1, 0)).await.unwrap();

    disk.state().hangs = true;
    let patience = Duration::from_millis(200);
    let rate = |n| vec![feedback(thumbs(1, 1.0, n))];
    assert_eq!(store.in_time(patience, rate(1)).await, Err(StoreError::TimedOut));
    let hung = Err(StoreError::Unavailable(StoreTrouble::Hung));
    let asked = Instant::now();
    assert_eq!(store.in_time(patience / 2, rate(2)).await, hung);
    assert!(asked.elapsed() < patience / 2, "it was tried");
    let held = || usize::try_from(metrics.store_queue_bytes.get()).unwrap();
    let recorded = (2..5_000).take_while(|n| store.enqueue(prompt_ops(*n, 0)).is_ok()).count();
    assert!(recorded > 100 && recorded < 1_000, "{recorded}");
    assert!(held() > limit / 2 && held() <= limit, "{}", held());
    assert!(metrics.store_dropped.with_label_values(&["interactions"]).get() > 0);

    disk.state().hangs = false;
    store.commit(Vec::new()).await.unwrap();
    assert_eq!((store.trouble(), store.stats().unwrap().interactions), (None, 1 + recorded as u64));
    // The rating that timed out was recorded, and the refused one was not.
    assert_eq!(store.stats().unwrap().feedback, 1);
    store.close().await.unwrap();
    assert_eq!(held(), 0);
}
