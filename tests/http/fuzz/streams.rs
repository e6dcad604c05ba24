//! Streams: their form, and that a client assembles from them what the same request gets as a whole response.

use std::cell::Cell;

use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;
use regex::Regex;
use serde_json::{Value, json};

use super::Clock;
use super::change::{Body, values};
use super::target::{Reply, Target, routes};
use crate::endpoints::messages::assembled;
use crate::server::merged;

/// Makes a target of each route with streams.
macro_rules! stream_targets {
    ($($name:ident: $path:literal, $check:expr;)+) => {
        $(#[test]
        fn $name() {
            fuzz($path, $check);
        })+

        #[test]
        fn every_route_with_streams_has_a_target() {
            let target = Target::start(0);
            let streams = |path: &String| target.valid(path).iter().any(|r| r["stream"] == true);
            let routes: Vec<String> = routes().into_iter().filter(streams).collect();
            assert_eq!(routes, [$($path),+]);
            target.finish();
        }

        #[test]
        fn streams_of_changed_valid_requests_equal_whole_responses() {
            for number in 0..3 {
                let target = Target::start(number);
                let mut compared = 0;
                $(for request in target.valid($path) {
                    compared += changed(&target, $path, &request, $check).unwrap();
                })+
                assert!(compared > 300, "{compared} streams");
                target.finish();
            }
        }
    };
}

stream_targets! {
    chat_streams: "/v1/chat/completions", check_chat;
    text_streams: "/v1/completions", check_texts;
    response_streams: "/v1/responses", check_response;
    message_streams: "/v1/messages", check_message;
}

/// Compares the events of a stream with the whole response.
type Check = fn(Vec<Event>, &Value) -> TestCaseResult;

fn fuzz(path: &str, check: Check) {
    let (clock, streams) = (Clock::start(), Cell::new(0));
    let (mut checked, mut batches) = (0, 0);
    while batches == 0 || !clock.is_over() {
        let target = Target::start(batches);
        let requests = (values(target.valid(path)), any::<u32>());
        checked += clock.batch(&requests, |(request, seed)| {
            let Some((stream, whole)) = both(&target, path, request, seed)? else { return Ok(()) };
            streams.set(streams.get() + 1);
            check(events(&stream.text)?, &whole)
        });
        target.finish();
        batches += 1;
    }
    println!("{path}: {} streams of {checked} requests", streams.get());
}

/// Compares the streams of a request with each of some fields. Returns the number of valid requests.
fn changed(
    target: &Target,
    path: &str,
    request: &Value,
    check: Check,
) -> Result<usize, TestCaseError> {
    let mut compared = 0;
    for more in [
        json!({}),
        json!({"n": 2, "logprobs": true}),
        json!({"n": 2, "logprobs": 2}),
        json!({"stop": ["5", "now"]}),
        json!({"max_tokens": 3}),
        json!({"echo": true, "logprobs": 1}),
        json!({"parallel_tool_calls": false}),
        json!({"tool_choice": "none"}),
        json!({"include": ["message.output_text.logprobs"], "top_logprobs": 1}),
    ] {
        for seed in 0..5 {
            let request = merged(request.clone(), more.clone());
            if let Some((stream, whole)) = both(target, path, request, seed)? {
                check(events(&stream.text)?, &whole)?;
                compared += 1;
            }
        }
    }
    Ok(compared)
}

/// The stream and the whole response of a request, if it is valid.
fn both(
    target: &Target,
    path: &str,
    mut request: Value,
    seed: u32,
) -> Result<Option<(Reply, Value)>, TestCaseError> {
    let Some(fields) = request.as_object_mut() else { return Ok(None) };
    fields.insert("seed".to_owned(), json!(seed));
    let mut whole = fields.clone();
    fields.insert("stream".to_owned(), json!(true));
    let stream = target.post(path, &Body(request.to_string().into_bytes()));
    stream.check()?;
    if stream.status != 200 {
        return Ok(None);
    }
    prop_assert!(stream.is_stream(), "{stream:?}");
    whole.retain(|name, _| !["stream", "stream_options"].contains(&name.as_str()));
    let whole = target.post(path, &Body(json!(whole).to_string().into_bytes()));
    prop_assert!(whole.status == 200 && !whole.is_stream(), "{whole:?}");
    Ok(Some((stream, serde_json::from_str(&whole.text).unwrap())))
}

/// An event: its name, if it has one, and its data.
type Event = (Option<String>, String);

/// The events of a stream. Each is one line of data, and perhaps a name before it.
fn events(stream: &str) -> Result<Vec<Event>, TestCaseError> {
    let Some(stream) = stream.strip_suffix("\n\n") else {
        return Err(TestCaseError::fail(format!("{stream:?} does not end with an event")));
    };
    let mut events = Vec::new();
    for event in stream.split("\n\n").filter(|event| !event.starts_with(": ")) {
        let (name, data) = match event.strip_prefix("event: ").and_then(|e| e.split_once('\n')) {
            Some((name, data)) => (Some(name.to_owned()), data),
            None => (None, event),
        };
        let data = data.strip_prefix("data: ").filter(|data| !data.contains(['\n', '\r']));
        prop_assert!(data.is_some(), "{event:?} is no event");
        events.push((name, data.unwrap_or_default().to_owned()));
    }
    Ok(events)
}

/// The chunks of a stream that ends with `[DONE]`.
fn chunks(mut events: Vec<Event>) -> Result<Vec<Value>, TestCaseError> {
    prop_assert_eq!(events.pop(), Some((None, "[DONE]".to_owned())));
    prop_assert!(events.iter().all(|(name, _)| name.is_none()), "{events:?}");
    Ok(events.iter().map(|(_, data)| serde_json::from_str(data).unwrap()).collect())
}

/// The objects of a stream whose events are named by their types.
fn objects(events: Vec<Event>) -> Result<Vec<Value>, TestCaseError> {
    let mut objects = Vec::new();
    for (name, data) in events {
        let object: Value = serde_json::from_str(&data).unwrap();
        prop_assert_eq!(name.as_deref(), object["type"].as_str());
        objects.push(object);
    }
    Ok(objects)
}

/// What a choice consists of.
#[derive(Debug, Default, PartialEq)]
struct Assembled {
    started: bool,
    reasoning: String,
    text: String,
    /// Names and arguments.
    calls: Vec<[String; 2]>,
    log_probabilities: Vec<Value>,
    token_ids: Vec<Value>,
    finish_reason: Option<String>,
}

impl Assembled {
    /// Adds the message or change `of` a choice.
    fn add(&mut self, choice: &Value, of: &str) {
        let message = &choice[of];
        self.started = true;
        self.reasoning += message["reasoning_content"].as_str().unwrap_or_default();
        self.text += message["content"].as_str().or(choice["text"].as_str()).unwrap_or_default();
        let calls = message["tool_calls"].as_array().into_iter().flatten();
        for (place, call) in calls.enumerate() {
            let at = call["index"].as_u64().map_or(place, |index| index as usize);
            if at == self.calls.len() {
                self.calls.push(Default::default());
            }
            for (whole, field) in self.calls[at].iter_mut().zip(["name", "arguments"]) {
                whole.push_str(call["function"][field].as_str().unwrap_or_default());
            }
        }
        // The lists of chat completions or of text completions.
        for list in ["content", "tokens", "token_logprobs", "top_logprobs", "text_offset"] {
            let values = choice["logprobs"][list].as_array().into_iter().flatten();
            self.log_probabilities.extend(values.map(|value| json!([list, value])));
        }
        self.token_ids.extend(choice["token_ids"].as_array().into_iter().flatten().cloned());
        self.finish_reason = choice["finish_reason"].as_str().map(str::to_owned);
    }

    /// The parts of the log-probabilities in the order of their lists.
    fn sorted(mut self) -> Self {
        self.log_probabilities.sort_by_key(|value| value[0].to_string());
        self
    }
}

/// Compares the choices and the usage of chunks with those of the whole response.
fn check_choices(chunks: &[Value], whole: &Value, of: &str) -> TestCaseResult {
    let choices = whole["choices"].as_array().unwrap();
    let mut streamed: Vec<Assembled> = choices.iter().map(|_| Assembled::default()).collect();
    for chunk in chunks {
        prop_assert!(chunk["id"] == chunks[0]["id"] && chunk["error"].is_null(), "{chunk}");
        for choice in chunk["choices"].as_array().unwrap() {
            let own = &mut streamed[choice["index"].as_u64().unwrap() as usize];
            prop_assert!(own.finish_reason.is_none(), "{choice} follows the end of the choice");
            if of == "delta" && !own.started {
                prop_assert_eq!(&choice["delta"]["role"], "assistant");
            }
            own.add(choice, of);
        }
    }
    for (streamed, choice) in streamed.into_iter().zip(choices) {
        let mut expected = Assembled::default();
        expected.add(choice, "message");
        prop_assert_eq!(streamed.sorted(), expected.sorted());
    }
    let usage = chunks.last().map(|chunk| &chunk["usage"]).filter(|usage| !usage.is_null());
    prop_assert!(usage.is_none_or(|usage| *usage == whole["usage"]), "{usage:?} {whole}");
    Ok(())
}

fn check_chat(events: Vec<Event>, whole: &Value) -> TestCaseResult {
    check_choices(&chunks(events)?, whole, "delta")
}

fn check_texts(events: Vec<Event>, whole: &Value) -> TestCaseResult {
    check_choices(&chunks(events)?, whole, "")
}

fn check_response(events: Vec<Event>, whole: &Value) -> TestCaseResult {
    let events = objects(events)?;
    prop_assert_eq!(&events[0]["type"], "response.created");
    let ended = format!("response.{}", whole["status"].as_str().unwrap());
    let last = &events[events.len() - 1];
    prop_assert_eq!(&last["type"], &json!(ended));
    let response = &last["response"];
    prop_assert_eq!(masked(response), masked(whole));
    let items = response["output"].as_array().unwrap();
    let mut joined = vec![String::new(); items.len()];
    let mut logprobs = vec![Vec::new(); items.len()];
    for (number, event) in events.iter().enumerate() {
        prop_assert_eq!(&event["sequence_number"], number);
        if let Some(delta) = event["delta"].as_str() {
            let place = event["output_index"].as_u64().unwrap() as usize;
            joined[place].push_str(delta);
            logprobs[place].extend(event["logprobs"].as_array().into_iter().flatten().cloned());
        }
    }
    for ((joined, logprobs), item) in joined.iter().zip(logprobs).zip(items) {
        let expected = item["content"][0]["logprobs"].as_array().cloned().unwrap_or_default();
        prop_assert_eq!(logprobs, expected);
        let text = item["arguments"].as_str().or(item["content"][0]["text"].as_str());
        prop_assert_eq!(Some(joined.as_str()), text);
    }
    Ok(())
}

fn check_message(events: Vec<Event>, whole: &Value) -> TestCaseResult {
    let events = objects(events)?;
    prop_assert_eq!(&events[0]["type"], "message_start");
    prop_assert_eq!(&events[events.len() - 1], &json!({"type": "message_stop"}));
    prop_assert_eq!(masked(&assembled(&events)), masked(whole));
    Ok(())
}

/// An object without random ids and times.
fn masked(object: &Value) -> Value {
    let id = Regex::new("\"([a-z]+)_[0-9a-f]{32,}\"").unwrap();
    let text = object.to_string();
    let mut object: Value = serde_json::from_str(&id.replace_all(&text, "\"$1\"")).unwrap();
    for time in ["created_at", "completed_at"] {
        object.as_object_mut().unwrap().remove(time);
    }
    object
}
