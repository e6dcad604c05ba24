use std::path::Path;

use insta::assert_snapshot;

use crate::{Config, KeyConfig, KeyScope, parse};

/// SHA-256 of `sesame`.
const HASH: &str = "d0c04f4b1951e4aeaaec8223ed2039e542f3aae805a6fa7f6d794e5afff5d272";

fn error(text: &str) -> String {
    parse(text).unwrap_err().to_string()
}

/// A configuration with one key, which has the lines `more`.
fn with(more: &str) -> Result<Config, String> {
    parse(&format!("[[server.keys]]\nname = 'web'\nscopes = ['chat']\n{more}"))
        .map_err(|error| error.to_string())
}

#[test]
fn an_entry_has_all_its_fields() {
    let more = format!(
        "sha256 = '{}'\nexpires = 2027-01-31\nrequests_per_minute = 5\ntokens_per_minute = 6\n\
         concurrency = 7",
        HASH.to_uppercase()
    );
    let config = with(&more).unwrap();
    let [key] = &config.server.keys[..] else { panic!("{config:?}") };
    assert_eq!(key.hash().map(|hash| (hash[0], hash[31])), Some((0xd0, 0x72)));
    assert_eq!(key.expires.unwrap().to_string(), "2027-01-31T00:00:00Z");
    assert_eq!(key.limits().tokens_per_minute, 6);
    assert_eq!(key.scopes, [KeyScope::Chat]);
    assert_eq!(parse(&toml::to_string(&config).unwrap()).unwrap(), config);
    // No debug output shows a key.
    let config = with("key = 'swordfish'").unwrap();
    assert!(!format!("{config:?}").contains("swordfish"));
}

#[test]
fn wrong_entries_are_refused_without_showing_keys() {
    let error = |more: &str| with(more).unwrap_err();
    assert_snapshot!(error(""), @"server.keys[0] has no key: set key or sha256");
    assert_snapshot!(error("key = 'a b'"), @"server.keys[0].key cannot be a bearer key: it must be printable ASCII without spaces");
    assert_snapshot!(error("key = 5"), @"server.keys[0].key is a hidden value: it must be a text in quotes");
    assert_snapshot!(error("sha256 = 'd8'"), @"server.keys[0].sha256 is a hidden value: it must be 64 hexadecimal digits");
    assert_snapshot!(error(&format!("key = 'a'\nsha256 = '{HASH}'")), @"server.keys[0] has key and sha256: set one of them");
    assert_snapshot!(error("key = 'a'\nexpires = 'soon'"), @r#"server.keys[0].expires is "soon": it must be a date such as 2027-01-31, which is its midnight in UTC, or a time with an offset such as 2027-01-31T12:00:00Z"#);
    assert_snapshot!(error("key = 'a'\nconcurrency = 70000"), @"server.keys[0].concurrency is 70000: it must be from 0 to 65536");
    assert_snapshot!(error("key = 'a'\nquota = 5"), @"server.keys[0].quota is not a key: the keys there are name, key, sha256, scopes, expires, store, requests_per_minute, tokens_per_minute, concurrency");
}

#[test]
fn names_scopes_and_lists_are_checked() {
    let entry = |name: &str, scopes: &str, key: &str| {
        format!("[[server.keys]]\nname = '{name}'\nscopes = {scopes}\nkey = '{key}'\n")
    };
    let one = entry("a", "['chat']", "x");
    assert_snapshot!(error(&entry("a b", "['chat']", "x")), @r#"server.keys[0].name is "a b": it must be 1 to 64 letters, digits, '_', '-' or '.'"#);
    assert_snapshot!(error(&entry("a", "[]", "x")), @r#"server.keys[0].scopes is []: it must be a list of "chat", "feedback", "graders", "read" or "admin", each once"#);
    assert_snapshot!(error(&entry("a", "['chat', 'chat']", "x")), @r#"server.keys[0].scopes is ["chat", "chat"]: it must be a list of "chat", "feedback", "graders", "read" or "admin", each once"#);
    assert_snapshot!(error(&entry("a", "['root']", "x")), @r#"server.keys[0].scopes[0] is "root": it must be "chat", "feedback", "graders", "read" or "admin""#);
    assert_snapshot!(error(&(one.clone() + entry("a", "['chat']", "y").as_str())), @r#"server.keys has the name "a" twice: each key must have its own"#);
    assert_snapshot!(error(&(one.clone() + entry("b", "['chat']", "x").as_str())), @r#"server.keys has for "b" a key that another entry, server.client_keys or server.admin_keys has too: each must have its own"#);
    assert_snapshot!(error(&format!("[server]\nclient_keys = ['x']\n{one}")), @r#"server.keys has for "a" a key that another entry, server.client_keys or server.admin_keys has too: each must have its own"#);
    assert_snapshot!(error("[server]\nkeys = ['secret']"), @"server.keys[0] is a hidden value: it must be a table");
    assert_snapshot!(error("[server]\nhosts = ['a:80']"), @r#"server.hosts[0] is "a:80": it must be a host name or an address, without a port"#);
    assert_snapshot!(error("[server]\ncors_origins = ['https://a.example/']"), @r#"server.cors_origins[0] is "https://a.example/": it must be "*" or an origin such as "https://app.example", without a path"#);
    assert!(parse("[server]\ncors_origins = ['*', 'http://localhost:3000']").is_ok());
    assert!(parse("[server]\nhosts = ['hone.example', '10.0.0.7', '::1']").is_ok());
}

#[test]
fn a_file_adds_entries() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("keys.toml");
    let config = format!(
        "[server]\nkeys_file = '{}'\n[[server.keys]]\nname = 'a'\nkey = 'x'\nscopes = ['chat']",
        file.display()
    );
    let server = parse(&config).unwrap().server;
    let read = |text: &str| {
        std::fs::write(&file, text).unwrap();
        let names = |keys: Vec<KeyConfig>| {
            keys.into_iter().map(|key| key.name).collect::<Vec<_>>().join(" ")
        };
        let hidden = |sentence: String| sentence.replace(&file.display().to_string(), "FILE");
        server.read_keys().map(names).map_err(|problem| hidden(problem.sentence()))
    };
    let other = "[[keys]]\nname = 'b'\nkey = 'y'\nscopes = ['admin']\nexpires = 2027-01-31\n";
    assert_eq!(read(other).as_deref(), Ok("a b"));
    assert_eq!(read("").as_deref(), Ok("a"));
    let error = |text: &str| read(text).unwrap_err();
    assert_snapshot!(error("[[keys]]\nname = 'b'"), @"server.keys_file is FILE: keys[0] has no key: set key or sha256");
    assert_snapshot!(error("keys = ['secret']"), @"server.keys_file is FILE: keys[0] is a hidden value: it must be a table");
    assert_snapshot!(error("kees = 5"), @"server.keys_file is FILE: kees is not a key: did you mean keys?");
    assert_snapshot!(error(&other.replace("'y'", "'x'")), @r#"server.keys has for "b" a key that another entry, server.client_keys or server.admin_keys has too: each must have its own"#);
    assert!(error("keys = [secret").starts_with("server.keys_file is FILE: not valid TOML"));
    std::fs::remove_file(&file).unwrap();
    let missing = server.read_keys().unwrap_err().sentence();
    assert!(missing.contains("it cannot be read"), "{missing}");
    assert!(Path::new(&server.keys_file).ends_with("keys.toml"));
}
