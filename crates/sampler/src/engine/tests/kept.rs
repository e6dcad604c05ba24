//! Adapters that stay in memory after another version was activated.

use std::collections::HashSet;
use std::sync::Weak;

use hone_core::files::replace_dir;
use hone_model::ModelError;

use super::prefix::{answer, prompt, prompt_tokens};
use super::*;

fn active(engine: &BatchedEngine) -> Arc<AdapterWeights> {
    engine.shared.lock().active(PolicySlot::default()).unwrap().adapter.clone().unwrap()
}

/// An engine that keeps some adapters, its publisher, and a directory for them.
struct Keeping {
    engine: Arc<BatchedEngine>,
    publisher: BatchedPublisher,
    parent: tempfile::TempDir,
}

impl Keeping {
    fn new(kept_adapters: usize) -> Self {
        let engine = start(SamplerConfig { kept_adapters, ..small() });
        let publisher = BatchedPublisher::new(None, Arc::clone(&engine));
        Self { engine, publisher, parent: tempfile::tempdir().unwrap() }
    }

    fn dir(&self, version: u64) -> PathBuf {
        self.parent.path().join(version.to_string())
    }

    /// Writes the files of a version, also over those of another adapter.
    fn write(&self, version: u64, seed: u64) {
        let config = LoraConfig { r: 4, alpha: 3.0, ..LoraConfig::default() };
        let lora = random_lora(model(&tiny()).spec(), 4, seed);
        replace_dir::<ModelError>(&self.dir(version), |new| {
            peft::write(new, &lora, &config, "tiny")
        })
        .unwrap();
    }

    async fn serve(&self, version: u64) -> Arc<AdapterWeights> {
        let dir = self.dir(version);
        assert!(self.publisher.serve_now(PolicyVersion(version), Some(&dir)).await.unwrap());
        assert_eq!(self.engine.active_version(), PolicyVersion(version));
        active(&self.engine)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kept_version_is_activated_with_the_same_weights_and_cached_pages() {
    let keeping = Keeping::new(2);
    let engine = &keeping.engine;
    keeping.write(1, 1);
    keeping.write(2, 2);
    let request = endless(engine, &prompt(50, 4), 1, 20);
    let mut seen = Vec::new();
    for version in [1, 2] {
        // Staged and activated, as a publication does.
        let dir = keeping.dir(version);
        keeping.publisher.stage(PolicyVersion(version), Some(&dir)).await.unwrap();
        keeping.publisher.activate().await.unwrap();
        let weights = active(engine);
        seen.push((weights, answer(engine, &request).await));
    }
    assert_ne!(ids(&seen[0].1), ids(&seen[1].1));
    // The base needs no files.
    keeping.publisher.serve_now(PolicyVersion::BASE, None).await.unwrap();
    let base = answer(engine, &request).await;
    for _ in 0..3 {
        for version in [1, 2] {
            let (weights, expected) = &seen[version as usize - 1];
            // No copy was made, so no file was read.
            assert!(Arc::ptr_eq(&keeping.serve(version).await, weights));
            let before = prompt_tokens(engine).1;
            assert_eq!(answer(engine, &request).await, *expected);
            assert_eq!(prompt_tokens(engine).1, before + 49, "version {version}");
        }
        keeping.publisher.serve_now(PolicyVersion::BASE, None).await.unwrap();
        let before = prompt_tokens(engine).1;
        assert_eq!(answer(engine, &request).await, base);
        assert_eq!(prompt_tokens(engine).1, before + 49);
    }
    // The staged version and the active one can be the same weights.
    let active = keeping.serve(1).await;
    keeping.publisher.stage(PolicyVersion(1), Some(&keeping.dir(1))).await.unwrap();
    keeping.publisher.activate().await.unwrap();
    assert!(Arc::ptr_eq(&keeping.serve(1).await, &active));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_that_changed_are_read_again() {
    let keeping = Keeping::new(4);
    let request = endless(&keeping.engine, &prompt(30, 2), 1, 20);
    let mut answers = Vec::new();
    for seed in [1, 2, 3] {
        // The number is used again for another adapter.
        keeping.write(1, seed);
        let weights = keeping.serve(1).await;
        assert!(Arc::ptr_eq(&keeping.serve(1).await, &weights));
        let before = prompt_tokens(&keeping.engine).1;
        let found = answer(&keeping.engine, &request).await;
        assert_eq!(prompt_tokens(&keeping.engine).1, before, "no page of other weights is used");
        let plain = start(small());
        let lora = random_lora(model(&tiny()).spec(), 4, seed);
        plain.publish(PolicyVersion(1), Some(&lora)).unwrap();
        assert_eq!(found, answer(&plain, &request).await);
        answers.push(ids(&found));
    }
    assert_eq!(answers.iter().collect::<HashSet<_>>().len(), 3);
    // Under another number, the same directory is another version.
    let first = keeping.serve(1).await;
    let dir = keeping.dir(1);
    keeping.publisher.serve_now(PolicyVersion(2), Some(&dir)).await.unwrap();
    assert!(!Arc::ptr_eq(&active(&keeping.engine), &first));
    // Without its files, a version is not served.
    std::fs::rename(&dir, keeping.dir(7)).unwrap();
    let refused = keeping.publisher.serve_now(PolicyVersion(1), Some(&dir)).await.unwrap_err();
    assert!(refused.to_string().contains("adapter_config.json"), "{refused}");
    assert_eq!(keeping.engine.active_version(), PolicyVersion(2));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_adapters_in_memory_are_bounded() {
    for limit in [0, 1, 3] {
        let keeping = Keeping::new(limit);
        (1..=5).for_each(|version| keeping.write(version, version));
        let mut loaded: Vec<Weak<AdapterWeights>> = Vec::new();
        for i in 0..300 {
            let weights = Arc::downgrade(&keeping.serve(1 + i % 5).await);
            if !loaded.iter().any(|other| other.ptr_eq(&weights)) {
                loaded.push(weights);
            }
            loaded.retain(|weights| weights.strong_count() > 0);
            assert!(loaded.len() <= limit.max(1), "{} of {limit}", loaded.len());
        }
        // Those that were used last are kept: version 5, then 4.
        let [five, four] = [keeping.serve(5).await, keeping.serve(4).await];
        for (version, weights) in [(5, &five), (4, &four), (4, &four), (5, &five)] {
            let found = keeping.serve(version).await;
            assert_eq!(Arc::ptr_eq(&found, weights), limit > 1, "{version} with {limit}");
        }
    }
}
