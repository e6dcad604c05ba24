//! Values that no log, error or printed configuration shows.

use std::fmt;

/// A secret from the environment. `Debug` hides the value, and there is neither `Display` nor
/// `Serialize`, so that no log or report can contain it by accident.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Wraps a value.
    pub fn new(value: impl Into<String>) -> Self {
        Self(value.into())
    }

    /// The value, for code that signs or authenticates with it.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[hidden]")
    }
}

/// Reads the secret in the environment variable `name` with `lookup`, so that only the
/// configuration's loader accesses the environment. `None` if `name` is empty: the secret is
/// optional.
///
/// # Errors
/// If the variable is not set or empty. The text is the `rest` of
/// [`Problem::new`](super::Problem::new).
pub fn from_environment(
    name: &str,
    lookup: impl Fn(&str) -> Option<String>,
) -> Result<Option<Secret>, String> {
    if name.is_empty() {
        return Ok(None);
    }
    match lookup(name) {
        Some(value) if !value.is_empty() => Ok(Some(Secret::new(value))),
        Some(_) => Err(format!(" is {name:?}: that environment variable is empty")),
        None => Err(format!(" is {name:?}: that environment variable is not set")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_output_hides_the_value() {
        let secret = Some(Secret::new("hunter2"));
        assert_eq!(format!("{secret:?}"), "Some([hidden])");
        assert_eq!(secret.as_ref().map(Secret::expose), Some("hunter2"));
    }

    #[test]
    fn an_unset_or_empty_variable_is_an_error_that_names_it() {
        let lookup = |name: &str| match name {
            "FULL" => Some("x".to_owned()),
            "EMPTY" => Some(String::new()),
            _ => None,
        };
        assert_eq!(from_environment("", lookup), Ok(None));
        assert_eq!(from_environment("FULL", lookup), Ok(Some(Secret::new("x"))));
        assert!(from_environment("EMPTY", lookup).unwrap_err().contains("empty"));
        assert!(from_environment("NONE", lookup).unwrap_err().contains("\"NONE\""));
    }
}
