//! Mistakes of the user, which have an exit code of their own.

/// A mistake in the arguments, or in the configuration or data that they name. The binary ends with
/// exit code 2, and with 1 for every other error.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct UsageError(anyhow::Error);

/// Marks an error as a [`UsageError`].
pub fn usage(error: impl Into<anyhow::Error>) -> anyhow::Error {
    UsageError(error.into()).into()
}
