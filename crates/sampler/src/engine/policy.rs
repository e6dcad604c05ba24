//! The weights of a policy version.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use hone_core::types::PolicyVersion;

use crate::kv_cache::WeightsId;
use crate::weights::AdapterWeights;

/// The weights of one policy version. The default is the base model as version 0.
#[derive(Clone, Default)]
pub(crate) struct PolicyWeights {
    pub version: PolicyVersion,
    /// `None` is the base model.
    pub adapter: Option<Arc<AdapterWeights>>,
    /// Differs between all adapters that this process has read, also between those of one version. A
    /// version that fails a check can be replaced by another one with its number.
    pub id: WeightsId,
}

impl PolicyWeights {
    pub fn new(version: PolicyVersion, adapter: Option<AdapterWeights>) -> Self {
        static ADAPTERS: AtomicU64 = AtomicU64::new(0);
        let id = match adapter {
            None => WeightsId::default(),
            Some(_) => WeightsId(1 + ADAPTERS.fetch_add(1, Ordering::Relaxed)),
        };
        Self { version, adapter: adapter.map(Arc::new), id }
    }
}
