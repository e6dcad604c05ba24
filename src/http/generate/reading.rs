//! Reads the events of one generation when its client needs them.
//!
//! A task that is woken for each token takes more time than a small model needs to sample it, and interrupts
//! the threads that sample. So a whole response reads the first token, whose time is measured, and the others
//! at the end. A stream reads tokens as they come, unless they come faster than [`GATHER`]: then it reads those
//! of about that time together. The first token and the end never wait.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use futures::stream;
use futures::stream::Stream;
use tokio::time::{Instant, timeout_at};

use hone_engine::{EngineError, Event, Generation};

/// How long tokens of a stream are gathered.
const GATHER: Duration = Duration::from_millis(1);

/// When the choices of a request read tokens after their first one: soon, unless something else is set.
#[derive(Debug, Default)]
pub(super) struct ReadingPace {
    whole: AtomicBool,
    rest: AtomicBool,
}

impl ReadingPace {
    /// At the end of the generation.
    pub fn read_whole(&self) {
        self.whole.store(true, Ordering::Relaxed);
    }

    /// At once, and nothing that is not sampled yet.
    pub fn read_rest(&self) {
        self.rest.store(true, Ordering::Relaxed);
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
    /// When the first token was read.
    first: Option<Instant>,
    /// When an event was waited for last.
    waited: Instant,
    /// Number of events that were read.
    read: u32,
}

/// The events of a generation, up to the last one. Dropping the stream cancels it.
pub(super) fn generation_events(
    generation: Generation,
    pace: Arc<ReadingPace>,
) -> impl Stream<Item = Event> + Send {
    let (ended, first, waited, read) = (false, None, Instant::now(), 0);
    let reader = GenerationReader { generation, pace, ended, first, waited, read };
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
        let event = match self.generation.events.try_recv() {
            Ok(event) => {
                self.first.get_or_insert_with(Instant::now);
                Some(event)
            }
            Err(_) => {
                self.pause().await;
                let event = self.generation.events.recv().await;
                self.waited = Instant::now();
                self.first.get_or_insert(self.waited);
                event
            }
        };
        self.read += 1;
        event
    }

    /// Waits as long as the next events are not needed.
    async fn pause(&mut self) {
        let Some(first) = self.first.filter(|_| !self.ended) else { return };
        if self.pace.is_rest() {
            return;
        }
        if self.pace.is_whole() {
            return self.end().await;
        }
        // The first event is no interval.
        let intervals = self.read.saturating_sub(1);
        let fast = self.waited.saturating_duration_since(first) < GATHER * intervals;
        if fast {
            // Also without an end, it has been long enough.
            let _ended = timeout_at(self.waited + GATHER, self.end()).await.is_ok();
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
        let pace = Arc::new(ReadingPace::default());
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
        let pace = Arc::new(ReadingPace::default());
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
    async fn a_stream_reads_fast_and_slow_tokens() {
        let ((sender, ends), generation) = generation();
        let events = generation_events(generation, Arc::default());
        let samples = async move {
            for id in 0..60 {
                sender.send(token(id)).await.unwrap();
                match id {
                    0..10 | 20..50 => tokio::task::yield_now().await,
                    _ => tokio::time::sleep(GATHER).await,
                }
            }
            sender.send(done()).await.unwrap();
            drop((sender, ends));
        };
        let (read, ()) = tokio::join!(events.collect::<Vec<_>>(), samples);
        let ids: Vec<u32> = read
            .iter()
            .filter_map(|event| match event {
                Event::Token(token) => Some(token.id),
                _ => None,
            })
            .collect();
        assert_eq!(ids, (0..60).collect::<Vec<_>>());
        assert!(matches!(read.last(), Some(Event::Done { .. })));
    }
}
