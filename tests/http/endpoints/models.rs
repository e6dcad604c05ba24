//! Names of the served model.

use serde_json::{Value, json};

use crate::server::{Server, ask};

#[tokio::test(flavor = "multi_thread")]
async fn an_alias_is_a_name_of_the_served_model() {
    let aliases = ["gpt-4o", "org/name", "fake", "default"];
    let server =
        Server::with(|setup| setup.server.model_aliases = aliases.map(str::to_owned).to_vec())
            .await;
    let (_, list) = server.get("/v1/models").await;
    let names: Vec<&Value> =
        list["data"].as_array().unwrap().iter().map(|model| &model["id"]).collect();
    assert_eq!(names, ["default", "fake", "gpt-4o", "org/name"]);
    assert_eq!(server.get("/v1/models/org/name").await.1["id"], "org/name");
    for name in names {
        let (status, answer) = server.chat(&ask(json!({"model": name}))).await;
        assert_eq!((status, &answer["model"]), (200, name));
    }
    let (status, answer) = server.chat(&ask(json!({"model": "gpt-4"}))).await;
    assert_eq!(status, 404);
    let message =
        "model is \"gpt-4\": it must be \"default\" or \"fake\" or \"gpt-4o\" or \"org/name\"";
    assert_eq!(answer["error"]["message"], message);
}
