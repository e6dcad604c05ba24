//! Keys with names and scopes, their reload, and the header `Host`.

use reqwest::Method;
use serde_json::json;

use hone::config::{KeyScope, ServerConfig};

use crate::server::{Server, ask, key, read};

#[tokio::test(flavor = "multi_thread")]
async fn a_key_opens_only_the_routes_of_its_scopes() {
    let server = Server::with(|s| {
        s.server.keys = vec![
            key("asks", &[KeyScope::Chat]),
            key("rates", &[KeyScope::Feedback]),
            key("grades", &[KeyScope::Graders]),
            key("operates", &[KeyScope::Admin]),
        ];
    })
    .await;
    let graders = "/v1/fine_tuning/alpha/graders/run";
    for (method, path, allowed) in [
        (Method::POST, "/v1/chat/completions", &["asks"][..]),
        (Method::GET, "/v1/models", &["asks"][..]),
        (Method::POST, "/v1/feedback", &["asks", "rates"][..]),
        (Method::POST, graders, &["grades"][..]),
        (Method::GET, "/admin/train", &["operates"][..]),
        (Method::GET, "/nowhere", &["asks", "rates", "grades", "operates"][..]),
    ] {
        for name in ["asks", "rates", "grades", "operates"] {
            let (status, answer) =
                server.as_key(name, method.clone(), path, Some(&json!({}))).await;
            let code = &answer["error"]["code"];
            let refused = status == 403 && code == "missing_scope";
            assert_eq!(refused, !allowed.contains(&name), "{name} {path}: {answer}");
            assert_ne!(status, 401, "{name} {path}");
        }
    }
    let (_, answer) = server.as_key("asks", Method::POST, graders, Some(&json!({}))).await;
    assert_eq!(answer["error"]["message"], "the key \"asks\" lacks the scope graders: it has chat");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reload_replaces_keys_while_requests_run() {
    let server = Server::with(|s| s.server.keys = vec![key("old", &[KeyScope::Chat])]).await;
    let status = async |key: &str| server.chat_as(key, &ask(json!({}))).await.status().as_u16();
    assert_eq!((status("old").await, status("new").await), (200, 401));
    let stream = server.chat_as("old", &ask(json!({"stream": true}))).await;
    let config =
        ServerConfig { keys: vec![key("new", &[KeyScope::Chat])], ..ServerConfig::default() };
    assert_eq!(server.keys.reload(&config).unwrap(), 1);
    assert_eq!((status("old").await, status("new").await), (401, 200));
    assert!(stream.text().await.unwrap().ends_with("[DONE]\n\n"));
    let broken = ServerConfig { keys_file: "no-such-file.toml".into(), ..ServerConfig::default() };
    assert!(server.keys.reload(&broken).is_err());
    assert_eq!((status("old").await, status("new").await), (401, 200));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_with_another_name_cannot_use_an_open_server() {
    let server = Server::with(|s| s.server.hosts = vec!["hone.example".to_owned()]).await;
    let with_host = async |path: &str, host: &str| {
        let request = server.client.get(server.url(path)).header("host", host);
        read(request.send().await.unwrap()).await
    };
    for path in ["/v1/models", "/admin/train"] {
        let (status, answer) = with_host(path, "evil.example").await;
        assert_eq!((status, &answer["error"]["code"]), (403, &json!("host_not_allowed")));
        for host in ["localhost:1", "127.0.0.1", "[::1]:8080", "HONE.example"] {
            assert_eq!(with_host(path, host).await.0, 200, "{path} {host}");
        }
    }
    assert_eq!(with_host("/livez", "evil.example").await.0, 200);
    // Metrics show rewards.
    for (host, expected) in [("evil.example", 403), ("hone.example", 200)] {
        let request = server.client.get(server.url("/metrics")).header("host", host);
        assert_eq!(request.send().await.unwrap().status(), expected, "{host}");
    }
    let closed = Server::with(|s| s.server.keys = vec![key("a", &[KeyScope::Chat])]).await;
    let request = closed.client.get(closed.url("/v1/models")).header("host", "evil.example");
    assert_eq!(request.bearer_auth("a").send().await.unwrap().status(), 200);
}
