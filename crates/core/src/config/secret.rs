//! A value that no log, error or printed configuration shows.

use std::fmt;

/// A secret that the loader took from the environment. `Debug` hides it, and it has neither
/// `Display` nor `Serialize`, so that it cannot be printed by accident.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Wraps a value.
    pub fn new(value: impl Into<String>) -> Self {
        Self(value.into())
    }

    /// The value itself, for the one place that signs or authenticates with it.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[hidden]")
    }
}

/// Looks a secret up by the name of its variable; `None` where no variable is named.
///
/// # Errors
/// The rest of a sentence that begins with the key.
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
    fn a_secret_does_not_show_itself() {
        let secret = Some(Secret::new("hunter2"));
        assert_eq!(format!("{secret:?}"), "Some([hidden])");
        assert_eq!(secret.as_ref().map(Secret::expose), Some("hunter2"));
    }

    #[test]
    fn the_environment_names_what_it_lacks() {
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
