//! Errors at the start of rollout.

use hone_dataset::DatasetError;
use hone_reward::RewardError;
use hone_store::StoreError;

/// Why rollout cannot start.
#[derive(Debug, thiserror::Error)]
pub enum RolloutError {
    /// The dataset cannot be used.
    #[error("dataset.path: {0}")]
    Dataset(#[from] DatasetError),
    /// The dataset's route does not exist.
    #[error(transparent)]
    Route(#[from] RewardError),
    /// The dataset's route has no grader.
    #[error(
        "{key} = `{route}` has no reward that can score a completion; \
         clients give no feedback on dataset prompts"
    )]
    UnscoredRoute {
        /// The configuration key that names the route.
        key: &'static str,
        /// The route's name.
        route: String,
    },
    /// The ledger cannot be read.
    #[error(transparent)]
    Store(#[from] StoreError),
}
