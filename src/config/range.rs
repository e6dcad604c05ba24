//! Ranges of numbers; an error names the key, the value and what is allowed.

use std::fmt::Display;

use super::describe::Problem;

/// What a check answers.
pub(super) type Checked = Result<(), Problem>;

/// `low <= value <= high`; false for NaN.
pub(super) fn between<T: PartialOrd + Display>(key: &str, value: T, low: T, high: T) -> Checked {
    if value >= low && value <= high {
        return Ok(());
    }
    Err(Problem::value(key, &value, &format!("from {low} to {high}")))
}

/// `value >= low` and finite.
pub(super) fn at_least(key: &str, value: f64, low: f64) -> Checked {
    if value.is_finite() && value >= low {
        return Ok(());
    }
    Err(Problem::value(key, value, &format!("a finite number, {low} or more")))
}

/// `value > low` and finite.
pub(super) fn above(key: &str, value: f64, low: f64) -> Checked {
    if value.is_finite() && value > low {
        return Ok(());
    }
    Err(Problem::value(key, value, &format!("greater than {low}")))
}

/// `low <= value < high`.
pub(super) fn below<T: PartialOrd + Display>(key: &str, value: T, low: T, high: T) -> Checked {
    if value >= low && value < high {
        return Ok(());
    }
    Err(Problem::value(key, &value, &format!("at least {low} and less than {high}")))
}

/// Neither NaN nor infinite.
pub(super) fn finite(key: &str, value: f64) -> Checked {
    if value.is_finite() { Ok(()) } else { Err(Problem::value(key, value, "a finite number")) }
}

/// `low <= high`, both finite.
pub(super) fn ordered(keys: [&str; 2], low: f64, high: f64) -> Checked {
    finite(keys[0], low)?;
    finite(keys[1], high)?;
    if low <= high {
        return Ok(());
    }
    Err(Problem::value(keys[0], low, &format!("at most {} ({high})", keys[1])))
}

/// A list of `1..=most` texts, none of them blank.
pub(super) fn texts(key: &str, list: &[String], most: usize) -> Checked {
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
