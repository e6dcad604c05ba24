//! Loads pipelines and exchanges them under running engines: the hot swap.
//!
//! mistral.rs 0.8.1 has no way to change an engine's weights. But an engine and we share its
//! pipeline behind a lock, and every pipeline loaded here is of one concrete type, so exchanging
//! the two values puts new weights into an engine that has no sequence running, without a new
//! engine (whose threads would never end).

mod adapter;

use std::any::Any;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use candle_core::Device;
use mistralrs::core::{
    AdapterPaths, DefaultSchedulerMethod, DeviceMapSetting, LocalModelPaths, MistralRsBuilder,
    ModelDType, ModelPaths, NormalLoaderBuilder, NormalSpecificConfig, SchedulerConfig,
};
use tokio::sync::Mutex;

use hone_engine::{EngineError, ModelDir};

pub(crate) use adapter::Adapter;

/// A loaded pipeline, whose type mistral.rs does not export.
pub(crate) trait Pipeline: Send + Sync {
    /// Exchanges this pipeline's value with `fresh`'s and returns for how long the locks were
    /// held. No sequence may be running on either. Blocks; not for async contexts.
    fn exchange(&self, fresh: &dyn Pipeline) -> Result<Duration, EngineError>;

    /// For finding out the type again.
    fn as_any(&self) -> &dyn Any;
}

/// The one implementation. Invariant: only [`Loader::load`] makes one, and always over the same
/// concrete type, mistral.rs's `NormalPipeline`.
struct Handle<P: ?Sized>(Arc<Mutex<P>>);

impl<P: ?Sized + Send + Sync + 'static> Pipeline for Handle<P> {
    fn exchange(&self, fresh: &dyn Pipeline) -> Result<Duration, EngineError> {
        let unlike = || EngineError::Internal("pipelines of two kinds were to be exchanged".into());
        let fresh = fresh.as_any().downcast_ref::<Self>().ok_or_else(unlike)?;
        let mut theirs = fresh.0.blocking_lock();
        let start = Instant::now();
        let mut ours = self.0.blocking_lock();
        // SAFETY: `Handle`'s invariant: both values are of one concrete type.
        let exchanged = unsafe { swap_values(&mut *ours, &mut *theirs) };
        drop(ours);
        if exchanged { Ok(start.elapsed()) } else { Err(unlike()) }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// `mem::swap` for two values of one concrete type that cannot be named. Returns false, and leaves
/// both alone, if their size or alignment differ, which proves them to be of two types.
///
/// # Safety
/// Behind both references must be values of the same concrete type.
unsafe fn swap_values<P: ?Sized>(a: &mut P, b: &mut P) -> bool {
    if size_of_val(a) != size_of_val(b) || align_of_val(a) != align_of_val(b) {
        return false;
    }
    let size = size_of_val(a);
    let (a, b) = (std::ptr::from_mut(a).cast::<u8>(), std::ptr::from_mut(b).cast::<u8>());
    // SAFETY: both pointers come from exclusive references to values of `size` bytes, which
    // therefore do not overlap and are valid for reads and writes; a pointer to bytes is always
    // aligned. The values are of one type (the caller's promise), and Rust values may be moved
    // bytewise (nothing here is pinned: the lock hands out `&mut P`), so each place holds a valid
    // value of its type afterwards, padding included, since the swap is untyped.
    unsafe { std::ptr::swap_nonoverlapping(a, b, size) };
    true
}

/// A fresh pipeline and the means to build an engine around it.
pub(crate) struct Loaded {
    /// For exchanging it.
    pub(crate) pipeline: Box<dyn Pipeline>,
    /// For building the engine, at start only.
    pub(crate) engine: MistralRsBuilder,
}

/// Bytes of weights of which a few copies more do not matter.
const SMALL: u64 = 64 << 20;

/// How often the memory of small copies is given back, at most.
const GIVE_BACK_EVERY: Duration = Duration::from_secs(1);

/// Loads pipelines of one model.
pub(crate) struct Loader {
    id: String,
    dir: PathBuf,
    weights: Vec<PathBuf>,
    small: bool,
    /// When memory was given back last.
    gave_back: std::sync::Mutex<Option<Instant>>,
}

impl Loader {
    /// A loader of the directory that [`ModelDir::write_normalized`] wrote for `model`.
    pub(crate) fn new(model: &ModelDir, normalized: &Path) -> Self {
        let names = model.weights.iter().filter_map(|path| path.file_name());
        let bytes = |path: &PathBuf| std::fs::metadata(path).map_or(u64::MAX, |file| file.len());
        let bytes = model.weights.iter().map(bytes).fold(0, u64::saturating_add);
        Self {
            id: model.path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            dir: normalized.to_path_buf(),
            weights: names.map(|name| normalized.join(name)).collect(),
            small: bytes <= SMALL,
            gave_back: std::sync::Mutex::default(),
        }
    }

    /// How many of `copies` may be loaded at the same time: all where they are small, else one, so
    /// that no more than one copy too many is in memory.
    pub(crate) fn at_once(&self, copies: usize) -> usize {
        if self.small { copies.max(1) } else { 1 }
    }

    /// Gives freed pages back to the system: glibc keeps them, and a replaced copy of the weights is
    /// most of the process. Small copies are only looked after once a second: every thread stops for
    /// it, and the next copy needs the pages again.
    pub(crate) fn give_memory_back(&self) {
        let mut last = self.gave_back.lock().unwrap_or_else(PoisonError::into_inner);
        if self.small && last.is_some_and(|last| last.elapsed() < GIVE_BACK_EVERY) {
            return;
        }
        *last = Some(Instant::now());
        #[cfg(all(target_os = "linux", target_env = "gnu"))]
        {
            // SAFETY: malloc_trim takes no pointer and may be called at any time from any thread.
            unsafe { libc::malloc_trim(0) };
        }
    }

    /// Loads the model in F32 on the CPU with `adapter` merged into its weights. Blocks.
    pub(crate) fn load(&self, adapter: Option<&Adapter>) -> Result<Loaded, EngineError> {
        let fail = |e: anyhow::Error| EngineError::Model(format!("{}: {e:#}", self.dir.display()));
        let paths: Box<dyn ModelPaths> = Box::new(LocalModelPaths {
            tokenizer_filename: self.dir.join("tokenizer.json"),
            config_filename: self.dir.join("config.json"),
            template_filename: Some(self.dir.join("tokenizer_config.json")),
            filenames: self.weights.clone(),
            adapter_paths: AdapterPaths::None,
            gen_conf: Some(self.dir.join("generation_config.json")),
            preprocessor_config: None,
            processor_config: None,
            chat_template_json_filename: None,
        });
        let config = NormalSpecificConfig::default();
        let loader =
            NormalLoaderBuilder::new(config, None, None, Some(self.id.clone()), false, None)
                .build(None)
                .map_err(fail)?;
        let applied = adapter.map(Adapter::apply);
        let pipeline = loader
            .load_model_from_path(
                &paths,
                &ModelDType::F32,
                &Device::Cpu,
                true,
                DeviceMapSetting::dummy(),
                None,
                None,
            )
            .map_err(fail)?;
        if let Some(applied) = applied {
            applied.check_consumed()?;
        }
        let scheduler = SchedulerConfig::DefaultScheduler {
            method: DefaultSchedulerMethod::Fixed(std::num::NonZeroUsize::MIN),
        };
        // One sequence at a time is held by our leases: the scheduler's bound is not reliable.
        let engine = MistralRsBuilder::new(pipeline.clone(), scheduler, false, None)
            .with_no_kv_cache(false)
            .with_no_prefix_cache(true)
            .with_prefix_cache_n(0);
        Ok(Loaded { pipeline: Box::new(Handle(pipeline)), engine })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    trait Shape: Send + Sync {
        fn name(&self) -> &str;
    }
    struct Named(String, u8);
    struct Wide(String, [u64; 9]);
    impl Shape for Named {
        fn name(&self) -> &str {
            assert_eq!(usize::from(self.1), self.0.len());
            &self.0
        }
    }
    impl Shape for Wide {
        fn name(&self) -> &str {
            assert_eq!(self.1[0], 0);
            &self.0
        }
    }

    fn handle(value: impl Shape + 'static) -> (Arc<Mutex<dyn Shape>>, Box<dyn Pipeline>) {
        let shared: Arc<Mutex<dyn Shape>> = Arc::new(Mutex::new(value));
        (shared.clone(), Box::new(Handle(shared)))
    }

    #[test]
    fn exchanges_values_behind_a_trait_object() {
        let (a, first) = handle(Named("one".to_owned(), 3));
        let (b, second) = handle(Named("second".to_owned(), 6));
        first.exchange(second.as_ref()).unwrap();
        assert_eq!(a.blocking_lock().name(), "second");
        assert_eq!(b.blocking_lock().name(), "one");
        // Each value is still owned, and dropped, exactly once.
        drop((b, second));
        assert_eq!(a.blocking_lock().name(), "second");
        first.exchange(handle(Named("third".to_owned(), 5)).1.as_ref()).unwrap();
        assert_eq!(a.blocking_lock().name(), "third");
    }

    #[test]
    fn refuses_what_cannot_be_of_one_type() {
        let (a, first) = handle(Named("one".to_owned(), 3));
        let (b, second) = handle(Wide("wide".to_owned(), [0; 9]));
        assert!(first.exchange(second.as_ref()).is_err());
        assert_eq!((a.blocking_lock().name(), b.blocking_lock().name()), ("one", "wide"));
        let other: Box<dyn Pipeline> = Box::new(Handle(Arc::new(Mutex::new(5_u8))));
        assert!(first.exchange(other.as_ref()).is_err());
    }
}
