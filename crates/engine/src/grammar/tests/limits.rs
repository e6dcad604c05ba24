//! Grammars of hostile clients cost little, whether they are accepted or refused.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use super::super::queue::GrammarQueue;
use super::*;

fn lark(text: impl Into<String>) -> GrammarSpec {
    GrammarSpec::Lark(text.into())
}

/// A terminal that is an intersection: texts whose length each of the numbers divides.
fn intersection(divisors: &[u32]) -> GrammarSpec {
    let parts: Vec<String> = divisors.iter().map(|n| format!("/(.{{{n}}})*/")).collect();
    lark(format!("start: T\nT: {}\n", parts.join(" & ")))
}

/// A schema with the definitions `a0` to `a30`. `make` gets a reference to the next one.
fn doubling(make: impl Fn(Value) -> Value) -> Value {
    let mut definitions = json!({"a30": {"type": "string", "pattern": "a"}});
    for n in 0..30 {
        let next = json!({ "$ref": format!("#/$defs/a{}", n + 1) });
        definitions[format!("a{n}")] = make(next);
    }
    json!({ "$ref": "#/$defs/a0", "$defs": definitions })
}

/// Schemas that each contain the next one twice, combined.
fn doubled_schemas() -> Vec<Value> {
    let object = |key: &str, schema: Value| json!({"type": "object", key: {"x": schema}});
    vec![
        doubling(|next| json!({"allOf": [next.clone(), next]})),
        doubling(|next| json!({"type": "string", "allOf": [{"$ref": next["$ref"]}, next]})),
        doubling(
            |next| json!({"allOf": [object("properties", next.clone()), object("properties", next)]}),
        ),
        doubling(
            |next| json!({"properties": {"x": next.clone()}, "patternProperties": {"x": next}}),
        ),
        doubling(
            |next| json!({"type": "object", "anyOf": [next.clone(), object("properties", next)]}),
        ),
        doubling(|next| json!({"$ref": next["$ref"], "properties": {"x": next}})),
        doubling(
            |next| json!({"allOf": [{"anyOf": [next.clone(), {"type": "null"}]}, {"anyOf": [next, {"maxLength": 5}]}]}),
        ),
    ]
}

fn patterns(count: usize) -> Value {
    let pattern = |n: usize| json!({ "pattern": format!("^([a-z]{{{}}}|[^x]{{{}}}|.{{3}})*$", n + 3, n + 5) });
    json!({"type": "string", "allOf": (0..count).map(pattern).collect::<Vec<_>>()})
}

/// Compiles within a time in which no hostile grammar used to end.
fn compile_soon(spec: &GrammarSpec) -> Result<Arc<CompiledGrammar>, GrammarError> {
    let (sender, receiver) = mpsc::channel();
    let own = spec.clone();
    thread::spawn(move || sender.send(compile(codec(), &own)));
    receiver
        .recv_timeout(Duration::from_secs(60))
        .unwrap_or_else(|_| panic!("{spec:?} does not end"))
}

#[test]
fn grammars_that_grow_exponentially_are_refused() {
    let nested: String = (0..30).map(|n| format!("T{}: T{n} T{n}\n", n + 1)).collect();
    let mut specs: Vec<GrammarSpec> = doubled_schemas().iter().map(schema).collect();
    specs.extend(doubled_schemas().iter().map(|schema| lark(format!("start: %json {schema}\n"))));
    specs.extend([
        intersection(&[2, 3, 5, 7, 11, 13, 17]),
        intersection(&[2, 3, 5, 7, 11, 13, 17, 19, 23]),
        lark("start: T\nT: ~/a/ & ~(/b/ & ~/c/)\n"),
        lark(format!("start: T30\nT0: /ab|c/\n{nested}")),
        schema(&patterns(16)),
        schema(&patterns(64)),
    ]);
    for spec in specs {
        let refused = compile_soon(&spec).err().unwrap_or_else(|| panic!("{spec:?} is accepted"));
        assert!(refused.is_refusal(), "{spec:?}: {refused}");
    }
    let error = compile_soon(&schema(&doubled_schemas()[3])).err().unwrap().to_string();
    insta::assert_snapshot!(error, @"#/$defs/a18: allOf, and keywords beside $ref or anyOf, combine more than 20000 schemas");
    let error = compile_soon(&intersection(&[2, 3, 5, 7, 11, 13, 17])).err().unwrap().to_string();
    insta::assert_snapshot!(error, @"the grammar has 6 intersections (&) and complements (~): it may have 4");
    let error = compile_soon(&schema(&patterns(16))).err().unwrap().to_string();
    insta::assert_snapshot!(error, @"#: one text must satisfy 16 patterns: at most 8 are possible");
}

#[test]
fn ordinary_grammars_stay_within_the_limits() {
    // As pydantic writes a field with a description: a reference alone in `allOf`.
    let field =
        |name: &str| json!({"allOf": [{ "$ref": format!("#/$defs/{name}") }], "title": name});
    let person = json!({"type": "object", "properties": {
        "home": field("Address"), "work": field("Address"), "friends": {"type": "array", "items": field("Person")}}});
    let address = json!({"type": "object", "properties": {
        "zip": {"type": "string", "pattern": "^[0-9]{5}$"}, "street": {"type": "string"}}});
    let people = json!({"$ref": "#/$defs/Person", "$defs": {"Person": person, "Address": address}});
    let text = r#"{"home": {"zip": "12345"}, "friends": [{"work": {"street": "&~"}}]}"#;
    assert!(accepts(&schema(&people), text));
    assert!(!accepts(&schema(&people), r#"{"home": {"zip": "1234"}}"#));
    compile_soon(&schema(&patterns(4))).unwrap();
    compile_soon(&intersection(&[2, 3, 5])).unwrap();
    // Operators in texts, patterns, comments and special tokens are none; digits say how often.
    let quoted = lark("start: \"&&&\\\"~~~\" A ~ 2..3 // & & & & &\nA: /[&~]&\\/&/ # & & &\n");
    assert!(accepts(&quoted, "&&&\"~~~&&/&~&/&"));
    let inner = lark("start: \"<\" j \">\"\nj: %json {\"enum\": [\"&\", \"~\"]}\n");
    assert!(accepts(&inner, "<\"&\">") && !accepts(&inner, "<\"a\">"));
    let unread = compile_soon(&lark("start: %json {\"type\": }\n")).err().unwrap();
    assert_eq!(unread.to_string(), "%json needs a JSON schema");
    let unknown = compile_soon(&lark("start: %json {\"if\": {}}\n")).err().unwrap();
    assert_eq!(unknown.to_string(), "#/if: if is not supported");
}

#[test]
fn a_name_has_one_spelling() {
    let named =
        schema(&json!({"type": "object", "properties": {"ᄑ": {"type": "boolean"}, "a\"\n": true},
        "required": ["ᄑ"], "additionalProperties": {"type": "null"}}));
    assert!(accepts(&named, "{\"ᄑ\": true, \"b\": null}"));
    assert!(accepts(&named, "{\"ᄑ\": true, \"a\\\"\\n\": 1, \"c\\\\\": null}"));
    for text in [
        "{\"ᄑ\": true, \"\\u1111\": null}",
        "{\"\\u1111\": null",
        "{\"ᄑ\": true, \"\\u0061\\u0022",
    ] {
        assert!(!accepts(&named, text), "{text}");
    }
    for hidden in [
        json!({"const": "a\u{1}"}),
        json!({"properties": {"\u{1f}": true}}),
        json!({"required": ["\0"]}),
    ] {
        let refused = compile_soon(&schema(&hidden)).err().unwrap().to_string();
        assert!(refused.contains("control character"), "{refused}");
    }
}

#[test]
fn integers_that_readers_confuse_are_refused() {
    for (text, accepted) in [
        ("9007199254740992", true),
        ("-9007199254740992", true),
        ("9007199254740993", false),
        ("-9007199254740993", false),
        ("9007199254740993.0", false),
        ("18446744073709551617", false),
    ] {
        for keyword in ["const", "maximum"] {
            let spec = GrammarSpec::JsonSchema(format!("{{\"{keyword}\": {text}}}"));
            let compiled = compile_soon(&spec);
            assert_eq!(compiled.is_ok(), accepted, "{spec:?}: {:?}", compiled.err());
        }
    }
}

#[tokio::test]
async fn few_grammars_wait_for_their_compilation() {
    let queue = Arc::new(GrammarQueue::default());
    let (release, wait) = mpsc::channel::<()>();
    let mut asked = Vec::new();
    let mut wait = Some(wait);
    for _ in 0..34 {
        let (queue, wait) = (Arc::clone(&queue), wait.take());
        asked.push(tokio::spawn(async move {
            let vocabulary = move || {
                // Until the sender is dropped.
                let _ = wait.map(|wait| wait.recv());
                codec().vocabulary()
            };
            queue.compile(&GrammarSpec::JsonObject, vocabulary).await
        }));
        tokio::task::yield_now().await;
    }
    let compile = || queue.compile(&GrammarSpec::JsonObject, || codec().vocabulary());
    let refused = compile().await.err().unwrap();
    assert_eq!(refused, GrammarError::Busy { places: 2, waiting: 32 });
    assert!(crate::EngineError::from(refused).is_retryable());
    // Callers that leave make room.
    asked.pop().unwrap().abort();
    tokio::task::yield_now().await;
    drop(release);
    for compiled in asked {
        compiled.await.unwrap().unwrap();
    }
    compile().await.unwrap();
}
