//! A rating as evidence.

use hone_core::types::{PolicyVersion, SampleId, UnixMillis};

/// A client's rating of one version's completion.
#[derive(Clone, Debug)]
pub struct VersionRating {
    /// The version that generated the completion.
    pub version: PolicyVersion,
    /// The completion. Its first rating counts: several parts are rarely independent opinions.
    pub sample: SampleId,
    /// When the completion ended. A canary compares completions from its beginning on.
    pub sampled: UnixMillis,
    /// The route. Ratings are compared within a route and part.
    pub route: String,
    /// The reward part.
    pub part: String,
    /// The rating from 0, the worst value of the part's range, to 1, the best.
    pub value: f64,
    /// The id of the API key that rated, whatever end user it named; `None` without a key.
    pub key: Option<String>,
    /// Largest share of the evidence that one key may contribute (`max_key_share` of the part).
    pub max_key_share: f64,
    /// Number of API keys that may rate.
    pub keys: usize,
}
