//! The lease of the active trainer, in the manifest.

use std::time::Duration;

use hone_core::types::UnixMillis;
use uuid::Uuid;

use crate::bucket::Bucket;
use crate::manifest::{FleetManifest, LeaseRecord, ManifestError};

/// The outcome of [`FleetLease::acquire`].
#[derive(Debug)]
pub enum LeaseOutcome {
    /// The caller is the active trainer.
    Acquired(FleetLease),
    /// Another trainer is.
    Held(LeaseRecord),
}

/// The right to be the active trainer.
#[derive(Debug)]
pub struct FleetLease {
    bucket: Bucket,
    record: LeaseRecord,
    duration: Duration,
}

impl FleetLease {
    /// Takes the lease for `duration` if no other trainer holds it. A trainer that restarts takes its own lease over at
    /// once: no two running processes have the same `holder`.
    pub async fn acquire(
        bucket: &Bucket,
        holder: Uuid,
        name: &str,
        duration: Duration,
    ) -> Result<LeaseOutcome, ManifestError> {
        let take = |manifest: &mut FleetManifest| {
            let (known, now) = (&manifest.lease, bucket.now()?);
            let is_free = known.holder == holder || known.expires <= now;
            if is_free {
                let (name, epoch) = (name.to_owned(), known.epoch + 1);
                manifest.lease = LeaseRecord { holder, name, epoch, expires: end(now, duration) };
            }
            Ok(is_free)
        };
        let (manifest, is_taken) = FleetManifest::update(bucket, None, take).await?;
        let (bucket, record) = (bucket.clone(), manifest.lease);
        Ok(match is_taken {
            true => LeaseOutcome::Acquired(Self { bucket, record, duration }),
            false => LeaseOutcome::Held(record),
        })
    }

    /// The epoch.
    pub fn epoch(&self) -> u64 {
        self.record.epoch
    }

    /// How long the lease lasts without a renewal. Only for planning: the epoch is what protects.
    pub fn remaining(&self) -> Duration {
        let now = self.bucket.now().unwrap_or(UnixMillis::MAX);
        Duration::from_millis(self.record.expires.saturating_sub(now))
    }

    /// Extends the lease to the whole duration from now. Succeeds after its end too, if no other trainer took it. After
    /// an error other than [`ManifestError::Fenced`], the lease still lasts.
    pub async fn renew(&mut self) -> Result<(), ManifestError> {
        let extend = |manifest: &mut FleetManifest| {
            manifest.lease.expires = end(self.bucket.now()?, self.duration);
            Ok(())
        };
        let (manifest, ()) = self.update(extend).await?;
        self.record = manifest.lease;
        Ok(())
    }

    /// Ends the lease, so that a standby need not wait until it expires.
    pub async fn release(mut self) -> Result<(), ManifestError> {
        self.duration = Duration::ZERO;
        self.renew().await
    }

    /// Changes the manifest as [`FleetManifest::update`] does, unless another trainer took the lease.
    pub async fn update<T>(
        &self,
        change: impl FnMut(&mut FleetManifest) -> Result<T, ManifestError>,
    ) -> Result<(FleetManifest, T), ManifestError> {
        FleetManifest::update(&self.bucket, Some(self.record.epoch), change).await
    }
}

fn end(now: UnixMillis, duration: Duration) -> UnixMillis {
    now.saturating_add(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use futures::future::join_all;

    use super::*;

    const DURATION: Duration = Duration::from_secs(3600);
    const EXPIRED: i64 = 3_601_000;

    async fn acquire(bucket: &Bucket) -> LeaseOutcome {
        FleetLease::acquire(bucket, Uuid::now_v7(), "trainer", DURATION).await.unwrap()
    }

    async fn take(bucket: &Bucket) -> FleetLease {
        match acquire(bucket).await {
            LeaseOutcome::Acquired(lease) => lease,
            LeaseOutcome::Held(record) => panic!("{record:?}"),
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn each_race_has_one_holder_and_each_takeover_a_larger_epoch() {
        let bucket = Bucket::memory();
        for epoch in 1..=20 {
            let candidates = (0..12).map(|_| {
                let bucket = bucket.clone();
                tokio::spawn(async move { acquire(&bucket).await })
            });
            let outcomes = join_all(candidates).await.into_iter().map(Result::unwrap);
            let (holders, held): (Vec<_>, Vec<_>) =
                outcomes.partition(|outcome| matches!(outcome, LeaseOutcome::Acquired(_)));
            assert_eq!((holders.len(), held.len()), (1, 11));
            let (manifest, _) = FleetManifest::load(&bucket).await.unwrap().unwrap();
            assert_eq!((manifest.lease.epoch, manifest.lease.name.as_str()), (epoch, "trainer"));
            bucket.shift_clock(EXPIRED);
        }
    }

    #[tokio::test]
    async fn a_paused_holder_learns_of_the_takeover_from_its_next_write() {
        let bucket = Bucket::memory();
        let mut paused = take(&bucket).await;
        bucket.shift_clock(EXPIRED);
        assert_eq!(paused.remaining(), Duration::ZERO);
        let mut second = take(&bucket).await;
        let change = paused.update(|manifest| {
            manifest.policies.clear();
            Ok(())
        });
        let change = change.await;
        assert!(matches!(change, Err(ManifestError::Fenced { own: 1, found: 2 })), "{change:?}");
        assert!(matches!(paused.renew().await, Err(ManifestError::Fenced { .. })));
        second.renew().await.unwrap();
        second.release().await.unwrap();
        assert!(matches!(paused.release().await, Err(ManifestError::Fenced { .. })));
        assert_eq!(take(&bucket).await.epoch(), 3);
    }

    #[tokio::test]
    async fn the_local_clock_has_no_influence() {
        for skew in [-3_600_000, 3_600_000] {
            let bucket = Bucket::memory();
            bucket.shift_clock(skew);
            let mut lease = take(&bucket).await;
            assert!(lease.remaining() > DURATION / 2 && lease.remaining() <= DURATION);
            bucket.shift_clock(EXPIRED / 2);
            lease.renew().await.unwrap();
            bucket.shift_clock(EXPIRED / 2);
            let held = acquire(&bucket).await;
            assert!(matches!(held, LeaseOutcome::Held(record) if record.epoch == 1));
            bucket.shift_clock(EXPIRED);
            lease.renew().await.unwrap();
            assert!(matches!(acquire(&bucket).await, LeaseOutcome::Held(_)));
        }
    }

    #[tokio::test]
    async fn a_trainer_that_restarts_takes_its_own_lease() {
        let (bucket, holder) = (Bucket::memory(), Uuid::now_v7());
        let acquire = || FleetLease::acquire(&bucket, holder, "trainer", DURATION);
        let LeaseOutcome::Acquired(mut first) = acquire().await.unwrap() else { panic!() };
        let again = acquire().await.unwrap();
        assert!(matches!(again, LeaseOutcome::Acquired(lease) if lease.epoch() == 2));
        assert!(matches!(first.renew().await, Err(ManifestError::Fenced { .. })));
    }
}
