//! When the trainer may take steps.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use hone_core::types::UnixMillis;

/// Milliseconds of a minute and of a day.
const MINUTE: UnixMillis = 60_000;
const DAY: UnixMillis = 24 * 60 * MINUTE;

/// When the trainer may take steps (`train.when`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum TrainWhen {
    /// At any time.
    #[default]
    Always,
    /// While no client's request runs or waits.
    Idle,
    /// In these daily windows.
    Daily(Vec<DailyWindow>),
}

/// A daily window in UTC, such as `22:00-06:30`. The end is not part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DailyWindow {
    /// Minutes after midnight.
    start: u64,
    end: u64,
}

impl DailyWindow {
    fn contains(self, minute: u64) -> bool {
        if self.start < self.end {
            (self.start..self.end).contains(&minute)
        } else {
            // Over midnight.
            minute >= self.start || minute < self.end
        }
    }
}

impl FromStr for DailyWindow {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let allowed = "a window such as \"22:00-06:30\" (UTC)";
        let minutes = |clock: &str| {
            let (hour, minute) = clock.trim().split_once(':')?;
            let two_digits = |text: &str| {
                let digits = text.len() == 2 && text.bytes().all(|b| b.is_ascii_digit());
                digits.then(|| text.parse::<u64>().ok())?
            };
            let (hour, minute) = (two_digits(hour)?, two_digits(minute)?);
            (hour < 24 && minute < 60).then_some(60 * hour + minute)
        };
        let (start, end) = text.split_once('-').ok_or(allowed)?;
        let window =
            Self { start: minutes(start).ok_or(allowed)?, end: minutes(end).ok_or(allowed)? };
        if window.start == window.end {
            return Err("a window whose start and end differ".to_owned());
        }
        Ok(window)
    }
}

impl fmt::Display for DailyWindow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (start, end) = (self.start, self.end);
        write!(f, "{:02}:{:02}-{:02}:{:02}", start / 60, start % 60, end / 60, end % 60)
    }
}

impl TrainWhen {
    /// Why no step may be taken now; `None` if one may. `is_idle` is only called if it matters.
    pub(crate) fn closed(&self, now: UnixMillis, is_idle: impl FnOnce() -> bool) -> Option<String> {
        match self {
            Self::Always => None,
            Self::Idle => {
                (!is_idle()).then(|| "train.when is \"idle\" and clients are served".to_owned())
            }
            Self::Daily(windows) => {
                let minute = now % DAY / MINUTE;
                let open = windows.iter().any(|window| window.contains(minute));
                (!open).then(|| format!("it is outside train.when ({self})"))
            }
        }
    }
}

/// The number of the day in UTC.
pub(crate) fn day(now: UnixMillis) -> u64 {
    now / DAY
}

impl fmt::Display for TrainWhen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Always => f.write_str("always"),
            Self::Idle => f.write_str("idle"),
            Self::Daily(windows) => {
                let texts: Vec<String> = windows.iter().map(ToString::to_string).collect();
                f.write_str(&texts.join(", "))
            }
        }
    }
}

impl FromStr for TrainWhen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "always" => Ok(Self::Always),
            "idle" => Ok(Self::Idle),
            _ => {
                let windows = text.split(',').map(|window| window.trim().parse());
                let windows: Result<_, String> = windows.collect();
                windows.map(Self::Daily).map_err(|allowed| {
                    format!("{text:?}: it must be \"always\", \"idle\", or {allowed}, several separated by commas")
                })
            }
        }
    }
}

impl Serialize for TrainWhen {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for TrainWhen {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(hour: u64, minute: u64) -> UnixMillis {
        20_000 * DAY + (60 * hour + minute) * MINUTE
    }

    fn open(when: &str, hour: u64, minute: u64) -> bool {
        when.parse::<TrainWhen>().unwrap().closed(at(hour, minute), || false).is_none()
    }

    #[test]
    fn windows_may_cross_midnight() {
        let night = "22:00-06:30";
        assert!(open(night, 22, 0) && open(night, 23, 59) && open(night, 0, 0));
        assert!(open(night, 6, 29) && !open(night, 6, 30) && !open(night, 21, 59));
        let two = "12:00-13:00, 22:00-06:30";
        assert!(open(two, 12, 30) && open(two, 3, 0) && !open(two, 13, 0));
        assert!(open("always", 12, 0));
        assert_eq!(day(at(23, 59)) + 1, day(at(23, 59) + MINUTE));
    }

    #[test]
    fn idle_depends_on_clients() {
        let idle: TrainWhen = "idle".parse().unwrap();
        assert_eq!(idle.closed(0, || true), None);
        assert!(idle.closed(0, || false).unwrap().contains("train.when"));
    }

    #[test]
    fn texts_are_read_written_and_refused() {
        for text in ["always", "idle", "22:00-06:30", "12:00-13:00, 22:00-06:30"] {
            assert_eq!(text.parse::<TrainWhen>().unwrap().to_string(), text);
        }
        for text in ["", "never", "22-6", "24:00-01:00", "01:60-02:00", "1:00-2:00", "03:00-03:00"]
        {
            let error = text.parse::<TrainWhen>().unwrap_err();
            assert!(error.contains("it must be"), "{error}");
        }
    }
}
