//! Delays between attempts.

use std::time::{Duration, SystemTime};

use chrono::DateTime;

use super::limits::CallLimits;

/// The delay before retry `n` (from 0): with `d = min(max_backoff, backoff x 2^n)`, a value between
/// `d / 2` and `d`, chosen by `unit` in 0..1. Callers that failed together so retry at different
/// times ("equal jitter", AWS Architecture Blog).
pub(super) fn backoff(limits: &CallLimits, n: u32, unit: f64) -> Duration {
    let doubled = limits.backoff.saturating_mul(2_u32.saturating_pow(n));
    doubled.min(limits.max_backoff).mul_f64(0.5 + 0.5 * unit.clamp(0.0, 1.0))
}

/// Parses `Retry-After` (RFC 9110, 10.2.3): seconds, or a date, which may be in the past.
pub(super) fn retry_after(value: &str, now: SystemTime) -> Option<Duration> {
    let value = value.trim();
    if let Ok(seconds) = value.parse::<u64>() {
        return Some(Duration::from_secs(seconds));
    }
    let date = SystemTime::from(DateTime::parse_from_rfc2822(value).ok()?);
    Some(date.duration_since(now).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::webhook::WebhookParams;

    #[test]
    fn delays_double_up_to_the_maximum() {
        let limits = WebhookParams::new("https://a.example/").limits();
        let at = |n, unit| backoff(&limits, n, unit).as_millis();
        assert_eq!([at(0, 1.0), at(1, 1.0), at(2, 1.0), at(10, 1.0)], [200, 400, 800, 10_000]);
        assert_eq!([at(0, 0.0), at(10, 0.0)], [100, 5_000]);
    }

    #[test]
    fn parses_seconds_and_dates() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(784_111_777); // RFC 9110's example
        let read = |text| retry_after(text, now).map(|d| d.as_secs());
        assert_eq!(read("120"), Some(120));
        assert_eq!(read("Sun, 06 Nov 1994 08:49:47 GMT"), Some(10));
        assert_eq!(read("Sun, 06 Nov 1994 08:00:00 GMT"), Some(0));
        assert_eq!(read("-1"), None);
        assert_eq!(read("soon"), None);
    }

    proptest! {
        #[test]
        fn a_delay_stays_within_its_bounds(n in 0_u32..100, unit in 0.0_f64..1.0) {
            let limits = WebhookParams::new("https://a.example/").limits();
            let wait = backoff(&limits, n, unit);
            prop_assert!(wait >= limits.backoff / 2 && wait <= limits.max_backoff);
        }
    }
}
