//! Grammars over the tokens of real tokenizers.

mod limits;

use std::path::Path;
use std::sync::Arc;

use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

use hone_core::types::{GrammarSpec, TokenId};

use super::*;
use crate::testing::{codec, random_schema};
use crate::{Codec, ModelDir};

fn compile(codec: &Arc<Codec>, spec: &GrammarSpec) -> Result<Arc<CompiledGrammar>, GrammarError> {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(codec.compile_grammar(spec))
}

fn schema(schema: &Value) -> GrammarSpec {
    GrammarSpec::JsonSchema(schema.to_string())
}

fn choice(texts: &[&str]) -> GrammarSpec {
    GrammarSpec::Choice(texts.iter().map(|text| (*text).to_owned()).collect())
}

fn allowed(codec: &Codec, matcher: &mut GrammarMatcher) -> Vec<TokenId> {
    let set = matcher.allowed().unwrap();
    let ids: Vec<TokenId> = (0..codec.vocab() as TokenId).filter(|id| set.contains(*id)).collect();
    assert_eq!(ids.len(), set.count());
    ids
}

fn may_end(codec: &Codec, ids: &[TokenId]) -> bool {
    ids.iter().any(|id| codec.stop_ids().contains(id))
}

/// Draws permitted tokens until the text ends, which is preferred, or `most` tokens are drawn. Returns the
/// tokens without the stop token, and whether the text ended.
fn walk(
    codec: &Arc<Codec>,
    grammar: &CompiledGrammar,
    seed: u64,
    most: usize,
) -> (Vec<TokenId>, bool) {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let (mut matcher, mut drawn) = (grammar.matcher(), Vec::new());
    while drawn.len() < most {
        let ids = allowed(codec, &mut matcher);
        if may_end(codec, &ids)
            && (random.random_ratio(1, 2) || ids.len() == codec.stop_ids().len())
        {
            return (drawn, true);
        }
        let others: Vec<TokenId> =
            ids.into_iter().filter(|id| !codec.stop_ids().contains(id)).collect();
        let id = *others.choose(&mut random).unwrap();
        matcher.push(id).unwrap();
        drawn.push(id);
    }
    (drawn, false)
}

fn bytes(codec: &Codec, text: &str) -> Vec<TokenId> {
    let of = |byte: u8| (0..codec.vocab() as TokenId).find(|id| codec.token_bytes(*id) == [byte]);
    text.bytes().map(|byte| of(byte).unwrap()).collect()
}

/// Whether a grammar accepts a text, whatever its tokens.
fn accepts(spec: &GrammarSpec, text: &str) -> bool {
    let mut matcher = compile(codec(), spec).unwrap().matcher();
    for id in bytes(codec(), text) {
        if matcher.push(id).is_err() {
            return false;
        }
    }
    matcher.allowed().is_ok_and(|set| codec().stop_ids().iter().all(|id| set.contains(*id)))
}

#[test]
fn a_choice_permits_beginnings_of_its_texts_and_ends_after_a_whole_one() {
    let texts = ["yes", "yes, please", "no", "ünïcode"];
    let grammar = compile(codec(), &choice(&texts)).unwrap();
    for seed in 0..200 {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let (mut matcher, mut text) = (grammar.matcher(), Vec::new());
        loop {
            let ids = allowed(codec(), &mut matcher);
            let is_whole = texts.iter().any(|whole| whole.as_bytes() == text);
            assert_eq!(may_end(codec(), &ids), is_whole, "{text:?}");
            for id in ids.iter().filter(|id| !codec().stop_ids().contains(id)) {
                let longer = [text.clone(), codec().token_bytes(*id)].concat();
                assert!(longer.len() > text.len());
                assert!(texts.iter().any(|whole| whole.as_bytes().starts_with(&longer)));
            }
            let id = *ids.choose(&mut random).unwrap();
            if codec().stop_ids().contains(&id) {
                break;
            }
            text.extend(codec().token_bytes(id));
            matcher.push(id).unwrap();
        }
    }
    // Every text can be reached.
    assert!(texts.iter().all(|text| accepts(&choice(&texts), text)));
    assert!(!accepts(&choice(&texts), "yes,") && !accepts(&choice(&texts), "nope"));
}

#[test]
fn forced_text_has_the_tokens_of_the_tokenizer() {
    for text in ["What is 12 + 7?", "{\"name\": \"größe\"}", "<|im_start|>user\n<|im_end|>", " a "]
    {
        let grammar = compile(codec(), &choice(&[text])).unwrap();
        let (mut matcher, mut ids) = (grammar.matcher(), Vec::new());
        loop {
            let next = allowed(codec(), &mut matcher);
            if may_end(codec(), &next) {
                assert_eq!(next.len(), codec().stop_ids().len(), "only the end is permitted");
                break;
            }
            assert_eq!(next.len(), 1, "{text}: one token is permitted");
            matcher.push(next[0]).unwrap();
            ids.push(next[0]);
        }
        assert_eq!(codec().decode(&ids).unwrap(), text);
        if !text.contains("<|") {
            assert_eq!(ids, codec().encode(text).unwrap());
        }
    }
}

#[test]
fn equal_tokens_permit_equal_tokens_whatever_other_sequences_did() {
    let grammar = compile(codec(), &schema(&random_schema(3))).unwrap();
    let (ids, _) = walk(codec(), &grammar, 1, 300);
    let masks = |ids: &[TokenId]| -> Vec<Vec<TokenId>> {
        let mut matcher = grammar.matcher();
        let step = |id: &TokenId| {
            let before = allowed(codec(), &mut matcher);
            matcher.push(*id).unwrap();
            before
        };
        ids.iter().map(step).collect()
    };
    let first = masks(&ids);
    for seed in 0..5 {
        walk(codec(), &grammar, seed, 50);
    }
    assert_eq!(masks(&ids), first);
    assert!(first.iter().zip(&ids).all(|(mask, id)| mask.contains(id)));
    // A token that is not permitted is an error, and stays one.
    let mut matcher = grammar.matcher();
    let wrong = bytes(codec(), "x")[0];
    assert!(matches!(matcher.push(wrong), Err(GrammarError::Failed(_))));
    assert!(matcher.allowed().is_err());
}

/// `HONE_SOAK` sets the number of schemas, by default 100.
#[test]
fn every_text_of_a_random_schema_validates() {
    let count = std::env::var("HONE_SOAK").ok().and_then(|text| text.parse().ok()).unwrap_or(100);
    let mut ended = 0;
    for seed in 0..count {
        let schema_value = random_schema(seed);
        let grammar = compile(codec(), &schema(&schema_value)).unwrap();
        let validator =
            jsonschema::options().should_validate_formats(true).build(&schema_value).unwrap();
        for start in 0..3 {
            let (ids, is_whole) = walk(codec(), &grammar, seed * 3 + start, 3000);
            let text = codec().decode(&ids).unwrap();
            if is_whole {
                ended += 1;
                let value: Value = serde_json::from_str(&text)
                    .unwrap_or_else(|error| panic!("{error}: {text}\n{schema_value}"));
                let errors: Vec<String> =
                    validator.iter_errors(&value).map(|error| error.to_string()).collect();
                assert!(errors.is_empty(), "{errors:?}: {text}\n{schema_value}");
            }
        }
    }
    assert!(ended >= 3 * count * 9 / 10, "{ended} of {} texts ended", 3 * count);
}

#[test]
fn schemas_of_common_libraries_are_followed() {
    // As pydantic writes a tagged union with a recursive member.
    let tree = json!({
        "$defs": {
            "Leaf": {"type": "object", "title": "Leaf", "required": ["kind", "value"],
                "properties": {"kind": {"const": "leaf", "type": "string"},
                               "value": {"type": "integer", "title": "Value"}}},
            "Node": {"type": "object", "required": ["kind", "children"],
                "properties": {"kind": {"const": "node", "type": "string"}, "children": {
                    "type": "array", "items": {"oneOf": [{"$ref": "#/$defs/Leaf"},
                                                         {"$ref": "#/$defs/Node"}],
                        "discriminator": {"propertyName": "kind"}}}}},
        },
        "$ref": "#/$defs/Node",
    });
    let spec = schema(&tree);
    for text in [
        r#"{"kind":"node","children":[]}"#,
        r#"{"kind": "node", "children": [{"kind": "leaf", "value": -3}, {"kind":"node","children":[]}]}"#,
        "{\n  \"kind\": \"node\",\n  \"children\": []\n}",
    ] {
        assert!(accepts(&spec, text), "{text}");
    }
    for text in [r#"{"kind":"leaf","value":1}"#, r#"{"kind":"node"}"#, "{ }", "{    \"kind\""] {
        assert!(!accepts(&spec, text), "{text}");
    }
    // The library decides what an open value is, and permits an exponent of any length.
    let open = schema(&json!({"type": "object", "properties": {"n": {"type": "number"}}}));
    assert!(accepts(&open, r#"{"n": 1, "more": 1e999}"#) && !accepts(&open, r#"{"n": 1e9}"#));
    let any = GrammarSpec::JsonObject;
    assert!(accepts(&any, r#"{"a": [1, -2.5, "x\n", {"b": null}], "é": true}"#));
    assert!(!accepts(&any, "[1]") && !accepts(&any, "{\"a\": 1e9}") && !accepts(&any, "{\"a\"}"));
}

#[test]
fn regular_expressions_and_lark_grammars_match_whole_texts() {
    let regex = GrammarSpec::Regex("[a-c]{2,3}(/[0-9]+)?".to_owned());
    assert!(accepts(&regex, "abc/42") && accepts(&regex, "ab"));
    assert!(!accepts(&regex, "a") && !accepts(&regex, "abcc") && !accepts(&regex, "ab/"));
    let anchored = GrammarSpec::Regex("^(yes|no)$".to_owned());
    assert!(accepts(&anchored, "no") && !accepts(&anchored, "no!"));
    let lark = "start: item (\",\" item)*\nitem: /[0-9]+/ | \"(\" start \")\"\n";
    let lark = GrammarSpec::Lark(lark.to_owned());
    assert!(accepts(&lark, "1,(2,33),4") && !accepts(&lark, "1,(2"));
}

#[test]
fn grammars_that_match_nothing_or_are_malformed_are_refused() {
    for spec in [
        choice(&[]),
        choice(&["a", ""]),
        GrammarSpec::Choice(vec!["a".to_owned(); 1001]),
        GrammarSpec::Regex(String::new()),
        GrammarSpec::Regex("(".to_owned()),
        GrammarSpec::Regex("a(?=b)".to_owned()),
        GrammarSpec::Regex("(?P<stop>a)".to_owned()),
        GrammarSpec::Regex("a".repeat(20_000)),
        GrammarSpec::Lark("  ".to_owned()),
        GrammarSpec::Lark("start: missing".to_owned()),
        GrammarSpec::Lark("root ::= \"a\"".to_owned()),
        GrammarSpec::Lark("start: start".to_owned()),
        GrammarSpec::JsonSchema("{\"$ref\": \"#\"}".to_owned()),
        GrammarSpec::JsonSchema(
            "{\"type\": \"integer\", \"minimum\": 2, \"maximum\": 1}".to_owned(),
        ),
        GrammarSpec::JsonSchema("5".to_owned()),
        schema(&json!({"type": "string", "minLength": 3, "maxLength": 2})),
    ] {
        let error = compile(codec(), &spec).unwrap_err();
        assert!(error.is_refusal(), "{spec:?}: {error:?}");
        assert!(!error.to_string().contains("non-verbose"), "{error}");
    }
}

#[test]
fn a_grammar_is_compiled_once() {
    let spec = choice(&["one", "two"]);
    let first = compile(codec(), &spec).unwrap();
    assert!(Arc::ptr_eq(&first, &compile(codec(), &spec).unwrap()));
    assert_eq!(first.spec(), &spec);
    // A chain of thousand references is compiled, and does not exhaust the stack.
    let mut definitions = serde_json::Map::new();
    for i in 0..1000 {
        let next = json!({"type": "array", "items": {"$ref": format!("#/$defs/d{}", i + 1)}});
        definitions.insert(format!("d{i}"), next);
    }
    definitions.insert("d1000".to_owned(), json!({"type": "null"}));
    let chain = json!({"$defs": definitions, "$ref": "#/$defs/d0"});
    assert!(accepts(&schema(&chain), "[[]]"));
}

/// Tokenizers of every family: byte-level ones and SentencePiece's with and without a leading space.
#[test]
fn texts_of_every_tokenizer_validate() {
    let schema_value = json!({"type": "object", "required": ["n", "s"], "additionalProperties": false,
        "properties": {"n": {"type": "integer"}, "s": {"type": "string", "maxLength": 5}}});
    let families = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/families");
    let dirs = std::fs::read_dir(families).unwrap().map(|entry| entry.unwrap().path());
    let mut checked = 0;
    for dir in dirs.filter(|dir| dir.join("tokenizer.json").is_file()) {
        let model = ModelDir::open(&dir).unwrap();
        let codec = Arc::new(Codec::load(&model).unwrap());
        let grammar = match compile(&codec, &schema(&schema_value)) {
            Ok(grammar) => grammar,
            // The vocabulary of a fixture may lack the letters of the schema.
            Err(GrammarError::Refused(reason)) => {
                assert!(reason.contains("matches no text"), "{}: {reason}", dir.display());
                continue;
            }
            Err(error) => panic!("{}: {error}", dir.display()),
        };
        for seed in 0..20 {
            let (ids, ended) = walk(&codec, &grammar, seed, 2000);
            if ended {
                checked += 1;
                let text = codec.decode(&ids).unwrap();
                let value: Value = serde_json::from_str(&text).unwrap();
                assert!(jsonschema::is_valid(&schema_value, &value), "{}: {text}", dir.display());
            }
        }
    }
    assert!(checked >= 20, "{checked} texts");
}

fn piece(text: &str) -> CallPiece {
    CallPiece::Text(text.to_owned())
}

fn calls(name: &str) -> CallGrammar {
    let arguments = json!({"type": "object", "required": ["name", "arguments"],
        "additionalProperties": false, "properties": {"name": {"const": name},
            "arguments": {"type": "object", "required": ["x"], "additionalProperties": false,
                          "properties": {"x": {"type": "integer"}}}}});
    CallGrammar {
        thought: None,
        text: None,
        open: vec![piece("<tool_call>"), piece("\n")],
        calls: vec![vec![CallPiece::Json(arguments)]],
        separator: Some(vec![piece("\n</tool_call>\n<tool_call>\n")]),
        close: vec![piece("\n</tool_call>")],
    }
}

fn check(grammar: &CallGrammar, accepted: &[&str], refused: &[&str]) {
    let spec = grammar.spec().unwrap();
    assert!(CallGrammar::made(&spec));
    for accepted in accepted {
        assert!(accepts(&spec, accepted), "{accepted:?}\n{spec:?}");
    }
    for refused in refused {
        assert!(!accepts(&spec, refused), "{refused:?}\n{spec:?}");
    }
}

#[test]
fn calls_stand_alone_after_text_or_in_place_of_it() {
    let one = "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"x\": 1}}\n</tool_call>";
    let two = format!("{one}\n{one}");
    let (after, broken) = (format!("Let me see. {one}"), "Let me <tool_call> see.");
    let wrong = one.replace('1', "true");
    let alone = calls("add");
    check(&alone, &[one, &two], &[&after, "text", "", broken, &wrong]);
    let free = CallGrammar { text: Some(vec!["functools".to_owned()]), ..alone.clone() };
    let then_wrong = format!("Let me see. {wrong}");
    check(
        &free,
        &[one, &two, &after, "text", "", "a < b", "import functools", "</think>"],
        &[broken, "<tool_call>", &wrong, &then_wrong, "functools [", &format!("functools{{ {one}")],
    );
    check(&CallGrammar { separator: None, ..alone }, &[one], &[&two]);
    check(&CallGrammar { separator: None, ..free }, &[one, &after], &[&two]);
}

#[test]
fn reasoning_may_precede_calls() {
    let call = "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"x\": 1}}\n</tool_call>";
    let thought = "<think>\nShall I write <tool_call> {}?\n</think>";
    let thinks = |open: bool| {
        let open = open.then(|| piece("<think>"));
        CallGrammar { thought: Some(Thought { open, close: piece("</think>") }), ..calls("add") }
    };
    let (both, apart) = (format!("{thought}{call}"), format!("{thought}\n\n{call}"));
    let text = format!("{thought}Then text. {call}");
    check(&thinks(true), &[call, &both, &apart], &[thought, &text, "<think>", ""]);
    // The prompt has begun it.
    let rest = |text: &str| text.strip_prefix("<think>").unwrap().to_owned();
    check(&thinks(false), &[&rest(&both), &rest(&apart)], &[call, &rest(thought)]);
    let free = |open| CallGrammar { text: Some(Vec::new()), ..thinks(open) };
    let unfinished = "<think>Hm. <tool_call>";
    check(
        &free(true),
        &[call, &both, &apart, &text, thought, "text", "a <think> b"],
        &[unfinished, " <think>\n", &format!("{thought} <tool_call> {{}}")],
    );
    check(&free(false), &[&rest(&text), &rest(thought)], &[call, "text"]);
}

#[test]
fn calls_may_begin_with_a_token_or_with_json() {
    let special = codec().encode("<|im_start|>").unwrap()[0];
    let list = json!({"type": "array", "items": {"type": "integer"}, "minItems": 1});
    let by_token = CallGrammar {
        thought: Some(Thought { open: None, close: CallPiece::Token(special) }),
        text: Some(Vec::new()),
        open: vec![CallPiece::Token(special)],
        calls: vec![vec![CallPiece::Json(list)]],
        separator: None,
        close: Vec::new(),
    };
    let grammar = compile(codec(), &by_token.spec().unwrap()).unwrap();
    let mut matcher = grammar.matcher();
    let (thought, text) = (bytes(codec(), "hm [1]"), bytes(codec(), "ok "));
    let ids = [thought, vec![special], text, vec![special], bytes(codec(), "[1]")].concat();
    ids.iter().for_each(|id| matcher.push(*id).unwrap());
    let end = allowed(codec(), &mut matcher);
    assert_eq!(end.len(), codec().stop_ids().len());
    let spoken = CallGrammar { thought: None, ..by_token };
    assert!(accepts(&spoken.spec().unwrap(), "[1] is text here"));

    let object = json!({"type": "object", "required": ["x"], "additionalProperties": false,
                        "properties": {"x": {"type": "integer"}}});
    let by_json = CallGrammar {
        open: Vec::new(),
        calls: vec![vec![CallPiece::Json(object)]],
        separator: Some(vec![piece("; ")]),
        ..spoken
    };
    let (one, two) = ("{\"x\": 1}", "{\"x\": 1}; {\"x\": 2}");
    check(&by_json, &[one, two, "\n\n{\"x\": 1}", "text", "[1", ""], &["{\"x\"", "{}", " {} text"]);

    let wrong = CallGrammar { calls: Vec::new(), ..by_json.clone() };
    assert!(matches!(wrong.spec(), Err(GrammarError::Refused(_))));
    let unsupported = vec![vec![CallPiece::Json(json!({"not": {}}))]];
    let wrong = CallGrammar { calls: unsupported, ..by_json };
    assert!(matches!(wrong.spec(), Err(GrammarError::Schema { .. })));
}

#[test]
fn masks_leave_the_logits_of_the_set_alone() {
    let mut allowed = AllowedTokens(SimpleVob::alloc(70));
    for id in [0, 31, 32, 63, 69, 70, 1000] {
        allowed.set(id, true);
    }
    assert_eq!(allowed.count(), 5);
    assert!(allowed.contains(69) && !allowed.contains(70) && !allowed.contains(1));
    for len in [1, 33, 70, 100] {
        let mut logits = vec![1.0; len];
        allowed.mask(&mut logits);
        let left: Vec<usize> = (0..len).filter(|id| logits[*id] == 1.0).collect();
        let wanted: Vec<usize> = [0, 31, 32, 63, 69].into_iter().filter(|id| *id < len).collect();
        assert_eq!(left, wanted);
    }
}

#[test]
fn messages_of_the_library_become_one_line() {
    assert_eq!(failure("NoExtensionBias\n<non-verbose/>"), GrammarError::DeadEnd);
    let failed = failure("lexer too complex\n<non-verbose/>");
    assert_eq!(failed, GrammarError::Failed("lexer too complex".to_owned()));
}
