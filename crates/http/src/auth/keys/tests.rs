use axum::http::StatusCode;
use axum::response::IntoResponse;

use super::*;
use crate::config::{hash_key, parse as config};

const ONE: &str = "[[server.keys]]\nname = 'web'\nkey = 'sesame'\nscopes = ['chat']";

#[test]
fn keys_are_found_by_their_hash() {
    let text = format!("[server]\nclient_keys = ['alice', 'bob']\nadmin_keys = ['root']\n{ONE}");
    let keys = KeyRing::load(&config(&text)).unwrap().current();
    let name = |key: &str| keys.find(&hash_key(key)).map(|key| key.entry.name.as_str());
    assert_eq!(name("alice"), Some("client_keys[0]"));
    assert_eq!(name("bob"), Some("client_keys[1]"));
    assert_eq!(name("root"), Some("admin_keys[0]"));
    assert_eq!(name("sesame"), Some("web"));
    for unknown in ["", "alic", "alicee", "web"] {
        assert_eq!(name(unknown), None, "{unknown}");
    }
    assert_eq!(keys.find(&hash_key("alice")).unwrap().id, "2bd806c97f0e");
    assert!(KeySet::default().find(&hash_key("alice")).is_none());
}

#[test]
fn a_reload_replaces_all_keys_or_none() {
    let ring = KeyRing::load(&config(ONE)).unwrap();
    let has = |key: &str| ring.current().find(&hash_key(key)).is_some();
    let before = ring.current();
    assert_eq!(ring.reload(&config(&ONE.replace("sesame", "open"))).unwrap(), 1);
    assert!(has("open") && !has("sesame") && before.find(&hash_key("sesame")).is_some());
    let missing = config("[server]\nkeys_file = 'no-such-file.toml'");
    let error = ring.reload(&missing).unwrap_err().to_string();
    assert!(error.contains("no-such-file.toml"), "{error}");
    let error = ring.reload(&config("")).unwrap_err().to_string();
    assert!(error.contains("/v1"), "{error}");
    assert!(has("open"));
}

#[test]
fn a_reload_keeps_what_a_key_has_used_of_the_same_limits() {
    let limited = |requests: u32| config(&format!("{ONE}\nrequests_per_minute = {requests}"));
    let ring = KeyRing::load(&limited(1)).unwrap();
    let now = Instant::now();
    let asks = || {
        let key = Arc::clone(ring.current().find(&hash_key("sesame")).unwrap());
        key.limiter.count_request(now).is_ok()
    };
    assert!(asks() && !asks());
    ring.reload(&limited(1)).unwrap();
    assert!(!asks());
    ring.reload(&limited(2)).unwrap();
    assert!(asks() && asks() && !asks());
}

#[test]
fn addresses_beyond_loopback_require_keys() {
    let bound = |bind: &str, more: &str| {
        let text = format!("[server]\nbind = '{bind}'\n{more}");
        KeyRing::load(&config(&text)).map_err(|error| error.to_string())
    };
    for bind in ["127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "[::ffff:127.0.0.1]:1"] {
        assert!(bound(bind, "").is_ok(), "{bind}");
    }
    for bind in ["0.0.0.0:1", "[::]:1", "192.0.2.7:1"] {
        let error = bound(bind, "admin_keys = ['root']").err().unwrap();
        assert!(error.contains(bind) && error.contains("--insecure"), "{error}");
        assert!(bound(bind, "client_keys = ['alice']").is_ok());
        assert!(bound(bind, ONE).is_ok());
        let ring = bound(bind, "insecure = true").unwrap();
        assert!(ring.reload(&config("")).is_ok());
        // A reload must not open a server that others can reach.
        let ring = bound(bind, ONE).unwrap();
        assert!(ring.reload(&config("")).is_err());
        assert!(ring.current().has_scope(&KeyScope::CLIENT));
    }
}

fn limiter(requests: u32, tokens: u32, concurrency: u32) -> Arc<KeyLimiter> {
    let limits =
        KeyLimits { requests_per_minute: requests, tokens_per_minute: tokens, concurrency };
    KeyLimiter::new("web", limits)
}

fn begin(limiter: &Arc<KeyLimiter>, tokens: u64, now: Instant) -> Result<KeyPermit, ApiError> {
    limiter.enter()?.begin(tokens, now)
}

/// The seconds after which a refused request may be sent again.
fn retry<T>(result: Result<T, ApiError>) -> Option<String> {
    let response = result.err()?.into_response();
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    Some(response.headers()["retry-after"].to_str().unwrap().to_owned())
}

fn headers(limiter: &KeyLimiter, now: Instant) -> Vec<String> {
    let mut headers = HeaderMap::new();
    limiter.add_headers(&mut headers, now);
    let line = |(name, value): (&HeaderName, &HeaderValue)| {
        format!("{}={}", name.as_str().trim_start_matches("x-ratelimit-"), value.to_str().unwrap())
    };
    let mut lines: Vec<String> = headers.iter().map(line).collect();
    lines.sort();
    lines
}

#[test]
fn requests_are_limited_to_the_rate() {
    let (limiter, start) = (limiter(3, 0, 0), Instant::now());
    for _ in 0..3 {
        assert_eq!(retry(limiter.count_request(start)), None);
    }
    assert_eq!(retry(limiter.count_request(start)).as_deref(), Some("20"));
    let later = start + Duration::from_secs(30);
    assert_eq!(retry(limiter.count_request(later)), None);
    assert_eq!(retry(limiter.count_request(later)).as_deref(), Some("10"));
    // A time before the last one, as of another thread, changes nothing.
    assert_eq!(retry(limiter.count_request(start)).as_deref(), Some("10"));
    assert_eq!(retry(limiter.count_request(later)).as_deref(), Some("10"));
    let rested = later + Duration::from_secs(3600);
    assert_eq!((0..9).filter(|_| limiter.count_request(rested).is_ok()).count(), 3);
}

#[test]
fn tokens_are_reserved_and_settled() {
    let (limiter, start) = (limiter(0, 600, 0), Instant::now());
    let mut first = begin(&limiter, 400, start).unwrap();
    assert_eq!(retry(begin(&limiter, 300, start)).as_deref(), Some("10"));
    first.used = 100;
    drop(first);
    let mut second = begin(&limiter, 500, start).unwrap();
    // It takes more than it reserved, so the bucket is in debt.
    second.used = 700;
    drop(second);
    assert_eq!(
        headers(&limiter, start),
        ["limit-tokens=600", "remaining-tokens=0", "reset-tokens=1m20s"]
    );
    assert_eq!(retry(begin(&limiter, 1, start)).as_deref(), Some("21"));
    // A request larger than the bucket waits until it is full.
    let rested = start + Duration::from_secs(80);
    let huge = begin(&limiter, 1_000_000, rested).unwrap();
    drop(huge);
    assert_eq!(headers(&limiter, rested)[1], "remaining-tokens=600");
}

#[test]
fn completions_at_once_are_limited() {
    let (limiter, now) = (limiter(0, 0, 2), Instant::now());
    let first = begin(&limiter, 10, now).unwrap();
    let _second = begin(&limiter, 10, now).unwrap();
    assert_eq!(retry(begin(&limiter, 10, now)).as_deref(), Some("1"));
    drop(first);
    assert!(begin(&limiter, 10, now).is_ok());
    assert!(headers(&limiter, now).is_empty());
}

#[test]
fn without_limits_nothing_is_refused() {
    let (limiter, now) = (limiter(0, 0, 0), Instant::now());
    let permits: Vec<_> = (0..100).map(|_| begin(&limiter, u64::MAX, now).unwrap()).collect();
    assert!((0..100).all(|_| limiter.count_request(now).is_ok()));
    drop(permits);
    assert!(headers(&limiter, now).is_empty());
}

#[test]
fn moments_have_anthropics_form() {
    let now = DateTime::from_timestamp_millis(1_700_000_000_250).unwrap();
    for (ms, text) in [(0, "2023-11-14T22:13:21Z"), (59_751, "2023-11-14T22:14:21Z")] {
        assert_eq!(moment_after(now, Duration::from_millis(ms)), text);
    }
    assert_eq!(moment_after(now, Duration::MAX), "2023-11-14T22:13:21Z");
    let mut headers = HeaderMap::new();
    limiter(2, 0, 0).add_anthropic_headers(&mut headers, Instant::now());
    assert_eq!(headers["anthropic-ratelimit-requests-limit"], "2");
    assert_eq!(headers["anthropic-ratelimit-requests-remaining"], "2");
    assert_eq!(headers.len(), 3);
}

#[test]
fn durations_have_openais_form() {
    for (ms, text) in [(0, "0s"), (20, "20ms"), (999, "999ms"), (1000, "1s"), (1001, "2s")] {
        assert_eq!(shown(Duration::from_millis(ms)), text);
    }
    assert_eq!(shown(Duration::from_secs(360)), "6m0s");
}
