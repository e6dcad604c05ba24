//! The operator's routes, probes, metrics, models and API keys.

use std::sync::atomic::Ordering;

use reqwest::header;
use serde_json::{Value, json};

use crate::server::{Server, ask, ok, read};

#[tokio::test(flavor = "multi_thread")]
async fn the_trainer_can_be_paused_resumed_and_stepped() {
    let server = Server::new().await;
    let (status, answer) = server.get("/admin/train").await;
    assert_eq!((status, &answer["state"], &answer["step"]), (200, &json!("waiting"), &json!(7)));
    let none = json!({});
    let (_, answer) = server.post("/admin/train/pause", &none).await;
    assert_eq!(answer["state"], "paused");
    let (_, answer) = server.post("/admin/train/resume", &none).await;
    assert_eq!(answer["state"], "waiting");
    let (status, answer) = server.post("/admin/train/step", &none).await;
    assert_eq!((status, &answer["error"]["code"]), (409, &json!("conflict")));
    assert_eq!(answer["error"]["message"], "no group is ready to train on");
    server.trainer.training.store(true, Ordering::SeqCst);
    let (status, answer) = server.post("/admin/train/step", &none).await;
    assert_eq!((status, &answer["step"]), (200, &json!(8)));
}

#[tokio::test(flavor = "multi_thread")]
async fn policies_are_listed_activated_and_pinned() {
    let server = Server::new().await;
    let (status, list) = server.get("/admin/policies").await;
    assert_eq!((status, &list["object"], &list["active"]), (200, &json!("list"), &json!(0)));
    let versions: Vec<&Value> =
        list["data"].as_array().unwrap().iter().map(|p| &p["version"]).collect();
    assert_eq!(versions, [0, 1, 2]);
    assert_eq!(list["data"][2]["state"], "rejected");
    assert_eq!(list["data"][1]["metrics"]["reward_mean"], 0.5);
    let none = json!({});
    let (status, policy) = server.post("/admin/policies/1/activate", &none).await;
    assert_eq!((status, &policy["version"]), (200, &json!(1)));
    assert_eq!(policy["reason"], "activated by an operator");
    assert_eq!(server.get("/admin/policies").await.1["active"], 1);
    let response = server.send_chat(&ask(json!({}))).await;
    assert_eq!(response.headers()["x-hone-policy-version"], "1");
    let answer: Value = response.json().await.unwrap();
    assert_eq!(answer["system_fingerprint"], "hone-v1");
    assert_eq!(server.get("/v1/models").await.1["data"][0]["policy_version"], 1);
    for (action, pinned) in [("pin", true), ("unpin", false)] {
        let policy = ok(server.post(&format!("/admin/policies/1/{action}"), &none).await);
        assert_eq!((&policy["version"], &policy["pinned"]), (&json!(1), &json!(pinned)));
    }
    let relearned = ok(server.post("/admin/policies/0/activate?relearn=true", &none).await);
    assert_eq!(relearned["reason"], hone_train::policy::RELEARN);
    let (status, _) = server.post("/admin/policies/0/activate?relearn=yes", &none).await;
    assert_eq!(status, 400);
    let unknown = ["activate", "pin", "unpin"]
        .map(|action| [(action, "9", 404, "not_found"), (action, "x", 400, "invalid_value")]);
    let rejected = ("activate", "2", 409, "conflict");
    for (action, version, status, code) in unknown.into_iter().flatten().chain([rejected]) {
        let path = format!("/admin/policies/{version}/{action}");
        let (found, answer) = server.post(&path, &none).await;
        assert_eq!((found, &answer["error"]["code"]), (status, &json!(code)), "{path}: {answer}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn models_are_listed_and_unknown_names_refused() {
    let server = Server::new().await;
    let (_, list) = server.get("/v1/models").await;
    let model = |id: &str| {
        json!({"id": id, "object": "model", "created": 1_700_000_000, "owned_by": "hone",
               "policy_version": 0})
    };
    assert_eq!(list, json!({"object": "list", "data": [model("default"), model("fake")]}));
    assert_eq!(server.get("/v1/models/fake").await, (200, model("fake")));
    for (status, answer) in
        [server.get("/v1/models/gpt-4").await, server.chat(&ask(json!({"model": "gpt-4"}))).await]
    {
        assert_eq!(status, 404);
        let error = json!({"error": {
            "message": "model is \"gpt-4\": it must be \"default\" or \"fake\"",
            "type": "invalid_request_error", "param": "model", "code": "model_not_found",
        }});
        assert_eq!(answer, error);
    }
    let aliases = ["gpt-4o", "org/name", "fake", "default"].map(str::to_owned).to_vec();
    let server = Server::with(|setup| setup.server.model_aliases = aliases).await;
    let (_, list) = server.get("/v1/models").await;
    let names: Vec<&Value> = list["data"].as_array().unwrap().iter().map(|m| &m["id"]).collect();
    assert_eq!(names, ["default", "fake", "gpt-4o", "org/name"]);
    assert_eq!(server.get("/v1/models/org/name").await.1["id"], "org/name");
    for name in names {
        let answer = ok(server.chat(&ask(json!({"model": name}))).await);
        assert_eq!(&answer["model"], name);
    }
    let (status, answer) = server.chat(&ask(json!({"model": "gpt-4"}))).await;
    let message =
        "model is \"gpt-4\": it must be \"default\" or \"fake\" or \"gpt-4o\" or \"org/name\"";
    assert_eq!((status, &answer["error"]["message"]), (404, &json!(message)));
}

#[tokio::test(flavor = "multi_thread")]
async fn each_kind_of_key_opens_its_own_routes() {
    let server = Server::with(|s| {
        s.server.client_keys = vec!["alice-key".to_owned()];
        s.server.admin_keys = vec!["root-key".to_owned()];
    })
    .await;
    let with = |path: &str, key: &str| {
        let request = server.client.get(server.url(path)).bearer_auth(key);
        async move { read(request.send().await.unwrap()).await }
    };
    for path in ["/v1/models", "/admin/train", "/nowhere", "/"] {
        let response = server.client.get(server.url(path)).send().await.unwrap();
        assert_eq!(response.headers()[header::WWW_AUTHENTICATE], "Bearer", "{path}");
        let (status, answer) = read(response).await;
        assert_eq!((status, &answer["error"]["code"]), (401, &json!("invalid_api_key")));
    }
    assert_eq!(with("/v1/models", "alice-key").await.0, 200);
    assert_eq!(with("/v1/models", "root-key").await.0, 403);
    assert_eq!(with("/admin/train", "root-key").await.0, 200);
    assert_eq!(with("/admin/train", "alice-key").await.0, 403);
    assert_eq!(with("/nowhere", "alice-key").await.0, 404);
    assert_eq!(server.get("/livez").await.0, 200);
    assert!(server.metric("hone_policy_version").await.is_some());
    // The ledger contains only the first digits of the key's hash.
    let chat = server.client.post(server.url("/v1/chat/completions")).bearer_auth("alice-key");
    assert_eq!(read(chat.json(&ask(json!({}))).send().await.unwrap()).await.0, 200);
    let (interaction, _) = server.rollout.submitted().remove(0);
    assert_eq!(interaction.key_id.as_deref(), Some("72ee9d4355cc"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_is_quarantined_and_released() {
    let server = Server::new().await;
    let path = "/admin/feedback/quarantine";
    let key = "2bd806c97f0e";
    let one = format!("{path}/{key}");
    assert_eq!(server.get(path).await.1, json!({"object": "list", "data": []}));
    let (status, flagged) = server.post(&one, &json!({"reason": "spam"})).await;
    assert_eq!((status, &flagged["key_id"]), (200, &json!(key)), "{flagged}");
    assert_eq!(flagged["reason"], json!({"rule": "by_hand", "note": "spam"}));
    // A second request does not replace the first reason.
    assert_eq!(server.post(&one, &json!({"reason": "again"})).await.1, flagged);
    assert_eq!(server.get(path).await.1["data"], json!([flagged]));
    assert_eq!(server.metric("hone_reward_quarantined_keys").await, Some(1.0));
    for (key, body, param) in [
        ("2bd806c97f0", json!({"reason": "x"}), "key"),
        (key, json!({}), "reason"),
        (key, json!({"reason": 5}), "reason"),
        (key, json!({"note": "x"}), "note"),
    ] {
        let (status, answer) = server.post(&format!("{path}/{key}"), &body).await;
        assert_eq!((status, &answer["error"]["param"]), (400, &json!(param)), "{answer}");
    }
    for expected in [200, 404] {
        let response = server.client.delete(server.url(&one)).send().await.unwrap();
        assert_eq!(response.status(), expected);
    }
    assert_eq!(server.metric("hone_reward_quarantined_keys").await, Some(0.0));
}
