//! Helpers for configuration sections: ranges, secrets, and errors that name the key.
//!
//! Each crate defines the section that configures it and checks its values with the functions here. The root
//! package joins the sections, and is the only place that reads the environment.

pub mod choice;
pub mod describe;
pub mod section;

use std::borrow::Borrow;
use std::fmt::{self, Display};
use std::io;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub use describe::Problem;

/// The reason why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{} cannot be read: {source}", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// A sentence with the key, its value and the allowed values.
    #[error("{0}")]
    Invalid(String),
}

// The arithmetic of products with the matrices of the frozen base.

/// The arithmetic of products with the matrices of a frozen base. Everything else, such as adapters,
/// attention and norms, is computed in f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Compute {
    /// In f32.
    #[default]
    F32,
    /// Both factors are rounded to bf16, and sums are in f32. Only some processors are faster with it; others
    /// compute in f32.
    Bf16,
}

impl Compute {
    /// All choices.
    pub const ALL: [Self; 2] = [Self::F32, Self::Bf16];

    /// The name in configurations and on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        }
    }
}

// Values that no log, error or printed configuration shows.

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
/// [`Problem::new`].
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

// Checks of configuration values. Each takes the key as the user writes it and returns `Ok(())` or
// a [`Problem`] that names the key, the value and the allowed values.

/// The result of a check.
pub type Checked = Result<(), Problem>;

/// Fails unless `holds`: the value of `key` must be `allowed`.
pub fn require(holds: bool, key: &str, value: impl Display, allowed: &str) -> Checked {
    if holds { Ok(()) } else { Err(Problem::value(key, value, allowed)) }
}

/// Checks `low <= value <= high`. NaN fails.
pub fn between<T: PartialOrd + Display>(key: &str, value: T, low: T, high: T) -> Checked {
    let allowed = format!("from {low} to {high}");
    require(value >= low && value <= high, key, value, &allowed)
}

/// Checks that `value` is finite and `>= low`.
pub fn at_least(key: &str, value: impl Borrow<f64>, low: f64) -> Checked {
    let value = *value.borrow();
    let allowed = format!("a finite number, {low} or more");
    require(value.is_finite() && value >= low, key, value, &allowed)
}

/// Checks that `value` is finite and `> low`.
pub fn above(key: &str, value: impl Borrow<f64>, low: f64) -> Checked {
    let value = *value.borrow();
    require(value.is_finite() && value > low, key, value, &format!("greater than {low}"))
}

/// Checks `low <= value < high`. NaN fails.
pub fn below<T: PartialOrd + Display>(key: &str, value: T, low: T, high: T) -> Checked {
    let allowed = format!("at least {low} and less than {high}");
    require(value >= low && value < high, key, value, &allowed)
}

/// Checks that `value` is neither NaN nor infinite.
pub fn finite(key: &str, value: impl Borrow<f64>) -> Checked {
    let value = *value.borrow();
    require(value.is_finite(), key, value, "a finite number")
}

/// Checks that the values of two keys are finite and `low <= high`.
pub fn ordered(keys: [&str; 2], low: f64, high: f64) -> Checked {
    finite(keys[0], low)?;
    finite(keys[1], high)?;
    require(low <= high, keys[0], low, &format!("at most {} ({high})", keys[1]))
}

/// Checks that `list` has 1 to `most` texts and no blank one.
pub fn texts(key: &str, list: &[String], most: usize) -> Checked {
    for (i, text) in list.iter().enumerate() {
        let is_text = !text.trim().is_empty();
        require(is_text, &format!("{key}[{i}]"), quoted(text), "a text that is not blank")?;
    }
    let (fits, shown) = ((1..=most).contains(&list.len()), format!("a list of {}", list.len()));
    require(fits, key, shown, &format!("a list of 1 to {most} texts"))
}

/// `text` in quotation marks, as errors show text values.
pub fn quoted(text: &str) -> String {
    format!("{text:?}")
}

/// Checks that `name` is 1 to 64 ASCII letters, digits, `_`, `-` or `.`, because the names of
/// routes and reward parts become metric labels.
pub fn label(key: &str, name: &str) -> Checked {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"_-.".contains(&b);
    let fits = (1..=64).contains(&name.len()) && name.bytes().all(plain);
    require(fits, key, quoted(name), "1 to 64 letters, digits, '_', '-' or '.'")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_configuration() {
        for compute in Compute::ALL {
            let json = serde_json::to_string(&compute).unwrap();
            assert_eq!(json, format!("{:?}", compute.as_str()));
        }
    }

    mod secret {
        use super::super::*;

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
}
