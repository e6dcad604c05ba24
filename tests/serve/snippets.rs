//! The `curl` commands of README.md and docs succeed.

use std::fs;
use std::path::Path;

use hone_engine::EngineBackend;
use serde_json::{Value, json};

use super::daemon::Daemon;

/// A route for each feedback part that the documents post.
const CONFIG: &str = r#"
[policy]
promotion = "direct"
[log]
level = "warn"
[[route]]
name = "stars"
metadata = { part = "stars" }
[[route.reward]]
name = "stars"
kind = "feedback"
range = [1, 5]
[[route]]
name = "solved"
metadata = { part = "solved" }
[[route.reward]]
name = "solved"
kind = "feedback"
[[route]]
name = "default"
[[route.reward]]
name = "thumbs"
kind = "feedback"
"#;

/// The `curl` commands within the shell blocks of a document, each as words without `curl`.
fn commands(document: &str) -> Vec<Vec<String>> {
    let blocks = document.split("```sh\n").skip(1).map(|rest| rest.split("```").next().unwrap());
    let mut all = Vec::new();
    for block in blocks.filter(|block| block.starts_with("curl ")) {
        let words = shlex::split(&block.replace("\\\n", "")).unwrap();
        all.extend(words.split(|word| word == "curl").skip(1).map(<[String]>::to_vec));
    }
    all
}

/// Sends what `curl` would send and returns the status and text of each address.
async fn send(words: &[String], url: &str) -> Vec<(u16, String)> {
    let client = reqwest::Client::new();
    let (mut method, mut headers, mut body, mut addresses) = (None, Vec::new(), None, Vec::new());
    let mut words = words.iter();
    while let Some(word) = words.next() {
        match word.as_str() {
            "-s" => {}
            "-X" => method = words.next().cloned(),
            "-H" => headers.push(words.next().unwrap().split_once(": ").unwrap()),
            "-d" => body = words.next().cloned(),
            address => addresses.push(address.strip_prefix("localhost:8080").unwrap()),
        }
    }
    let method = method.unwrap_or_else(|| if body.is_some() { "POST" } else { "GET" }.to_owned());
    let mut replies = Vec::new();
    for address in addresses {
        let mut request = client.request(method.parse().unwrap(), format!("{url}{address}"));
        for (name, value) in &headers {
            request = request.header(*name, *value);
        }
        let response = request.body(body.clone().unwrap_or_default()).send().await.unwrap();
        replies.push((response.status().as_u16(), response.text().await.unwrap()));
    }
    replies
}

#[tokio::test]
async fn every_curl_command_of_the_documents_succeeds() {
    let data = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(EngineBackend::Native, data.path(), CONFIG, &[]);
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut documents: Vec<_> =
        fs::read_dir(root.join("docs")).unwrap().map(|entry| entry.unwrap().path()).collect();
    documents.push(root.join("README.md"));
    documents.retain(|path| path.extension().is_some_and(|extension| extension == "md"));
    let mut sent = 0;
    for path in documents {
        for command in commands(&fs::read_to_string(&path).unwrap()) {
            // The documents' example of a version that another reader has.
            let mut words: Vec<_> =
                command.iter().map(|word| word.replace("/policies/40/", "/policies/0/")).collect();
            let is = |part: &str| command.iter().any(|word| word.contains(&format!("\"{part}\"")));
            let part = ["stars", "solved"].into_iter().find(|part| is(part)).unwrap_or("thumbs");
            let conversation = json!({
                "model": "default", "max_tokens": 8,
                "metadata": {"session_id": "a-conversation", "part": part},
                "messages": [{"role": "user", "content": "What is 12 + 7?"}],
            });
            for word in &mut words {
                while word.contains("chatcmpl-…") || word.contains("a-conversation") {
                    let (status, answer) = daemon.post("/v1/chat/completions", &conversation).await;
                    assert_eq!(status, 200, "{answer}");
                    let id = answer["id"].as_str().unwrap();
                    if !word.contains("chatcmpl-…") {
                        break;
                    }
                    *word = word.replacen("chatcmpl-…", id, 1);
                }
            }
            for (status, text) in send(&words, &daemon.url).await {
                assert!((200..300).contains(&status), "{command:?} of {path:?}: {status} {text}");
                assert!(serde_json::from_str::<Value>(&text).is_ok(), "{command:?}: {text}");
                sent += 1;
            }
        }
    }
    assert!(sent >= 20, "{sent}");
}
