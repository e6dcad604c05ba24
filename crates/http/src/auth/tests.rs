use axum::body::Body;

use super::*;
use crate::config::parse as config;

const LOCAL: &str = "127.0.0.1";
const REMOTE: &str = "192.0.2.7";

fn authenticator(text: &str) -> Authenticator {
    let config = crate::config::parse(text);
    let ring = Arc::new(KeyRing::load(&config).unwrap());
    Authenticator::new(&config, ring)
}

fn plain(client: &str, admin: &str) -> Authenticator {
    authenticator(&format!("[server]\nclient_keys = [{client}]\nadmin_keys = [{admin}]"))
}

fn request(path: &str, more: &[(&str, &str)], version: Version, peer: Option<&str>) -> Request {
    let named = Request::builder().uri(path).version(version);
    let named = more.iter().fold(named, |all, (name, value)| all.header(*name, *value));
    let mut request = named.body(Body::empty()).unwrap();
    if let Some(peer) = peer {
        let peer = SocketAddr::new(peer.parse().unwrap(), 1);
        request.extensions_mut().insert(ConnectInfo(peer));
    }
    request
}

/// The result of a request at 1 s after the epoch.
fn ask(
    authenticator: &Authenticator,
    path: &str,
    more: &[(&str, &str)],
    peer: &str,
) -> Result<Option<String>, StatusCode> {
    let request = request(path, more, Version::HTTP_11, Some(peer));
    let status = |error: ApiError| error.into_response().status();
    authenticator
        .check(&access(path, request.method()), &request, 1000)
        .map(|c| c.key_id)
        .map_err(status)
}

fn with_key(
    authenticator: &Authenticator,
    path: &str,
    key: &str,
) -> Result<Option<String>, StatusCode> {
    ask(authenticator, path, &[("authorization", &format!("Bearer {key}"))], REMOTE)
}

#[test]
fn without_keys_v1_is_open_and_admin_is_local() {
    let open = plain("", "");
    assert_eq!(ask(&open, "/v1/models", &[], REMOTE), Ok(None));
    assert_eq!(with_key(&open, "/v1/models", "any"), Ok(None));
    for peer in [LOCAL, "::1", "::ffff:127.0.0.1"] {
        assert_eq!(ask(&open, "/admin/train", &[], peer), Ok(None), "{peer}");
    }
    assert_eq!(ask(&open, "/admin/train", &[], REMOTE), Err(StatusCode::FORBIDDEN));
    assert_eq!(with_key(&open, "/admin/train", "x"), Err(StatusCode::FORBIDDEN));
}

#[test]
fn client_and_admin_keys_are_separate() {
    let both = plain("'alice', 'bob'", "'root'");
    let id = |who| with_key(&both, "/v1/feedback", who).unwrap().unwrap();
    assert_eq!(id("alice"), "2bd806c97f0e");
    assert_ne!(id("alice"), id("bob"));
    assert_eq!(
        ask(&both, "/v1/models", &[("x-api-key", "alice")], REMOTE).unwrap().unwrap(),
        id("alice")
    );
    assert_eq!(ask(&both, "/v1/feedback", &[], LOCAL), Err(StatusCode::UNAUTHORIZED));
    for key in ["alic", "alicee", ""] {
        assert_eq!(with_key(&both, "/v1/feedback", key), Err(StatusCode::UNAUTHORIZED));
    }
    assert_eq!(with_key(&both, "/v1/feedback", "root"), Err(StatusCode::FORBIDDEN));
    assert!(with_key(&both, "/admin/policies", "root").is_ok());
    assert_eq!(with_key(&both, "/admin/policies", "alice"), Err(StatusCode::FORBIDDEN));
    assert_eq!(ask(&both, "/admin/policies", &[], LOCAL), Err(StatusCode::UNAUTHORIZED));
}

#[test]
fn a_key_opens_the_routes_of_its_scopes() {
    let key = |name: &str, scopes: &str| {
        format!("[[server.keys]]\nname = '{name}'\nkey = '{name}'\nscopes = {scopes}\n")
    };
    let text = [
        key("asks", "['chat']"),
        key("rates", "['feedback']"),
        key("grades", "['graders']"),
        key("reads", "['read']"),
        key("operates", "['admin']"),
        key("both", "['chat', 'admin']"),
    ];
    let keys = authenticator(&text.concat());
    let all = ["asks", "rates", "grades", "reads", "operates", "both"];
    for (path, allowed) in [
        ("/v1/chat/completions", &["asks", "both"][..]),
        ("/v1/models", &["asks", "both"]),
        ("/v1/feedback", &["asks", "rates", "both"]),
        ("/v1/fine_tuning/alpha/graders/run", &["grades"]),
        ("/v1/fine_tuning", &["grades"]),
        ("/admin/train", &["reads", "operates", "both"]),
        ("/nowhere", &all),
        ("/adminx", &all),
        ("/", &all),
    ] {
        for name in all {
            let found = with_key(&keys, path, name).map(|_| ());
            let expected =
                if allowed.contains(&name) { Ok(()) } else { Err(StatusCode::FORBIDDEN) };
            assert_eq!(found, expected, "{name} {path}");
        }
    }
}

#[test]
fn expired_keys_are_refused() {
    let key = |expires: &str| {
        authenticator(&format!(
            "[[server.keys]]\nname = 'a'\nkey = 'a'\nscopes = ['chat']\nexpires = {expires}"
        ))
    };
    assert!(with_key(&key("2999-01-01"), "/v1/models", "a").is_ok());
    let expired = key("1970-01-01T00:00:01Z");
    assert_eq!(with_key(&expired, "/v1/models", "a"), Err(StatusCode::UNAUTHORIZED));
    // An expired key does not open the server.
    assert_eq!(ask(&expired, "/v1/models", &[], LOCAL), Err(StatusCode::UNAUTHORIZED));
}

#[test]
fn only_probes_metrics_and_the_document_are_public() {
    let both = plain("'alice'", "'root'");
    for path in PUBLIC {
        assert_eq!(ask(&both, path, &[("host", "evil.example")], REMOTE), Ok(None));
    }
    for path in ["/", "/metrics/", "/v1/models", "/livez2", "/adminx"] {
        assert_eq!(ask(&both, path, &[], LOCAL), Err(StatusCode::UNAUTHORIZED), "{path}");
    }
}

#[test]
fn proxies_and_browsers_are_not_local() {
    let open = plain("", "");
    for name in FOREIGN {
        let refused = ask(&open, "/admin/train", &[(name, "x")], LOCAL);
        assert_eq!(refused, Err(StatusCode::FORBIDDEN), "{name}");
    }
    let head = |version, peer| request("/admin/train", &[], version, peer);
    assert!(is_local(&head(Version::HTTP_11, Some(LOCAL))));
    assert!(!is_local(&head(Version::HTTP_10, Some(LOCAL))));
    assert!(!is_local(&head(Version::HTTP_11, None)));
}

#[test]
fn a_request_without_a_key_must_name_this_machine() {
    let evil: &[(&str, &str)] = &[("host", "evil.example")];
    let open = plain("", "");
    for path in ["/v1/models", "/admin/train", "/nowhere"] {
        assert_eq!(ask(&open, path, evil, LOCAL), Err(StatusCode::FORBIDDEN), "{path}");
        assert_eq!(ask(&open, path, &[("host", "localhost:8080")], LOCAL), Ok(None), "{path}");
    }
    let named = authenticator("[server]\nhosts = ['evil.example']");
    assert_eq!(ask(&named, "/v1/models", evil, LOCAL), Ok(None));
    // A key is enough, whatever the name.
    let closed = plain("'alice'", "");
    let both = [evil[0], ("authorization", "Bearer alice")];
    assert!(ask(&closed, "/v1/models", &both, LOCAL).is_ok());
    assert_eq!(ask(&closed, "/admin/train", evil, LOCAL), Err(StatusCode::FORBIDDEN));
    // Beyond loopback every client is accepted for /v1, but not for /admin.
    let exposed = authenticator("[server]\nbind = '0.0.0.0:1'\ninsecure = true");
    assert_eq!(ask(&exposed, "/v1/models", evil, REMOTE), Ok(None));
    assert_eq!(ask(&exposed, "/admin/train", evil, LOCAL), Err(StatusCode::FORBIDDEN));
}

#[test]
fn refusals_name_the_key_and_the_scope() {
    let config = "[[server.keys]]\nname = 'web'\nkey = 'secret'\nscopes = ['chat', 'feedback']\n\
        [[server.keys]]\nname = 'ops'\nkey = 'root'\nscopes = ['admin']";
    let keys = authenticator(config);
    let message = |path: &str, key: Option<&str>| {
        let bearer = key.map(|key| format!("Bearer {key}"));
        let pairs: Vec<_> = bearer.iter().map(|value| ("authorization", value.as_str())).collect();
        let request = request(path, &pairs, Version::HTTP_11, None);
        keys.check(&access(path, request.method()), &request, 0).unwrap_err().to_json()
    };
    insta::assert_snapshot!(message("/v1/models", None), @r#"{"error":{"message":"the header \"Authorization: Bearer KEY\" is required, with a key that has the scope chat","type":"invalid_request_error","param":null,"code":"invalid_api_key"}}"#);
    insta::assert_snapshot!(message("/v1/feedback", Some("x")), @r#"{"error":{"message":"the key in the header Authorization is unknown; it is required, with a key that has the scope feedback or chat","type":"invalid_request_error","param":null,"code":"invalid_api_key"}}"#);
    insta::assert_snapshot!(message("/v1/fine_tuning/alpha/graders/run", Some("secret")), @r#"{"error":{"message":"the key \"web\" lacks the scope graders: it has chat and feedback","type":"invalid_request_error","param":null,"code":"missing_scope"}}"#);
    insta::assert_snapshot!(message("/admin/train", Some("secret")), @r#"{"error":{"message":"the key \"web\" lacks the scope read or admin: it has chat and feedback","type":"invalid_request_error","param":null,"code":"missing_scope"}}"#);
}

mod host {
    use axum::http::HeaderValue;

    use super::super::*;

    fn rule() -> HostRule {
        HostRule {
            bind: "192.0.2.7".parse().unwrap(),
            hosts: ["hone.example".to_owned(), "10.0.0.7".to_owned()].into(),
        }
    }

    #[test]
    fn only_names_of_this_machine_are_allowed() {
        for host in [
            "localhost",
            "LOCALHOST:8080",
            "localhost.",
            "a.localhost:1",
            "127.0.0.1:8080",
            "127.1.2.3",
            "[::1]:8080",
            "[::ffff:127.0.0.1]",
            "192.0.2.7:8080",
            "hone.example",
            "HONE.example:443",
            "10.0.0.7:80",
        ] {
            assert!(rule().allows(host), "{host}");
        }
        for host in [
            "",
            "evil.example",
            "evil.example:8080",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "notlocalhost",
            "192.0.2.8",
            "[::2]",
            "a b",
        ] {
            assert!(!rule().allows(host), "{host}");
        }
    }

    #[test]
    fn every_host_of_a_request_counts() {
        let mut headers = HeaderMap::new();
        let plain = Uri::from_static("/v1/models");
        assert_eq!(rule().refused(&plain, &headers), None);
        headers.insert(header::HOST, HeaderValue::from_static("localhost:8080"));
        assert_eq!(rule().refused(&plain, &headers), None);
        let absolute = Uri::from_static("http://evil.example/v1/models");
        assert_eq!(rule().refused(&absolute, &headers).as_deref(), Some("evil.example"));
        headers.append(header::HOST, HeaderValue::from_static("second.example"));
        assert_eq!(rule().refused(&plain, &headers).as_deref(), Some("second.example"));
    }
}

// The keys and their limits.

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
fn completions_at_once_are_limited_and_without_limits_nothing_is() {
    let (two, now) = (limiter(0, 0, 2), Instant::now());
    let first = begin(&two, 10, now).unwrap();
    let _second = begin(&two, 10, now).unwrap();
    assert_eq!(retry(begin(&two, 10, now)).as_deref(), Some("1"));
    drop(first);
    assert!(begin(&two, 10, now).is_ok());
    assert!(headers(&two, now).is_empty());
    let limiter = limiter(0, 0, 0);
    let permits: Vec<_> = (0..100).map(|_| begin(&limiter, u64::MAX, now).unwrap()).collect();
    assert!((0..100).all(|_| limiter.count_request(now).is_ok()));
    drop(permits);
    assert!(headers(&limiter, now).is_empty());
}

#[test]
fn moments_and_durations_have_the_forms_of_anthropic_and_openai() {
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
    for (ms, text) in [(0, "0s"), (20, "20ms"), (999, "999ms"), (1000, "1s"), (1001, "2s")] {
        assert_eq!(shown(Duration::from_millis(ms)), text);
    }
    assert_eq!(shown(Duration::from_secs(360)), "6m0s");
}
