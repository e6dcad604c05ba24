//! Loads pipelines and swaps them into running engines.

mod adapter;
mod loader;

use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Mutex;

use hone_engine::EngineError;

pub(crate) use adapter::Adapter;
pub(crate) use loader::PipelineLoader;

// Swaps two pipelines whose type cannot be named.

/// A pipeline that an engine may share. mistral.rs does not export its type.
pub(crate) struct SharedPipeline {
    /// An `Arc<Mutex<P>>`.
    pipeline: Box<dyn Any + Send + Sync>,
    /// [`swap_shared`] for `P`.
    swap: fn(&dyn Any, &dyn Any) -> Option<Duration>,
}

impl SharedPipeline {
    /// # Safety
    /// Among the pipelines with the same `P`, values of equal size and alignment must have the same
    /// concrete type.
    unsafe fn new<P: ?Sized + Send + 'static>(pipeline: Arc<Mutex<P>>) -> Self {
        Self { pipeline: Box::new(pipeline), swap: swap_shared::<P> }
    }

    /// Swaps this pipeline's value with that of `fresh`. Returns how long this pipeline was locked.
    /// Blocks, so do not call it in a task.
    ///
    /// No sequence may be running on either pipeline.
    pub fn swap(&self, fresh: &Self) -> Result<Duration, EngineError> {
        let locked = (self.swap)(self.pipeline.as_ref(), fresh.pipeline.as_ref());
        locked.ok_or_else(|| EngineError::Internal("the pipelines have different types".to_owned()))
    }
}

/// Swaps the values of two pipelines. Returns how long the first was locked; `None` if their types differ.
fn swap_shared<P: ?Sized + Send + 'static>(serving: &dyn Any, fresh: &dyn Any) -> Option<Duration> {
    let mut fresh = fresh.downcast_ref::<Arc<Mutex<P>>>()?.blocking_lock();
    let start = Instant::now();
    let mut serving = serving.downcast_ref::<Arc<Mutex<P>>>()?.blocking_lock();
    // SAFETY: the callers of `SharedPipeline::new` guarantee this condition.
    let swapped = unsafe { swap_values(&mut *serving, &mut *fresh) };
    drop(serving);
    swapped.then(|| start.elapsed())
}

/// `mem::swap` for two values of one concrete type that cannot be named. Returns false, without any
/// effect, if their sizes or alignments differ, because then their types differ.
///
/// # Safety
/// If the values have the same size and alignment, they must have the same concrete type.
unsafe fn swap_values<P: ?Sized>(a: &mut P, b: &mut P) -> bool {
    if size_of_val(a) != size_of_val(b) || align_of_val(a) != align_of_val(b) {
        return false;
    }
    let size = size_of_val(a);
    let (a, b) = (std::ptr::from_mut(a).cast::<u8>(), std::ptr::from_mut(b).cast::<u8>());
    // SAFETY: both pointers come from exclusive references to values of `size` bytes. So they are
    // valid for reads and writes and do not overlap; a byte pointer is always aligned. By this
    // function's safety condition, the values have the same type. They can be moved bytewise, because
    // the references prove that they are not pinned. The swap is untyped and copies padding too, so
    // each place holds a valid value of its type afterwards.
    unsafe { std::ptr::swap_nonoverlapping(a, b, size) };
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    trait FakePipeline: Send + Sync {
        fn name(&self) -> &str;
    }

    struct SmallPipeline(String, u8);

    struct LargePipeline(String, [u64; 9]);

    impl FakePipeline for SmallPipeline {
        fn name(&self) -> &str {
            assert_eq!(usize::from(self.1), self.0.len());
            &self.0
        }
    }

    impl FakePipeline for LargePipeline {
        fn name(&self) -> &str {
            assert_eq!(self.1[0], 0);
            &self.0
        }
    }

    fn handle(
        value: impl FakePipeline + 'static,
    ) -> (Arc<Mutex<dyn FakePipeline>>, SharedPipeline) {
        let shared: Arc<Mutex<dyn FakePipeline>> = Arc::new(Mutex::new(value));
        // SAFETY: the types in these tests have different sizes.
        (shared.clone(), unsafe { SharedPipeline::new(shared) })
    }

    #[test]
    fn values_of_trait_objects_are_swapped() {
        let (a, first) = handle(SmallPipeline("one".to_owned(), 3));
        let (b, second) = handle(SmallPipeline("second".to_owned(), 6));
        first.swap(&second).unwrap();
        assert_eq!(a.blocking_lock().name(), "second");
        assert_eq!(b.blocking_lock().name(), "one");
        // Each value still has one owner and is dropped once.
        drop((b, second));
        assert_eq!(a.blocking_lock().name(), "second");
        first.swap(&handle(SmallPipeline("third".to_owned(), 5)).1).unwrap();
        assert_eq!(a.blocking_lock().name(), "third");
    }

    #[test]
    fn values_of_different_types_are_refused() {
        let (a, first) = handle(SmallPipeline("one".to_owned(), 3));
        let (b, second) = handle(LargePipeline("wide".to_owned(), [0; 9]));
        assert!(first.swap(&second).is_err());
        assert_eq!((a.blocking_lock().name(), b.blocking_lock().name()), ("one", "wide"));
        let number = Arc::new(Mutex::new(5_u8));
        // SAFETY: this is the only handle of a `u8`.
        let other = unsafe { SharedPipeline::new(number) };
        assert!(first.swap(&other).is_err());
    }
}
