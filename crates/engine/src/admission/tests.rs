use std::time::Duration;

use super::*;

const V0: PolicyVersion = PolicyVersion(0);
const V1: PolicyVersion = PolicyVersion(1);

fn admission(slots: usize, queue: usize) -> Arc<Admission> {
    limited(slots, QueueLimits { places: queue, timeout: None })
}

fn limited(slots: usize, limits: QueueLimits) -> Arc<Admission> {
    Admission::new(slots, limits, V0, Arc::new(Metrics::new().unwrap()))
}

/// Requests a slot in a task; returns once the load has changed.
async fn wait(
    admission: &Arc<Admission>,
    priority: Priority,
) -> tokio::task::JoinHandle<Result<Lease, EngineError>> {
    wait_for(admission, &None, priority).await
}

async fn wait_for(
    admission: &Arc<Admission>,
    owner: &Owner,
    priority: Priority,
) -> tokio::task::JoinHandle<Result<Lease, EngineError>> {
    let (shared, owner) = (Arc::clone(admission), owner.clone());
    let before = admission.load();
    let task = tokio::spawn(async move { shared.acquire_for(&owner, priority).await });
    while admission.load() == before {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    task
}

fn load(live: usize, shadow: usize, live_waiting: usize, shadow_waiting: usize) -> EngineLoad {
    EngineLoad { live_running: live, shadow_running: shadow, live_waiting, shadow_waiting }
}

#[tokio::test]
async fn a_slot_has_one_lease_and_is_reused_after_it() {
    let admission = admission(2, 0);
    let a = admission.acquire(Priority::Live).await.unwrap();
    let b = admission.acquire(Priority::Live).await.unwrap();
    assert_ne!(a.slot(), b.slot());
    assert!(matches!(
        admission.acquire(Priority::Live).await,
        Err(EngineError::Overloaded { slots: 2, queued: 0, .. })
    ));
    assert_eq!(admission.metrics.engine_rejected.get(), 1);
    drop(a);
    let again = admission.acquire(Priority::Live).await.unwrap();
    assert_eq!(again.version, V0);
    assert_eq!(admission.load(), load(2, 0, 0, 0));
}

#[tokio::test]
async fn the_queue_of_live_requests_is_bounded() {
    let admission = admission(1, 2);
    let held = admission.acquire(Priority::Live).await.unwrap();
    let first = wait(&admission, Priority::Live).await;
    let _second = wait(&admission, Priority::Live).await;
    assert!(admission.acquire(Priority::Live).await.is_err());
    // A dropped request frees its place in the queue.
    first.abort();
    assert!(first.await.is_err());
    let third = wait(&admission, Priority::Live).await;
    drop(held);
    assert_eq!(admission.load().live_running, 1);
    drop(third);
}

#[tokio::test]
async fn live_requests_go_before_shadows_and_in_order() {
    let admission = admission(1, 8);
    let held = admission.acquire(Priority::Live).await.unwrap();
    let shadow = wait(&admission, Priority::Shadow).await;
    let first = wait(&admission, Priority::Live).await;
    let second = wait(&admission, Priority::Live).await;
    drop(held);
    let first = first.await.unwrap().unwrap();
    assert_eq!(admission.load(), load(1, 0, 1, 1));
    drop(first);
    drop(second.await.unwrap().unwrap());
    assert_eq!(shadow.await.unwrap().unwrap().priority, Priority::Shadow);
    assert_eq!(admission.load(), load(0, 0, 0, 0));
}

#[tokio::test]
async fn the_newest_shadows_are_preempted_and_no_more_than_needed() {
    // The queue holds 0 requests, but a live request may wait for a preempted shadow to end.
    let admission = admission(2, 0);
    let old = admission.acquire(Priority::Shadow).await.unwrap();
    let new = admission.acquire(Priority::Shadow).await.unwrap();
    let client = wait(&admission, Priority::Live).await;
    assert_eq!((old.cancel.get(), new.cancel.get()), (None, Some(CancelReason::Preempted)));
    let other = wait(&admission, Priority::Live).await;
    assert_eq!(old.cancel.get(), Some(CancelReason::Preempted));
    assert_eq!(admission.metrics.engine_preempted.get(), 2);
    assert!(admission.acquire(Priority::Live).await.is_err());
    drop((old, new));
    let both = (client.await.unwrap().unwrap(), other.await.unwrap().unwrap());
    assert_eq!(admission.load(), load(2, 0, 0, 0));
    drop(both);
}

#[tokio::test]
async fn an_abandoned_request_preempts_no_shadow() {
    let admission = admission(1, 8);
    let shadow = admission.acquire(Priority::Shadow).await.unwrap();
    let held = admission.acquire_on(Color::Green).unwrap();
    let client = wait(&admission, Priority::Live).await;
    client.abort();
    assert!(client.await.is_err());
    let next = wait(&admission, Priority::Shadow).await;
    drop(shadow);
    assert_eq!(next.await.unwrap().unwrap().priority, Priority::Shadow);
    drop(held);
}

#[tokio::test]
async fn leases_keep_their_color_and_version() {
    let admission = admission(1, 8);
    let old = admission.acquire(Priority::Live).await.unwrap();
    let waiting = wait(&admission, Priority::Live).await;
    let idle = admission.idle_color();
    admission.wait_until_idle(idle).await;
    assert!(admission.begin_replacement(idle));
    assert!(!admission.activate(idle), "the color holds no version");
    assert!(admission.acquire_on(idle).is_none());
    admission.set_version(idle, V1);
    let probe = admission.acquire_on(idle).unwrap();
    assert_eq!((probe.version, admission.active_version()), (V1, V0));
    assert!(admission.acquire_on(idle).is_none());
    drop(probe);
    assert!(admission.activate(idle));
    // The waiting request gets a slot of the new color, though the old one is busy.
    let new = waiting.await.unwrap().unwrap();
    assert_eq!((old.version, new.version), (V0, V1));
    assert_eq!(
        (admission.color_of(V0), admission.color_of(V1)),
        (old.slot().map(|s| s.0), new.slot().map(|s| s.0))
    );
    let idle = tokio::spawn({
        let (admission, color) = (Arc::clone(&admission), old.slot().unwrap().0);
        async move { admission.wait_until_idle(color).await }
    });
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert!(!idle.is_finished());
    drop(old);
    idle.await.unwrap();
}

#[tokio::test]
async fn closing_refuses_new_requests_and_ends_shadows() {
    let admission = admission(2, 8);
    let live = admission.acquire(Priority::Live).await.unwrap();
    let shadow = admission.acquire(Priority::Shadow).await.unwrap();
    let waiting = wait(&admission, Priority::Shadow).await;
    admission.close(false);
    assert!(matches!(waiting.await.unwrap(), Err(EngineError::ShuttingDown)));
    assert_eq!((live.cancel.get(), shadow.cancel.get()), (None, Some(CancelReason::ShuttingDown)));
    admission.close(true);
    assert_eq!(live.cancel.get(), Some(CancelReason::ShuttingDown));
    assert!(matches!(admission.acquire(Priority::Live).await, Err(EngineError::ShuttingDown)));
}

fn owner(name: &str) -> Owner {
    Some(Arc::from(name))
}

#[tokio::test]
async fn the_owner_with_fewer_slots_goes_first() {
    let admission = admission(2, 16);
    let held = [
        admission.acquire_for(&owner("a"), Priority::Live).await.unwrap(),
        admission.acquire_for(&owner("a"), Priority::Live).await.unwrap(),
    ];
    let more = wait_for(&admission, &owner("a"), Priority::Live).await;
    let other = wait_for(&admission, &owner("b"), Priority::Live).await;
    let [one, two] = held;
    drop(one);
    // `a` still runs one request, and `b` none.
    let other = other.await.unwrap().unwrap();
    assert!(!more.is_finished());
    drop((two, other));
    drop(more.await.unwrap().unwrap());
}

#[tokio::test]
async fn one_owner_cannot_fill_the_queue() {
    let admission = admission(1, 4);
    let held = admission.acquire_for(&owner("flood"), Priority::Live).await.unwrap();
    let _first = wait_for(&admission, &owner("flood"), Priority::Live).await;
    let _second = wait_for(&admission, &owner("flood"), Priority::Live).await;
    let refused = admission.acquire_for(&owner("flood"), Priority::Live).await;
    assert!(matches!(refused, Err(EngineError::ShareExceeded { own: 2, .. })));
    assert!(matches!(
        admission.admits(&owner("flood"), 1),
        Err(EngineError::ShareExceeded { own: 2, .. })
    ));
    assert!(admission.admits(&owner("other"), 1).is_ok());
    assert!(matches!(
        admission.admits(&owner("other"), 2),
        Err(EngineError::ShareExceeded { own: 0, .. })
    ));
    assert!(matches!(
        admission.admits(&owner("other"), 3),
        Err(EngineError::Overloaded { queued: 2, .. })
    ));
    assert_eq!(admission.metrics.engine_rejected.get(), 4);
    drop(held);
}

#[tokio::test]
async fn a_request_that_waits_too_long_is_refused() {
    let limit = Duration::from_millis(20);
    let admission = limited(1, QueueLimits { places: 4, timeout: Some(limit) });
    let held = admission.acquire(Priority::Live).await.unwrap();
    let refused = admission.acquire(Priority::Live).await;
    assert!(matches!(refused, Err(EngineError::QueueTimeout { waited, .. }) if waited >= limit));
    assert_eq!(admission.load(), load(1, 0, 0, 0));
    // A shadow may wait longer.
    let shadow = wait(&admission, Priority::Shadow).await;
    tokio::time::sleep(2 * limit).await;
    drop(held);
    drop(shadow.await.unwrap().unwrap());
    assert_eq!(admission.metrics.engine_queue_wait.get_sample_count(), 2);
}

mod service_rate {
    use super::super::*;

    #[test]
    fn the_wait_follows_from_the_mean_time_and_the_slots() {
        let mut rate = ServiceRate::default();
        assert_eq!(rate.wait(8, 4), UNKNOWN);
        rate.record(Duration::from_secs(2));
        assert_eq!(rate.wait(8, 4), Duration::from_secs(4));
        assert_eq!(rate.wait(3, 0), Duration::from_secs(6));
        rate.record(Duration::from_secs(12));
        assert_eq!(rate.wait(1, 1), Duration::from_secs(3));
        for _ in 0..200 {
            rate.record(Duration::from_secs(5));
        }
        assert!((rate.wait(1, 1).as_secs_f64() - 5.0).abs() < 1e-6);
    }
}
