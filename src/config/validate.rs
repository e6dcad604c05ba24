//! STUB.
/// One sentence with the key, the value and what is allowed.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ConfigError(pub String);
