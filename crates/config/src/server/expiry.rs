//! The time from which on a key is refused.

use std::fmt;

use chrono::{DateTime, NaiveDate, NaiveTime, SecondsFormat, Utc};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use hone_core::types::UnixMillis;

/// The form of an expiry in a configuration.
const FORM: &str = "it must be a date such as 2027-01-31, which is its midnight in UTC, or a time \
                    with an offset such as 2027-01-31T12:00:00Z";

/// The time from which on a key is refused. A configuration has it as a date or time of TOML or as a text,
/// in RFC 3339's form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct KeyExpiry(DateTime<Utc>);

impl KeyExpiry {
    /// Parses a date, which is its midnight in UTC, or a time with an offset; `None` for another form.
    pub fn parse(text: &str) -> Option<Self> {
        let date = || text.parse::<NaiveDate>().ok();
        let midnight = || Some(date()?.and_time(NaiveTime::MIN).and_utc());
        let time = DateTime::parse_from_rfc3339(text).ok().map(|time| time.with_timezone(&Utc));
        time.or_else(midnight).map(Self)
    }

    /// Whether the time has come.
    pub fn has_passed(self, now: UnixMillis) -> bool {
        // A time before 1970 has passed too.
        u64::try_from(self.0.timestamp_millis()).unwrap_or(0) <= now
    }
}

impl fmt::Display for KeyExpiry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.to_rfc3339_opts(SecondsFormat::Secs, true))
    }
}

impl Serialize for KeyExpiry {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for KeyExpiry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // A date of TOML arrives as its text.
        let text = String::deserialize(deserializer)?;
        Self::parse(&text).ok_or_else(|| D::Error::custom(FORM))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_and_times_are_read_and_others_refused() {
        let shown = |text| KeyExpiry::parse(text).map(|expiry| expiry.to_string());
        assert_eq!(shown("2027-01-31").as_deref(), Some("2027-01-31T00:00:00Z"));
        assert_eq!(shown("2027-01-31T12:00:00+02:00").as_deref(), Some("2027-01-31T10:00:00Z"));
        for wrong in ["", "2027-02-30", "2027-01-31T12:00:00", "tomorrow", "1700000000"] {
            assert_eq!(shown(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_key_is_refused_from_its_expiry_on() {
        let expiry = KeyExpiry::parse("1970-01-01T00:00:01Z").unwrap();
        assert!(!expiry.has_passed(999) && expiry.has_passed(1000));
        assert!(KeyExpiry::parse("1969-01-01").unwrap().has_passed(0));
    }
}
