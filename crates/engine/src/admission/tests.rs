use std::time::Duration;

use super::*;

const V0: PolicyVersion = PolicyVersion(0);
const V1: PolicyVersion = PolicyVersion(1);

fn admission(slots: usize, queue: usize) -> Arc<Admission> {
    Admission::new(slots, queue, V0, Arc::new(Metrics::new().unwrap()))
}

/// Starts waiting; returns once the request is in the queue.
async fn wait(
    admission: &Arc<Admission>,
    priority: Priority,
) -> tokio::task::JoinHandle<Result<Lease, EngineError>> {
    let shared = Arc::clone(admission);
    let before = admission.load();
    let task = tokio::spawn(async move { shared.acquire(priority).await });
    while admission.load() == before {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    task
}

fn load(live: usize, shadow: usize, live_waits: usize, shadow_waits: usize) -> EngineLoad {
    EngineLoad {
        live_running: live,
        shadow_running: shadow,
        live_waiting: live_waits,
        shadow_waiting: shadow_waits,
    }
}

#[tokio::test]
async fn slots_are_given_once_and_come_back() {
    let admission = admission(2, 0);
    let a = admission.acquire(Priority::Live).await.unwrap();
    let b = admission.acquire(Priority::Live).await.unwrap();
    assert_ne!(a.slot, b.slot);
    assert!(matches!(
        admission.acquire(Priority::Live).await,
        Err(EngineError::Overloaded { slots: 2, queued: 0 })
    ));
    assert_eq!(admission.metrics.engine_rejected.get(), 1);
    drop(a);
    let again = admission.acquire(Priority::Live).await.unwrap();
    assert_eq!(again.version, V0);
    assert_eq!(admission.load(), load(2, 0, 0, 0));
}

#[tokio::test]
async fn the_queue_is_bounded_for_clients() {
    let admission = admission(1, 2);
    let held = admission.acquire(Priority::Live).await.unwrap();
    let first = wait(&admission, Priority::Live).await;
    let _second = wait(&admission, Priority::Live).await;
    assert!(admission.acquire(Priority::Live).await.is_err());
    // One that gives up makes room for another.
    first.abort();
    assert!(first.await.is_err());
    let third = wait(&admission, Priority::Live).await;
    drop(held);
    assert_eq!(admission.load().live_running, 1);
    drop(third);
}

#[tokio::test]
async fn clients_go_before_shadows_in_order() {
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
async fn the_newest_shadows_make_room_and_no_more_than_needed() {
    // No queue at all: a client may still wait for a shadow to end.
    let admission = admission(2, 0);
    let old = admission.acquire(Priority::Shadow).await.unwrap();
    let new = admission.acquire(Priority::Shadow).await.unwrap();
    let client = wait(&admission, Priority::Live).await;
    assert_eq!((old.cancel.get(), new.cancel.get()), (None, Some(Cancel::Preempted)));
    let other = wait(&admission, Priority::Live).await;
    assert_eq!(old.cancel.get(), Some(Cancel::Preempted));
    assert_eq!(admission.metrics.engine_preempted.get(), 2);
    assert!(admission.acquire(Priority::Live).await.is_err());
    drop((old, new));
    let both = (client.await.unwrap().unwrap(), other.await.unwrap().unwrap());
    assert_eq!(admission.load(), load(2, 0, 0, 0));
    drop(both);
}

#[tokio::test]
async fn a_client_that_gave_up_preempts_nobody() {
    let admission = admission(1, 8);
    let shadow = admission.acquire(Priority::Shadow).await.unwrap();
    let held = admission.acquire_on(1).unwrap();
    let client = wait(&admission, Priority::Live).await;
    client.abort();
    assert!(client.await.is_err());
    let next = wait(&admission, Priority::Shadow).await;
    drop(shadow);
    assert_eq!(next.await.unwrap().unwrap().priority, Priority::Shadow);
    drop(held);
}

#[tokio::test]
async fn leases_keep_their_colour_and_version() {
    let admission = admission(1, 8);
    let old = admission.acquire(Priority::Live).await.unwrap();
    let waiting = wait(&admission, Priority::Live).await;
    let idle = admission.idle();
    admission.drained(idle).await;
    admission.set_version(idle, None);
    assert!(!admission.activate(idle), "it holds nothing");
    assert!(admission.acquire_on(idle).is_none());
    admission.set_version(idle, Some(V1));
    let probe = admission.acquire_on(idle).unwrap();
    assert_eq!((probe.version, admission.active_version()), (V1, V0));
    assert!(admission.acquire_on(idle).is_none());
    drop(probe);
    assert!(admission.activate(idle));
    // Who waited gets the new colour at once, though the old one is busy.
    let new = waiting.await.unwrap().unwrap();
    assert_eq!((old.version, new.version), (V0, V1));
    assert_eq!(
        (admission.holding(V0), admission.holding(V1)),
        (Some(old.colour), Some(new.colour))
    );
    let drained = tokio::spawn({
        let (admission, colour) = (Arc::clone(&admission), old.colour);
        async move { admission.drained(colour).await }
    });
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert!(!drained.is_finished());
    drop(old);
    drained.await.unwrap();
}

#[tokio::test]
async fn closing_refuses_and_ends() {
    let admission = admission(2, 8);
    let live = admission.acquire(Priority::Live).await.unwrap();
    let shadow = admission.acquire(Priority::Shadow).await.unwrap();
    let waiting = wait(&admission, Priority::Shadow).await;
    admission.close(false);
    assert!(matches!(waiting.await.unwrap(), Err(EngineError::ShuttingDown)));
    assert_eq!((live.cancel.get(), shadow.cancel.get()), (None, Some(Cancel::ShuttingDown)));
    admission.close(true);
    assert_eq!(live.cancel.get(), Some(Cancel::ShuttingDown));
    assert!(matches!(admission.acquire(Priority::Live).await, Err(EngineError::ShuttingDown)));
}
