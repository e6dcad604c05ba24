//! The console: its files, the scope for reading, and what only it reads.

use std::time::Duration;

use futures::StreamExt;
use reqwest::{Method, header};
use serde_json::{Value, json};

use hone_core::types::{
    Group, GroupId, GroupState, PolicyVersion, Reward, Sample, SampleOrigin, StepRecord, now_ms,
};
use hone_store::Op;

use crate::server::{Server, ask, ok};

#[tokio::test(flavor = "multi_thread")]
async fn the_page_and_its_files_need_no_key_and_have_a_policy() {
    let server = Server::with(|s| s.server.admin_keys = vec!["root".to_owned()]).await;
    let fetch = |path: String| server.client.get(server.url(&path)).send();
    let page = fetch("/console".to_owned()).await.unwrap();
    let policy = page.headers()[header::CONTENT_SECURITY_POLICY].to_str().unwrap().to_owned();
    assert!(policy.starts_with("default-src 'none'; script-src 'self'; style-src 'self'"));
    assert!(!policy.contains("unsafe"), "{policy}");
    let text = page.text().await.unwrap();
    let mut files = 0;
    for part in text.split("\"console/").skip(1) {
        let file = part.split('"').next().unwrap();
        let response = fetch(format!("/console/{file}")).await.unwrap();
        assert_eq!(response.status(), 200, "{file}");
        assert!(response.headers().contains_key(header::CONTENT_SECURITY_POLICY));
        files += 1;
    }
    assert!(files >= 5, "{files}");
    let unknown = server.get("/console/other.js").await;
    assert_eq!((unknown.0, &unknown.1["error"]["code"]), (404, &json!("not_found")));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_with_the_scope_read_reads_below_admin_and_changes_nothing() {
    let server = Server::with(|s| {
        let key = |name: &str, scope: &str| {
            let text = format!("name = '{name}'\nkey = '{name}-key'\nscopes = ['{scope}']");
            toml::from_str(&text).unwrap()
        };
        s.server.keys = vec![key("viewer", "read"), key("app", "chat"), key("root", "admin")];
    })
    .await;
    for path in [
        "/admin/train",
        "/admin/policies",
        "/admin/feedback/quarantine",
        "/admin/steps",
        "/admin/answers",
        "/admin/ratings",
        "/admin/groups",
        "/admin/canary",
        "/admin/rewards",
    ] {
        for key in ["viewer-key", "root-key"] {
            assert_eq!(server.get_as(key, path).await.0, 200, "{path}");
        }
        assert_eq!(server.get_as("app-key", path).await.0, 403, "{path}");
    }
    for (method, path) in [
        (Method::POST, "/admin/train/pause"),
        (Method::POST, "/admin/policies/1/activate"),
        (Method::DELETE, "/admin/feedback/quarantine/2bd806c97f0e"),
        (Method::POST, "/admin/rewards/test"),
    ] {
        let (status, answer) = server.as_key("viewer-key", method, path, None).await;
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(
            status == 403 && message.contains("lacks the scope admin: it has read"),
            "{answer}"
        );
    }
    assert_eq!(server.get_as("viewer-key", "/v1/models").await.0, 403);
    assert_eq!(server.get("/admin/train").await.0, 401);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_stream_has_an_overview_and_ends_with_the_server() {
    let mut server = Server::new().await;
    let response = server.client.get(server.url("/admin/events")).send().await.unwrap();
    assert_eq!(response.headers()[header::CONTENT_TYPE], "text/event-stream; charset=utf-8");
    let mut events = response.bytes_stream();
    let first = String::from_utf8(events.next().await.unwrap().unwrap().to_vec()).unwrap();
    let data = first.strip_prefix("event: overview\ndata: ").unwrap();
    let overview: Value = serde_json::from_str(data.trim()).unwrap();
    assert_eq!((&overview["active"], &overview["train"]["step"]), (&json!(0), &json!(7)));
    assert_eq!((&overview["not_ready"], &overview["canary"]), (&json!([]), &Value::Null));
    // A commit of a version is announced.
    let record = ok(server.get("/admin/policies").await)["data"][1].clone();
    let record = serde_json::from_value(record).unwrap();
    server.store.commit(vec![Op::Policy(Box::new(record))]).await.unwrap();
    let next = events.next().await.unwrap().unwrap();
    assert!(next.starts_with(b"event: changed\ndata: {}\n\nevent: overview\n"));
    server.stop.take().unwrap().send(()).unwrap();
    let rest = async { while events.next().await.is_some() {} };
    tokio::time::timeout(Duration::from_secs(10), rest).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_have_tokens_rewards_and_their_siblings() {
    let server = Server::answering("The sum is 4.", |_| {}).await;
    let asked = json!({"messages": [{"role": "user", "content": "What is 3 + 4?"}], "n": 2});
    let id = ok(server.chat(&ask(asked)).await)["id"].as_str().unwrap().to_owned();
    let other = server.completion().await;
    ok(server
        .post(
            "/v1/feedback",
            &json!({"completion_id": id, "name": "thumbs", "value": 1, "comment": "Yes."}),
        )
        .await);
    let fix = json!({"completion_id": id, "correction": "It is 4."});
    ok(server.post("/v1/feedback", &fix).await);

    let list = ok(server.get("/admin/answers").await);
    let ids: Vec<&Value> = list["data"].as_array().unwrap().iter().map(|row| &row["id"]).collect();
    assert_eq!(ids, [&json!(other), &json!(id)]);
    let first = &list["data"][1];
    assert_eq!(
        (&first["prompt"], &first["text"]),
        (&json!("What is 3 + 4?"), &json!("The sum is 4."))
    );
    assert_eq!((&first["samples"], &first["reward"]), (&json!(2), &json!(1.0)));
    assert_eq!((&first["is_rated"], &first["is_corrected"]), (&json!(true), &json!(true)));
    for (query, count) in [
        ("rated=true", 1),
        ("rated=false", 1),
        ("contains=SUM", 2),
        ("contains=3%20%2b", 1),
        ("source=dataset", 0),
        ("version=0", 2),
        ("version=3", 0),
        ("route=default", 2),
        ("limit=1", 1),
    ] {
        let list = ok(server.get(&format!("/admin/answers?{query}")).await);
        assert_eq!(list["data"].as_array().unwrap().len(), count, "{query}");
    }
    let page = ok(server.get("/admin/answers?limit=1").await);
    assert_eq!(page["has_more"], true);
    let after = page["last_id"].as_str().unwrap();
    let page = ok(server.get(&format!("/admin/answers?limit=1&after={after}")).await);
    assert_eq!((&page["data"][0]["id"], &page["has_more"]), (&json!(id), &json!(false)));

    let found = ok(server.get(&format!("/admin/answers/{id}")).await);
    let samples = found["samples"].as_array().unwrap();
    let origins: Vec<_> = samples.iter().map(|s| s["origin"].as_str().unwrap()).collect();
    assert_eq!(origins, ["served", "served", "correction"]);
    let texts =
        samples[0]["tokens"].as_array().unwrap().iter().map(|t| t["text"].as_str().unwrap());
    assert!(texts.collect::<String>().starts_with("The sum is 4."));
    assert!(samples[0]["tokens"][0]["logprob"].as_f64().unwrap() <= 0.0);
    let reward = &samples[0]["rewards"][0];
    assert_eq!((&reward["name"], &reward["value"]), (&json!("thumbs"), &json!(1.0)));
    assert_eq!((&reward["comment"], &reward["weight"]), (&json!("Yes."), &json!(1.0)));
    assert_eq!(samples[2]["tokens"][0]["logprob"], Value::Null);

    let posts = ok(server.get("/admin/ratings").await);
    assert_eq!(posts["data"][0]["correction"], "It is 4.");
    assert_eq!(
        (&posts["data"][0]["name"], &posts["data"][0]["text"]),
        (&Value::Null, &json!("The sum is 4."))
    );
    assert_eq!(
        (&posts["data"][1]["name"], &posts["data"][1]["completion_id"]),
        (&json!("thumbs"), &json!(id))
    );

    for (path, status) in [
        ("/admin/answers/chatcmpl-0190a2b3c4d57e6f8091a2b3c4d5e6f7", 404),
        ("/admin/answers/other", 404),
        ("/admin/answers?after=x", 400),
        ("/admin/answers?limit=0", 400),
        ("/admin/answers?version=-1", 400),
        ("/admin/answers?source=web", 400),
        ("/admin/compare?left=1", 400),
        ("/admin/groups?state=lost", 400),
    ] {
        assert_eq!(server.get(path).await.0, status, "{path}");
    }
}

/// A completion of a request by a version, with a value of a part.
fn shadow(of: &Sample, version: u64, text: &str, value: f64) -> (Sample, Reward) {
    let version = PolicyVersion(version);
    let sample = Sample {
        text: text.to_owned(),
        ..Sample::new(of.interaction, SampleOrigin::Shadow, version)
    };
    let reward = Reward::graded(sample.id, "correct", Some(value));
    (sample, reward)
}

#[tokio::test(flavor = "multi_thread")]
async fn groups_steps_and_versions_are_read_from_the_ledger() {
    let server = Server::new().await;
    server.completion().await;
    let (interaction, served) = server.rollout.submitted().remove(0);
    let (right, three) = shadow(&served[0], 3, "It is four.", 1.0);
    let (wrong, five) = shadow(&served[0], 5, "It is five.", 0.0);
    let group = |state| Group {
        id: GroupId::new(),
        interaction: interaction.id,
        route: "default".to_owned(),
        members: vec![right.id, wrong.id],
        parts: vec!["correct".to_owned()],
        oldest_version: PolicyVersion(3),
        created: now_ms(),
        state,
    };
    let trained = group(GroupState::Trained(1));
    let dropped = group(GroupState::Dropped("stale".to_owned()));
    let step = |step: u64, value: f64| {
        let metrics = [("reward_mean".to_owned(), value)].into();
        Op::Step(Box::new(StepRecord {
            step,
            groups: vec![trained.id],
            metrics,
            created: now_ms(),
        }))
    };
    let samples = [&right, &wrong].map(|sample| Op::Sample(Box::new(sample.clone())));
    let mut ops = samples.to_vec();
    ops.extend([three, five].map(|reward| Op::Reward(Box::new(reward))));
    ops.extend([trained.clone(), dropped].map(|group| Op::Group(Box::new(group))));
    ops.extend([step(1, 0.5), step(2, f64::NAN), step(3, 0.75)]);
    server.store.commit(ops).await.unwrap();

    let id = interaction.completion_id();
    let found = ok(server.get(&format!("/admin/answers/{id}")).await);
    let advantages: Vec<f64> = found["samples"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|s| s["advantage"].as_f64())
        .collect();
    assert_eq!(advantages, [0.5, -0.5]);
    let list = ok(server.get("/admin/groups?state=dropped").await);
    assert_eq!(list["data"].as_array().unwrap().len(), 1);
    assert_eq!(
        (&list["data"][0]["reason"], &list["data"][0]["completion_id"]),
        (&json!("stale"), &json!(id))
    );
    assert_eq!(ok(server.get("/admin/groups").await)["data"].as_array().unwrap().len(), 2);

    let steps = ok(server.get("/admin/steps?limit=2").await);
    let numbers: Vec<&Value> =
        steps["data"].as_array().unwrap().iter().map(|s| &s["step"]).collect();
    assert_eq!(numbers, [2, 3]);
    assert_eq!(steps["data"][0]["metrics"]["reward_mean"], Value::Null);
    // A group belongs to the last step that trained on it.
    for (step, groups) in [(1, 0), (3, 1)] {
        let steps = ok(server.get(&format!("/admin/steps?first={step}&limit=1")).await);
        let found = &steps["data"][0];
        assert_eq!((&found["step"], &found["groups"]), (&json!(step), &json!(groups)));
    }

    let pairs = ok(server.get("/admin/compare?left=3&right=5").await);
    let pair = &pairs["data"][0];
    assert_eq!(
        (&pair["left"]["text"], &pair["right"]["text"]),
        (&json!("It is four."), &json!("It is five."))
    );
    assert_eq!((&pair["left"]["reward"], &pair["right"]["reward"]), (&json!(1.0), &json!(0.0)));
    assert_eq!(ok(server.get("/admin/compare?left=3&right=4").await)["data"], json!([]));
    assert_eq!(ok(server.get("/admin/canary").await), json!({"object": "canary", "running": null}));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_text_is_scored_by_the_graders_of_a_route() {
    let routes = "[[route]]\nname = 'sums'\n[[route.reward]]\nname = 'correct'\nkind = 'exact_match'\nweight = 2\n\
        [[route.reward]]\nname = 'thumbs'\nkind = 'feedback'";
    let routes: toml::Table = toml::from_str(routes).unwrap();
    let routes = routes["route"].clone().try_into().unwrap();
    let server = Server::with(|setup| setup.routes = routes).await;
    let listed = ok(server.get("/admin/rewards").await);
    let parts = listed["data"][0]["parts"].as_array().unwrap();
    let kinds: Vec<_> =
        parts.iter().map(|part| (part["kind"].as_str().unwrap(), &part["is_feedback"])).collect();
    assert_eq!(kinds, [("exact_match", &json!(false)), ("feedback", &json!(true))]);
    let path = "/admin/rewards/test";
    let body = json!({"route": "sums", "completion": "19", "metadata": {"answer": "19"}});
    let scored = ok(server.post(path, &body).await);
    assert_eq!((&scored["reward"], scored["parts"].as_array().unwrap().len()), (&json!(2.0), 1));
    let unscored = ok(server.post(path, &json!({"route": "sums", "completion": "19"})).await);
    assert_eq!((&unscored["reward"], &unscored["parts"][0]["value"]), (&Value::Null, &Value::Null));
    let (status, answer) = server.post(path, &json!({"route": "other", "completion": ""})).await;
    assert_eq!((status, &answer["error"]["param"]), (404, &json!("route")));
    server.refuses(path, [(json!({"route": "sums"}), 400, "completion", "is missing")]).await;
}
