//! Ranges of numbers; an error names the key, the value and what is allowed.

use std::fmt::Display;

use super::describe::Problem;

/// What a check answers.
pub type Checked = Result<(), Problem>;

/// `low <= value <= high`; false for NaN.
pub fn between<T: PartialOrd + Display>(key: &str, value: T, low: T, high: T) -> Checked {
    if value >= low && value <= high {
        return Ok(());
    }
    Err(Problem::value(key, &value, &format!("from {low} to {high}")))
}

/// `value >= low` and finite.
pub fn at_least(key: &str, value: f64, low: f64) -> Checked {
    if value.is_finite() && value >= low {
        return Ok(());
    }
    Err(Problem::value(key, value, &format!("a finite number, {low} or more")))
}

/// `value > low` and finite.
pub fn above(key: &str, value: f64, low: f64) -> Checked {
    if value.is_finite() && value > low {
        return Ok(());
    }
    Err(Problem::value(key, value, &format!("greater than {low}")))
}

/// `low <= value < high`.
pub fn below<T: PartialOrd + Display>(key: &str, value: T, low: T, high: T) -> Checked {
    if value >= low && value < high {
        return Ok(());
    }
    Err(Problem::value(key, &value, &format!("at least {low} and less than {high}")))
}

/// Neither NaN nor infinite.
pub fn finite(key: &str, value: f64) -> Checked {
    if value.is_finite() { Ok(()) } else { Err(Problem::value(key, value, "a finite number")) }
}

/// `low <= high`, both finite.
pub fn ordered(keys: [&str; 2], low: f64, high: f64) -> Checked {
    finite(keys[0], low)?;
    finite(keys[1], high)?;
    if low <= high {
        return Ok(());
    }
    Err(Problem::value(keys[0], low, &format!("at most {} ({high})", keys[1])))
}

/// A list of `1..=most` texts, none of them blank.
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

/// `text` in quotation marks, as an error shows a value.
pub fn quoted(text: &str) -> String {
    format!("{text:?}")
}

/// Names of routes and parts are metric labels.
///
/// # Errors
/// If `name` is not 1 to 64 letters, digits, `_`, `-` or `.`.
pub fn label(key: &str, name: &str) -> Checked {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"_-.".contains(&b);
    if (1..=64).contains(&name.len()) && name.bytes().all(plain) {
        return Ok(());
    }
    Err(Problem::value(key, quoted(name), "1 to 64 letters, digits, '_', '-' or '.'"))
}
