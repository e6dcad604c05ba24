//! The formats of strings that can be enforced.

/// A supported `format`.
pub(super) enum StringFormat {
    /// The grammar library's own definition is used.
    Known,
    /// This pattern is used instead.
    Pattern(String),
}

/// Years 0001 to 9999, which the date types of common languages hold.
const YEAR: &str = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})";
/// The last two digits of a leap year, and the first two digits of a century with a leap year.
const FOURTH: &str = "(?:0[48]|[2468][048]|[13579][26])";
/// Times without leap seconds, which the time types of common languages refuse.
const TIME: &str = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])";

/// The names of all supported formats.
pub(super) const FORMATS: [&str; 10] =
    ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"];

/// The format of a name; `None` if it is not one of [`FORMATS`].
///
/// The grammar library accepts February 29 in every year, leap seconds and lower-case letters in times,
/// so these formats are replaced by stricter patterns.
pub(super) fn format(name: &str) -> Option<StringFormat> {
    match name {
        "date" => Some(StringFormat::Pattern(format!("^{}$", date()))),
        "time" => Some(StringFormat::Pattern(format!("^{TIME}$"))),
        "date-time" => Some(StringFormat::Pattern(format!("^{}T{TIME}$", date()))),
        other => FORMATS.contains(&other).then_some(StringFormat::Known),
    }
}

fn date() -> String {
    format!(
        "(?:{YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))|(?:[0-9]{{2}}{FOURTH}|{FOURTH}00)-02-29)"
    )
}

#[cfg(test)]
mod tests {
    use regex::Regex;

    use super::*;

    fn matches(name: &str, text: &str) -> bool {
        let Some(StringFormat::Pattern(pattern)) = format(name) else { panic!("{name}") };
        Regex::new(&pattern).unwrap().is_match(text)
    }

    #[test]
    fn dates_exist() {
        for date in ["2024-02-29", "2000-02-29", "0004-02-29", "1999-12-31", "0001-01-01"] {
            assert!(matches("date", date), "{date}");
        }
        for date in
            ["2023-02-29", "1900-02-29", "0000-02-29", "2023-04-31", "2023-13-01", "0000-01-01"]
        {
            assert!(!matches("date", date), "{date}");
        }
        // chrono's calendar agrees for every day of 401 years.
        for year in 1800..2201 {
            for (month, day) in [(2, 28), (2, 29), (2, 30), (6, 30), (6, 31)] {
                let exists = chrono::NaiveDate::from_ymd_opt(year, month, day).is_some();
                let text = format!("{year:04}-{month:02}-{day:02}");
                assert_eq!(matches("date", &text), exists, "{text}");
            }
        }
        assert!(matches("date-time", "2024-02-29T23:59:59.125Z"));
        assert!(matches("time", "00:00:00+01:30") && !matches("time", "23:59:60Z"));
        assert!(format("color").is_none() && FORMATS.iter().all(|name| format(name).is_some()));
    }
}
