//! Texts that are parsed: schemas and other grammars, what a model writes, and files of keys.

use std::fs;
use std::sync::Arc;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use serde_json::{Value, json};

use hone::config::ServerConfig;
use hone_core::types::{ChatOptions, GrammarSpec, Message, Role, TokenId, Tool};
use hone_engine::answer::{AnswerForm, AnswerPart};
use hone_engine::{Codec, CompiledGrammar, ToolFormat};
use hone_http::KeyRing;

use super::Clock;
use super::change::{texts, values};
use super::target::{THINKING_TEMPLATE, TOOL_TEMPLATE};
use crate::server::model;

fn codec(template: &str) -> Arc<Codec> {
    let mut model = model();
    model.chat_template = template.to_owned();
    Arc::new(Codec::load(&model).unwrap())
}

fn any_schema() -> BoxedStrategy<Value> {
    values(vec![
        json!({"type": "object", "title": "T", "properties": {
            "kind": {"enum": ["sum", "none", 5, null]},
            "values": {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 99},
                       "minItems": 1, "maxItems": 3},
            "note": {"type": ["string", "null"], "minLength": 1, "maxLength": 8}},
            "required": ["kind", "values"], "additionalProperties": false}),
        json!({"$defs": {"leaf": {"anyOf": [{"type": "null"}, {"const": 7}]},
                         "node": {"type": "object", "properties": {
                             "next": {"$ref": "#/$defs/leaf"}, "up": {"$ref": "#"}}}},
               "$ref": "#/$defs/node"}),
        json!({"oneOf": [
            {"type": "object", "properties": {"t": {"const": "a"}, "x": {"type": "number",
                "exclusiveMinimum": 0, "exclusiveMaximum": 9.5}}, "required": ["t"]},
            {"type": "object", "properties": {"t": {"const": "b"}}, "required": ["t"],
             "patternProperties": {"^[a-z]$": {"type": "boolean"}}, "minProperties": 1}]}),
        json!({"allOf": [{"type": "integer", "multipleOf": 2}, {"minimum": 0}]}),
        json!({"type": "array", "prefixItems": [{"type": "string", "format": "date"},
               {"type": "string", "pattern": "^[a-z]{2}\\d?$"}], "items": false}),
        json!({"type": "string", "format": "uuid", "default": "x", "x-note": 1, "description": "d"}),
    ])
}

/// A text of the grammar that random choices lead to; `None` if it does not end soon.
fn walk(codec: &Codec, grammar: &CompiledGrammar, mut random: u64) -> Option<String> {
    let (mut matcher, mut ids) = (grammar.matcher(), Vec::new());
    for _ in 0..300 {
        let allowed = matcher.allowed().ok()?;
        let may_end = codec.stop_ids().iter().any(|id| allowed.contains(*id));
        let continues = |id: &TokenId| allowed.contains(*id) && !codec.stop_ids().contains(id);
        let next: Vec<TokenId> = (0..codec.vocab() as TokenId).filter(continues).collect();
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let drawn = (random >> 33) as usize;
        if may_end && (next.is_empty() || drawn.is_multiple_of(3)) {
            return codec.decode(&ids).ok();
        }
        let id = next[drawn % next.len()];
        matcher.push(id).ok()?;
        ids.push(id);
    }
    None
}

#[test]
fn schemas() {
    let (codec, clock) = (codec(TOOL_TEMPLATE), Clock::start());
    let runtime = tokio::runtime::Runtime::new().unwrap();
    clock.run("schemas", &(any_schema(), any::<u64>()), |(schema, random)| {
        let spec = GrammarSpec::JsonSchema(schema.to_string());
        let grammar = match runtime.block_on(codec.compile_grammar(&spec)) {
            Ok(grammar) => grammar,
            Err(error) => {
                prop_assert!(error.is_refusal(), "{error:?}");
                return Ok(());
            }
        };
        let Some(text) = walk(&codec, &grammar, random) else { return Ok(()) };
        let value: Value = match serde_json::from_str(&text) {
            Ok(value) => value,
            // Where a schema permits any value, a number may have an exponent.
            Err(error) if error.to_string().contains("number out of range") => return Ok(()),
            Err(error) => return Err(TestCaseError::fail(format!("{error}: {text}"))),
        };
        // A validator may be stricter about what is ignored here, such as annotations.
        if let Ok(validator) = jsonschema::validator_for(&schema) {
            prop_assert!(validator.is_valid(&value), "{value}");
        }
        Ok(())
    });
}

#[test]
fn grammars() {
    let (codec, clock) = (codec(TOOL_TEMPLATE), Clock::start());
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let regexes = ["[a-c]{2,3}(/[0-9]+)?", "^(yes|no)$", "(?i)\\w+\\s\\p{L}{1,4}", "a*b+|c?."];
    let parts =
        ["(", ")", "[", "]", "{1,9}", "*", "+", "?", "|", "\\", "\\d", "(?=a)", "(?P<n>", "^"];
    let larks = [
        "start: item (\",\" item)*\nitem: /[0-9]+/ | \"(\" start \")\"\n",
        "start: \"a\"~2..4 NAME?\nNAME: /[a-z]+/i\n%ignore / /\n",
        "%llguidance {}\nstart: obj\nobj: %json {\"type\": \"integer\"}\n",
    ];
    let rules =
        ["start", "item", ":", "|", "~3", "%json {}", "%import common.INT", "[capture]", "\n"];
    let spec = prop_oneof![
        texts(&regexes, &parts).prop_map(GrammarSpec::Regex),
        texts(&larks, &rules).prop_map(GrammarSpec::Lark),
        vec(texts(&["yes", "no", "größe"], &["<|im_end|>", "\"", "\\"]), 0..5)
            .prop_map(GrammarSpec::Choice),
    ];
    clock.run("grammars", &(spec, any::<u64>()), |(spec, random)| {
        match runtime.block_on(codec.compile_grammar(&spec)) {
            Ok(grammar) => {
                let text = walk(&codec, &grammar, random);
                if let (GrammarSpec::Choice(choices), Some(text)) = (&spec, text) {
                    prop_assert!(choices.contains(&text), "{text:?}");
                }
            }
            Err(error) => prop_assert!(error.is_refusal(), "{error:?}"),
        }
        Ok(())
    });
}

#[test]
fn templates() {
    let clock = Clock::start();
    let valid = [
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}",
        "{% set ns = namespace(n=0) %}{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}",
        "{{ messages[-1]['content'].split('</think>')[-1] }}{% set x = 'a' ~ 1 %}{{ x[::-1] }}",
        "{% macro show(m) %}{{ m.content or '' }}{% endmacro %}{{ show(messages[0]) }}",
    ];
    let pieces = "{% %} {{ }} {# for endfor if else range(7) loop.index0 messages \
         [1:] [-9] not in ** // % ~ \\ '";
    let pieces: Vec<&str> = pieces
        .split_whitespace()
        .chain([
            "set ns.n = ns.n + 1",
            "raise_exception('no')",
            "strftime_now('%Y')",
            "| tojson",
            "| join",
            "| length",
            "| items",
            "{'a': [1, none]}",
            "is iterable",
            "{% generation %}",
        ])
        .collect();
    let messages =
        [Message::new(Role::System, "s"), Message::new(Role::User, "é <|im_end|> {{ 1 }}")];
    clock.run("templates", &texts(&valid, &pieces), |template| {
        let mut model = model();
        model.chat_template = template;
        // Both may refuse it, but must end.
        if let Ok(codec) = Codec::load(&model) {
            let _refused = codec.prompt(&messages);
        }
        Ok(())
    });
}

/// The reasoning, the text, and the calls with their arguments.
#[derive(Debug, Default, PartialEq)]
struct Parts(String, String, Vec<(String, String)>);

fn parts(form: &AnswerForm, pieces: &[String]) -> Parts {
    let mut all = Parts::default();
    for part in form.parse(pieces.iter().map(|piece| (0, piece.as_str())), "") {
        match part {
            AnswerPart::Reasoning(text) => all.0.push_str(&text),
            AnswerPart::Text(text) => all.1.push_str(&text),
            AnswerPart::Call { index, name } => {
                assert_eq!(index, all.2.len());
                all.2.push((name, String::new()));
            }
            AnswerPart::Arguments { index, json } => all.2[index].1.push_str(&json),
        }
    }
    all
}

#[test]
fn answers() {
    let clock = Clock::start();
    let codecs = [TOOL_TEMPLATE, THINKING_TEMPLATE].map(codec);
    let tool = |name: &str| Tool {
        name: name.to_owned(),
        description: None,
        parameters: None,
        strict: false,
    };
    let options = ChatOptions { tools: vec![tool("add"), tool("now")], ..ChatOptions::default() };
    let call = r#"{"name": "add", "arguments": {"a": [1, "}"], "b": "é"}}"#;
    let long = format!("{{\"name\": \"add\", \"arguments\": {{\"a\": \"{}\"}}}}", "x".repeat(1100));
    let valid = [
        format!("So.\n</think>\n<tool_call>\n{call}\n</tool_call>\n<tool_call>{long}</tool_call>"),
        format!("[TOOL_CALLS] [{call}, {call}]"),
        "[TOOL_CALLS]add[CALL_ID]abc[ARGS]{\"a\": 1}[TOOL_CALLS]now[ARGS]{}".to_owned(),
        format!("<|python_tag|>{}; {}", call.replace("arguments", "parameters"), long),
        format!("<|tool_call|>[{call}]<|/tool_call|>"),
        format!("functools[{call}, {long}]"),
        "Five.".to_owned(),
    ];
    let valid: Vec<&str> = valid.iter().map(String::as_str).collect();
    let pieces = "<tool_call> </tool_call> <think> </think> [TOOL_CALLS] [ARGS] <|tool_call|> \
        <|/tool_call|> functools <|python_tag|> { } [ ] , ; \" \\ add null";
    let pieces: Vec<&str> = pieces.split(' ').chain(["\n", call]).collect();
    let formats = [
        ToolFormat::Hermes,
        ToolFormat::Llama3,
        ToolFormat::Mistral,
        ToolFormat::Phi,
        ToolFormat::SmolLm3,
        ToolFormat::Prompt,
    ];
    let input = (
        select(formats.to_vec()),
        any::<[bool; 2]>(),
        texts(&valid, &pieces),
        vec(1..9_usize, 1..6),
    );
    clock.run("answers", &input, |(format, [thinks, opened], text, lengths)| {
        let codec = &codecs[usize::from(thinks)];
        let prompt = codec.encode(if opened { "Hm?\n<think>\n" } else { "Hm?" }).unwrap();
        let form = AnswerForm::new(codec, &prompt, &options, format);
        let characters: Vec<char> = text.chars().collect();
        let (mut cut, mut rest) = (Vec::new(), characters.as_slice());
        for length in lengths.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            let (piece, after) = rest.split_at(rest.len().min(*length));
            cut.push(piece.iter().collect::<String>());
            rest = after;
        }
        let whole = parts(&form, std::slice::from_ref(&text));
        prop_assert_eq!(&parts(&form, &cut), &whole);
        if whole.2.is_empty() && whole.0.is_empty() && !thinks {
            prop_assert_eq!(whole.1, text);
        }
        Ok(())
    });
}

/// Whether a name, or a value other than that of a `key`, contains the key. Errors may show those.
fn is_elsewhere(name: &str, value: &toml::Value) -> bool {
    name.contains(KEY)
        || match value {
            toml::Value::String(text) => name != "key" && text.contains(KEY),
            toml::Value::Array(list) => list.iter().any(|value| is_elsewhere("", value)),
            toml::Value::Table(table) => {
                table.iter().any(|(name, value)| is_elsewhere(name, value))
            }
            _ => false,
        }
}

const KEY: &str = "sesame";

#[test]
fn keys() {
    let clock = Clock::start();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("keys.toml");
    let valid = [
        "[[keys]]\nname = 'web'\nkey = 'sesame'\nscopes = ['chat', 'feedback']\n\
         [[keys]]\nname = 'ops'\nsha256 = \
         '2bd806c97f0e00af1a1fc3328fa763a9269723c8db8fac4f93af71db186d6e90'\nscopes = ['admin']\n",
        "keys = [{ name = \"a\", key = \"sesame\", scopes = [\"graders\"], store = false, \
         expires = '2030-01-01T00:00:00Z', requests_per_minute = 5, tokens_per_minute = 900 }]",
        "",
    ];
    let pieces =
        ["[[keys]]\n", "[keys]\n", "name = 'x'\n", "'", "\"", "\n", "-1", "1e99", "true", "{}"];
    clock.run("keys", &texts(&valid, &pieces), |text| {
        fs::write(&file, &text).unwrap();
        let config = ServerConfig { keys_file: file.clone(), ..ServerConfig::default() };
        if let Err(error) = KeyRing::load(&config) {
            let error = error.to_string();
            prop_assert!(error.contains("keys"), "{error}");
            // A wrong file must not reveal a key in the log.
            let table = text.parse::<toml::Table>();
            let is_shown = table.is_ok_and(|table| is_elsewhere("", &toml::Value::Table(table)));
            prop_assert!(is_shown || !error.contains(KEY), "{error}");
        }
        Ok(())
    });
}
