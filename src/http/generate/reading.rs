//! Reads the events of one generation when its client needs them.
//!
//! A task that is woken for each token interrupts the threads that sample, for longer than a small model needs to
//! sample a token. So a whole response reads the first token, whose time is measured, and the others at the end.
//! A stream reads its first token at once, later ones at most once per `server.stream_interval_ms`, and the
//! end at once. All streams read at the same instants, so that the server wakes once for all of them.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};
use std::task::Poll;
use std::time::Duration;

use futures::stream::{self, Stream};
use tokio::time::{Instant, timeout_at};

use hone_engine::{EngineError, Event, Generation};

/// The instant from which the intervals of all streams are counted.
static EPOCH: LazyLock<Instant> = LazyLock::new(Instant::now);

/// When the choices of a request read tokens after their first one: once per interval, unless something else is
/// set.
#[derive(Debug)]
pub(super) struct ReadingPace {
    interval: Duration,
    whole: AtomicBool,
    rest: AtomicBool,
}

impl ReadingPace {
    /// An interval of 0 is none, see [`Self::is_each_token`].
    pub fn new(interval: Duration) -> Self {
        Self { interval, whole: AtomicBool::new(false), rest: AtomicBool::new(false) }
    }

    /// At the end of the generation.
    pub fn read_whole(&self) {
        self.whole.store(true, Ordering::Relaxed);
    }

    /// At once, and nothing that is not sampled yet.
    pub fn read_rest(&self) {
        self.rest.store(true, Ordering::Relaxed);
    }

    /// Whether a stream reads each token as soon as it is sampled.
    pub fn is_each_token(&self) -> bool {
        self.interval.is_zero()
    }

    /// The end of the interval that `instant` is in.
    fn next_read(&self, instant: Instant) -> Instant {
        let passed = instant.saturating_duration_since(*EPOCH).as_nanos();
        let into = passed.checked_rem(self.interval.as_nanos()).unwrap_or_default();
        instant + self.interval.saturating_sub(Duration::from_nanos(into as u64))
    }

    fn is_whole(&self) -> bool {
        self.whole.load(Ordering::Relaxed)
    }

    fn is_rest(&self) -> bool {
        self.rest.load(Ordering::Relaxed)
    }
}

/// Reads one generation.
struct GenerationReader {
    generation: Generation,
    pace: Arc<ReadingPace>,
    ended: bool,
    /// When an event was waited for last; `None` before the first one.
    waited: Option<Instant>,
}

/// The events of a generation, up to the last one. Dropping the stream cancels it.
pub(super) fn generation_events(
    generation: Generation,
    pace: Arc<ReadingPace>,
) -> impl Stream<Item = Event> + Send {
    let reader = GenerationReader { generation, pace, ended: false, waited: None };
    stream::unfold(Some(reader), |reader| async move {
        let mut reader = reader?;
        Some(match reader.next().await {
            Some(token @ Event::Token(_)) => (token, Some(reader)),
            Some(last) => (last, None),
            None => {
                let reason = "the generation ended without a last event".to_owned();
                (Event::Failed(EngineError::Internal(reason)), None)
            }
        })
    })
}

impl GenerationReader {
    async fn next(&mut self) -> Option<Event> {
        if let Ok(event) = self.generation.events.try_recv() {
            self.waited.get_or_insert_with(Instant::now);
            return Some(event);
        }
        self.pause().await;
        let event = self.generation.events.recv().await;
        self.waited = Some(Instant::now());
        event
    }

    /// Waits as long as the next events are not needed.
    async fn pause(&mut self) {
        let Some(waited) = self.waited.filter(|_| !self.ended && !self.pace.is_rest()) else {
            return;
        };
        if self.pace.is_whole() {
            self.end().await;
        } else if !self.pace.is_each_token() {
            let next = self.pace.next_read(waited);
            // Also without an end, it has been long enough.
            let _ended = timeout_at(next, self.end()).await.is_ok();
        }
    }

    /// Waits for the end of the generation, or until only the rest is to be read.
    async fn end(&mut self) {
        let Self { generation, pace, ended, .. } = self;
        poll_fn(|context| {
            if pace.is_rest() {
                return Poll::Ready(());
            }
            Pin::new(&mut generation.ended).poll(context).map(|_| *ended = true)
        })
        .await;
    }
}

#[cfg(test)]
mod tests {
    use futures::{FutureExt as _, StreamExt as _};
    use tokio::sync::{mpsc, oneshot};

    use hone_core::types::{FinishReason, PolicyVersion};
    use hone_engine::Token;

    use super::*;

    const INTERVAL: Duration = Duration::from_millis(40);

    fn token(id: u32) -> Event {
        let text = String::new();
        Event::Token(Token {
            id,
            logprob: 0.0,
            kept_mass: 1.0,
            forced: false,
            top: Vec::new(),
            text,
        })
    }

    fn done() -> Event {
        Event::Done { finish: FinishReason::Length, text: String::new(), cached_tokens: 0 }
    }

    type Sender = (mpsc::Sender<Event>, oneshot::Sender<std::convert::Infallible>);

    fn generation() -> (Sender, Generation) {
        let ((sender, events), (ends, ended)) = (mpsc::channel(64), oneshot::channel());
        ((sender, ends), Generation { version: PolicyVersion(0), events, ended })
    }

    #[tokio::test]
    async fn a_whole_response_reads_the_first_token_and_then_the_end() {
        let ((sender, ends), generation) = generation();
        let pace = Arc::new(ReadingPace::new(INTERVAL));
        pace.read_whole();
        let mut events = Box::pin(generation_events(generation, pace));
        assert!(events.next().now_or_never().is_none());
        sender.try_send(token(1)).unwrap();
        assert!(matches!(events.next().await, Some(Event::Token(token)) if token.id == 1));
        assert!(events.next().now_or_never().is_none());
        for id in 2..5 {
            sender.try_send(token(id)).unwrap();
        }
        assert!(events.next().now_or_never().is_none(), "the generation has not ended");
        sender.try_send(done()).unwrap();
        drop(ends);
        let rest: Vec<_> = events.collect().await;
        assert!(matches!(rest.last(), Some(Event::Done { .. })) && rest.len() == 4);
    }

    #[tokio::test]
    async fn what_was_sampled_before_a_client_left_is_read() {
        let ((sender, _ends), generation) = generation();
        let pace = Arc::new(ReadingPace::new(INTERVAL));
        pace.read_whole();
        let mut events = Box::pin(generation_events(generation, Arc::clone(&pace)));
        sender.try_send(token(1)).unwrap();
        assert!(events.next().await.is_some());
        assert!(events.next().now_or_never().is_none());
        sender.try_send(token(2)).unwrap();
        sender.try_send(token(3)).unwrap();
        pace.read_rest();
        for id in 2..4 {
            let event = events.next().now_or_never().flatten();
            assert!(matches!(event, Some(Event::Token(token)) if token.id == id));
        }
        assert!(events.next().now_or_never().is_none());
    }

    #[tokio::test]
    async fn a_stream_reads_tokens_once_per_interval() {
        let ((sender, ends), generation) = generation();
        let sampled = async move {
            for id in 0..40 {
                sender.send(token(id)).await.unwrap();
                tokio::time::sleep(INTERVAL / 10).await;
            }
            sender.send(done()).await.unwrap();
            drop((sender, ends));
        };
        let pace = Arc::new(ReadingPace::new(INTERVAL));
        let events = generation_events(generation, Arc::clone(&pace));
        let timed = events.map(|event| (pace.next_read(Instant::now()), event));
        let began = Instant::now();
        let (read, ()) = tokio::join!(timed.collect::<Vec<_>>(), sampled);
        let ids = read.iter().filter_map(|(_, event)| match event {
            Event::Token(token) => Some(token.id),
            _ => None,
        });
        assert!(ids.eq(0..40) && matches!(read.last(), Some((_, Event::Done { .. }))));
        // Each read is followed by a pause until the next interval, and the end comes at once.
        let waits = read.windows(2).filter(|pair| pair[0].0 != pair[1].0).count();
        let intervals = began.elapsed().as_millis() / INTERVAL.as_millis() + 1;
        assert!(waits >= 1 && waits as u128 <= intervals, "{waits} of {intervals}");
    }

    #[tokio::test]
    async fn a_token_is_read_although_none_follows() {
        for interval in [INTERVAL, Duration::ZERO] {
            let ((sender, ends), generation) = generation();
            let mut events =
                Box::pin(generation_events(generation, Arc::new(ReadingPace::new(interval))));
            for id in 0..5 {
                sender.send(token(id)).await.unwrap();
                let event = events.next().await;
                assert!(matches!(event, Some(Event::Token(token)) if token.id == id));
            }
            // The end does not wait for the interval.
            sender.send(done()).await.unwrap();
            drop((sender, ends));
            assert!(matches!(events.next().await, Some(Event::Done { .. })));
            assert!(events.next().await.is_none());
        }
    }

    #[test]
    fn all_streams_read_at_the_same_instants() {
        let pace = ReadingPace::new(INTERVAL);
        let of = |ms| pace.next_read(*EPOCH + Duration::from_millis(ms)) - *EPOCH;
        assert_eq!(of(0), INTERVAL);
        assert_eq!(of(39), INTERVAL);
        assert_eq!(of(40), 2 * INTERVAL);
        assert_eq!(of(1234), 31 * INTERVAL);
    }
}
