//! Checks of configuration values. Each takes the key as the user writes it and returns `Ok(())` or
//! a [`Problem`] that names the key, the value and the allowed values.

use std::fmt::Display;

use super::describe::Problem;

/// The result of a check.
pub type Checked = Result<(), Problem>;

/// Checks `low <= value <= high`. NaN fails.
pub fn between<T: PartialOrd + Display>(key: &str, value: T, low: T, high: T) -> Checked {
    if value >= low && value <= high {
        return Ok(());
    }
    Err(Problem::value(key, &value, &format!("from {low} to {high}")))
}

/// Checks that `value` is finite and `>= low`.
pub fn at_least(key: &str, value: f64, low: f64) -> Checked {
    if value.is_finite() && value >= low {
        return Ok(());
    }
    Err(Problem::value(key, value, &format!("a finite number, {low} or more")))
}

/// Checks that `value` is finite and `> low`.
pub fn above(key: &str, value: f64, low: f64) -> Checked {
    if value.is_finite() && value > low {
        return Ok(());
    }
    Err(Problem::value(key, value, &format!("greater than {low}")))
}

/// Checks `low <= value < high`. NaN fails.
pub fn below<T: PartialOrd + Display>(key: &str, value: T, low: T, high: T) -> Checked {
    if value >= low && value < high {
        return Ok(());
    }
    Err(Problem::value(key, &value, &format!("at least {low} and less than {high}")))
}

/// Checks that `value` is neither NaN nor infinite.
pub fn finite(key: &str, value: f64) -> Checked {
    if value.is_finite() { Ok(()) } else { Err(Problem::value(key, value, "a finite number")) }
}

/// Checks that the values of two keys are finite and `low <= high`.
pub fn ordered(keys: [&str; 2], low: f64, high: f64) -> Checked {
    finite(keys[0], low)?;
    finite(keys[1], high)?;
    if low <= high {
        return Ok(());
    }
    Err(Problem::value(keys[0], low, &format!("at most {} ({high})", keys[1])))
}

/// Checks that `list` has 1 to `most` texts and no blank one.
pub fn texts(key: &str, list: &[String], most: usize) -> Checked {
    if let Some(i) = list.iter().position(|text| text.trim().is_empty()) {
        return Err(Problem::value(
            &format!("{key}[{i}]"),
            format!("{:?}", list[i]),
            "a text that is not blank",
        ));
    }
    if (1..=most).contains(&list.len()) {
        return Ok(());
    }
    let shown = format!("a list of {}", list.len());
    Err(Problem::value(key, shown, &format!("a list of 1 to {most} texts")))
}

/// `text` in quotation marks, as errors show text values.
pub fn quoted(text: &str) -> String {
    format!("{text:?}")
}

/// Checks that `name` is 1 to 64 ASCII letters, digits, `_`, `-` or `.`, because the names of
/// routes and reward parts become metric labels.
pub fn label(key: &str, name: &str) -> Checked {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"_-.".contains(&b);
    if (1..=64).contains(&name.len()) && name.bytes().all(plain) {
        return Ok(());
    }
    Err(Problem::value(key, quoted(name), "1 to 64 letters, digits, '_', '-' or '.'"))
}
