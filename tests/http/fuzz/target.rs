//! A server for a batch of requests, and what holds for each response.

use std::sync::{Arc, OnceLock};

use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;
use serde_json::{Map, Value, json};
use tokio::runtime::{Builder, Runtime};

use hone_engine::{Engine, EngineLoad};

use super::change::Body;
use crate::server::{Server, Setup, ask, eventually, ok};

/// Valid requests of each route. `COMPLETION` and `OTHER` stand for the ids of completions.
const REQUESTS: &str = include_str!("../../fixtures/requests.json");

pub const CHAT: &str = "/v1/chat/completions";

const ROUTES: &str = r#"
    [[route]]
    name = "all"
    reward = [
        { name = "thumbs", kind = "feedback" },
        { name = "stars", kind = "feedback", range = [1, 5] },
        { name = "remark", kind = "feedback", type = "comment" },
        { name = "said", kind = "regex", pattern = "a" },
    ]
"#;

/// A template that shows functions and their calls.
pub const TOOL_TEMPLATE: &str = "{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}\
    {% endfor %}</tools> <tool_call>{% endif %}{% for m in messages %}\
    {{ '<|im_start|>' + m.role + '\n' }}{% if m.content %}{{ m.content }}{% endif %}\
    {% if m.tool_calls %}{% for call in m.tool_calls %}<tool_call>{{ call.function | tojson }}\
    </tool_call>{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// A template with reasoning, which refuses system messages after the first message.
pub const THINKING_TEMPLATE: &str = "{% for m in messages %}{% if m.role == 'system' and loop.index0 > 0 %}\
    {{ raise_exception('the system message must be the first') }}{% endif %}{{ m.content }}\n{% endfor %}\
    {% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>{% else %}<think>\n\
    {% endif %}";

/// What the engine answers, selected by the seed.
const ANSWERS: [&str; 5] = [
    "The answer is 5.",
    "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 2, \"b\": 3}}\n</tool_call>",
    "I add.\n</think>\nFive, é\u{301}!<tool_call>{\"name\": \"now\", \"arguments\": {",
    "{\"kind\": \"sum\", \"values\": [5]}",
    "",
];

pub fn valid_requests(path: &str, [completion, other]: &[String; 2]) -> Vec<Value> {
    static ALL: OnceLock<Map<String, Value>> = OnceLock::new();
    let all = ALL.get_or_init(|| serde_json::from_str(REQUESTS).unwrap());
    let text = all[path].to_string().replace("COMPLETION", completion).replace("OTHER", other);
    serde_json::from_str(&text).unwrap()
}

/// The routes that have valid requests.
pub fn routes() -> Vec<String> {
    let all: Map<String, Value> = serde_json::from_str(REQUESTS).unwrap();
    all.keys().cloned().collect()
}

/// A response.
#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    kind: String,
    pub text: String,
}

impl Reply {
    pub async fn read(response: reqwest::Response) -> Self {
        let kind = response.headers().get("content-type").map(|kind| kind.to_str().unwrap());
        let (status, kind) = (response.status().as_u16(), kind.unwrap_or_default().to_owned());
        let bytes = response.bytes().await.unwrap().to_vec();
        Self { status, kind, text: String::from_utf8(bytes).unwrap() }
    }

    /// Whether it is a stream of events.
    pub fn is_stream(&self) -> bool {
        self.kind.starts_with("text/event-stream")
    }

    /// A success is JSON or a stream of JSON, and a refusal names what it refuses.
    pub fn check(&self) -> TestCaseResult {
        // Also within a list or a stream.
        prop_assert!(!self.text.contains("\"internal_error\""), "{self:?}");
        match self.status {
            200 if self.is_stream() => self.check_events(),
            200 => {
                prop_assert!(serde_json::from_str::<Value>(&self.text).is_ok(), "{self:?}");
                Ok(())
            }
            400 | 403 | 404 | 409 | 413 | 422 => self.check_error(),
            _ => Err(TestCaseError::fail(format!("{self:?}"))),
        }
    }

    fn check_events(&self) -> TestCaseResult {
        let mut events = 0;
        for line in self.text.lines().filter_map(|line| line.strip_prefix("data: ")) {
            events += 1;
            let is_event = line == "[DONE]" || serde_json::from_str::<Value>(line).is_ok();
            prop_assert!(is_event, "{line:?} in {self:?}");
        }
        prop_assert!(events > 0 && self.text.ends_with("\n\n"), "{self:?}");
        Ok(())
    }

    fn check_error(&self) -> TestCaseResult {
        let answer: Value = serde_json::from_str(&self.text).unwrap_or_default();
        let error = &answer["error"];
        let message = error["message"].as_str().unwrap_or_default();
        prop_assert!(!message.is_empty() && error["type"].is_string(), "{self:?}");
        if let Some(field) = error["param"].as_str() {
            let is_long = error["code"] == "context_length_exceeded";
            prop_assert!(is_long || message.contains(field), "{self:?}");
        }
        Ok(())
    }
}

/// A server.
pub struct Target {
    runtime: Runtime,
    server: Server,
    ids: [String; 2],
}

impl Target {
    /// A server with one of the chat templates in turn.
    pub fn start(number: usize) -> Self {
        let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let server = runtime.block_on(async {
            match number % 3 {
                0 => Server::with(setup).await,
                1 => Server::with_template(TOOL_TEMPLATE, setup).await,
                _ => Server::with_template(THINKING_TEMPLATE, setup).await,
            }
        });
        let id = |_| {
            let body = ask(json!({"metadata": {"session_id": "s-1"}}));
            let (status, answer) = runtime.block_on(server.chat(&body));
            assert_eq!(status, 200, "{answer}");
            answer["id"].as_str().unwrap().to_owned()
        };
        let ids = [0, 1].map(id);
        Self { runtime, server, ids }
    }

    /// The valid requests of a route.
    pub fn valid(&self, path: &str) -> Vec<Value> {
        valid_requests(path, &self.ids)
    }

    /// Whether the server has a route.
    pub fn has(&self, path: &str) -> bool {
        !self.post(path, &Body(b"{}".to_vec())).text.contains("there is no POST")
    }

    pub fn post(&self, path: &str, body: &Body) -> Reply {
        let url = self.server.url(&path.replace("COMPLETION", &self.ids[0]));
        let request = self.server.client.post(url).header("content-type", "application/json");
        let request = request.body(body.0.clone());
        self.runtime.block_on(async { Reply::read(request.send().await.unwrap()).await })
    }

    pub fn check(&self, path: &str, body: &Body) -> TestCaseResult {
        let reply = self.post(path, body);
        reply.check()?;
        if path == CHAT && reply.status == 200 {
            self.check_stored(&reply)?;
        }
        Ok(())
    }

    /// A completion that was recorded is read back with the same messages.
    fn check_stored(&self, reply: &Reply) -> TestCaseResult {
        let answer: Value = serde_json::from_str(&reply.text).unwrap_or_default();
        let Some(id) = answer["id"].as_str() else { return Ok(()) };
        let url = self.server.url(&format!("{CHAT}/{id}"));
        let get = self.server.client.get(url);
        let read = self.runtime.block_on(async { Reply::read(get.send().await.unwrap()).await });
        read.check()?;
        if read.status == 404 {
            prop_assert!(read.text.contains("completion_not_stored"), "{read:?}");
            return Ok(());
        }
        let stored: Value = serde_json::from_str(&read.text).unwrap();
        let messages = |completion: &Value| -> Vec<[Value; 2]> {
            let choices = completion["choices"].as_array().unwrap().iter();
            choices.map(|c| [c["message"].clone(), c["finish_reason"].clone()]).collect()
        };
        prop_assert_eq!(messages(&stored), messages(&answer));
        Ok(())
    }

    /// Checks that nothing of the batch remains, and that a request is still served.
    pub fn finish(self) {
        let Self { runtime, server, .. } = self;
        runtime.block_on(async {
            eventually("nothing is in flight", || server.metrics.http_in_flight.get() == 0).await;
            let idle = || server.engine.load() == EngineLoad::default();
            eventually("every slot is free", idle).await;
            ok(server.chat(&ask(json!({}))).await);
        });
        runtime.shutdown_background();
    }
}

fn setup(setup: &mut Setup) {
    setup.fake.slots = 8;
    setup.fake.queue = 400;
    setup.fake.context = 4096;
    setup.fake.script =
        Arc::new(|request, _| ANSWERS[request.params.seed as usize % ANSWERS.len()].to_owned());
    setup.server.max_tokens = 256;
    setup.routes = hone::config::parse(ROUTES).unwrap().routes;
}
