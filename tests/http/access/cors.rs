//! Web pages of other origins.

use reqwest::{Method, Response};

use crate::server::Server;

async fn preflight(server: &Server, origin: &str) -> Response {
    let request = server.client.request(Method::OPTIONS, server.url("/v1/chat/completions"));
    let request = request.header("origin", origin).header("access-control-request-method", "POST");
    let headers = "authorization, content-type";
    request.header("access-control-request-headers", headers).send().await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_of_listed_origins_may_use_the_server() {
    let page = "https://app.example";
    let server = Server::with(|s| {
        s.server.cors_origins = vec![page.to_owned()];
        s.server.client_keys = vec!["app".to_owned()];
    })
    .await;
    let allowed = preflight(&server, page).await;
    assert_eq!(allowed.status(), 204);
    assert_eq!(allowed.headers()["access-control-allow-origin"], page);
    assert_eq!(allowed.headers()["access-control-allow-methods"], "GET, POST, DELETE");
    assert_eq!(allowed.headers()["access-control-allow-headers"], "authorization, content-type");
    let models = async |origin: &str, key: &str| {
        let request = server.client.get(server.url("/v1/models")).header("origin", origin);
        request.bearer_auth(key).send().await.unwrap()
    };
    let response = models(page, "app").await;
    assert_eq!(response.status(), 200);
    assert_eq!(response.headers()["vary"], "origin");
    assert_eq!(response.headers()["access-control-allow-origin"], page);
    // A page can read the error too.
    let response = models(page, "other").await;
    assert_eq!(response.status(), 401);
    assert_eq!(response.headers()["access-control-allow-origin"], page);
    for other in ["https://evil.example", "https://app.example.evil", "null"] {
        let response = preflight(&server, other).await;
        assert_ne!(response.status(), 204);
        assert!(!response.headers().contains_key("access-control-allow-origin"), "{other}");
        let response = models(other, "app").await;
        assert!(!response.headers().contains_key("access-control-allow-origin"), "{other}");
    }
    let any = Server::with(|s| s.server.cors_origins = vec!["*".to_owned()]).await;
    assert_eq!(preflight(&any, page).await.headers()["access-control-allow-origin"], page);
    let none = Server::new().await;
    assert!(!preflight(&none, page).await.headers().contains_key("vary"));
}
