use std::fs;
use std::path::Path;
use std::sync::OnceLock;

use proptest::prelude::*;
use serde_json::{Value, json};

use hone_core::types::{Tool, ToolChoice};

use super::calls::CHECKED;
use super::*;
use crate::ModelDir;
use crate::codec::TextStream;
use crate::grammar::CallPiece;

/// A codec with a chat template, and with special tokens beside those of the fixture.
fn codec(template: &str, special: &[&str]) -> Arc<Codec> {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/qwen2-tiny");
    let dir = tempfile::tempdir().unwrap();
    for file in ["config.json", "generation_config.json", "tokenizer_config.json"] {
        fs::copy(fixture.join(file), dir.path().join(file)).unwrap();
    }
    let text = fs::read_to_string(fixture.join("tokenizer.json")).unwrap();
    let mut tokenizer: Value = serde_json::from_str(&text).unwrap();
    let added = tokenizer["added_tokens"].as_array_mut().unwrap();
    let first = 280;
    added.extend(special.iter().zip(first..).map(|(content, id)| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false,
               "rstrip": false, "normalized": false, "special": true})
    }));
    fs::write(dir.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
    fs::write(dir.path().join("model.safetensors"), "").unwrap();
    let codec = Arc::new(Codec::load(&ModelDir::open(dir.path()).unwrap()).unwrap());
    assert!(special.iter().all(|token| codec.special_id(token).is_some()));
    codec
}

fn options() -> ChatOptions {
    let tool = |name: &str| Tool {
        name: name.to_owned(),
        description: None,
        parameters: Some(json!({"type": "object"})),
        strict: false,
    };
    ChatOptions { tools: vec![tool("add"), tool("get_time")], ..ChatOptions::default() }
}

fn form_of(codec: &Arc<Codec>, format: ToolFormat, opens_reasoning: bool) -> AnswerForm {
    let prompt = if opens_reasoning { "Hm?\n<think>\n" } else { "Hm?</think>" };
    AnswerForm::new(codec, &codec.encode(prompt).unwrap(), &options(), format)
}

/// A form without special tokens.
fn form(format: ToolFormat) -> AnswerForm {
    static CODEC: OnceLock<Arc<Codec>> = OnceLock::new();
    form_of(CODEC.get_or_init(|| codec("{{ messages[0].content }}", &[])), format, false)
}

fn thinking_form(opens_reasoning: bool) -> AnswerForm {
    static CODEC: OnceLock<Arc<Codec>> = OnceLock::new();
    let codec = CODEC.get_or_init(|| codec("{{ '</think>' }}", &[]));
    form_of(codec, ToolFormat::Hermes, opens_reasoning)
}

fn joined(parts: Vec<AnswerPart>) -> Vec<AnswerPart> {
    let mut all: Vec<AnswerPart> = Vec::new();
    for part in parts {
        match (all.last_mut(), &part) {
            (Some(AnswerPart::Text(last)), AnswerPart::Text(more))
            | (Some(AnswerPart::Reasoning(last)), AnswerPart::Reasoning(more)) => {
                last.push_str(more);
            }
            (
                Some(AnswerPart::Arguments { index, json }),
                AnswerPart::Arguments { index: same, json: more },
            ) if index == same => json.push_str(more),
            _ => all.push(part),
        }
    }
    all
}

fn parts(form: &AnswerForm, pieces: &[&str]) -> Vec<AnswerPart> {
    joined(form.parse(pieces.iter().map(|piece| (0, *piece)), ""))
}

/// The parts as one line: text as it is, reasoning in braces, and calls as `#index name(arguments)`.
fn shown(parts: &[AnswerPart]) -> String {
    let mut line = String::new();
    for (at, part) in parts.iter().enumerate() {
        match part {
            AnswerPart::Text(text) => line.push_str(text),
            AnswerPart::Reasoning(text) => line.push_str(&format!("{{{text}}}")),
            AnswerPart::Call { index, name } => {
                line.push_str(&format!("#{index} {name}"));
                if !matches!(parts.get(at + 1), Some(AnswerPart::Arguments { .. })) {
                    line.push_str("()");
                }
            }
            AnswerPart::Arguments { json, .. } => line.push_str(&format!("({json})")),
        }
    }
    line
}

fn whole(format: ToolFormat, text: &str) -> String {
    shown(&parts(&form(format), &[text]))
}

#[test]
fn every_format_is_read() {
    let add = r#"{"name": "add", "arguments": {"a": 1, "b": [2, "}"]}}"#;
    let called = r#"#0 add({"a": 1, "b": [2, "}"]})"#;
    let time = r#"{"name":"get_time","arguments":{}}"#;
    let both = format!("{called}#1 get_time({{}})");
    let cases = [
        (ToolFormat::Hermes, format!("<tool_call>\n{add}\n</tool_call>"), called.to_owned()),
        (
            ToolFormat::Hermes,
            format!("Let me see.\n<tool_call>{add}</tool_call>\n<tool_call>{time}</tool_call>\n"),
            format!("Let me see.{both}"),
        ),
        (ToolFormat::Prompt, format!(" \n<tool_call>[{add}, {time}]</tool_call>"), both.clone()),
        (
            ToolFormat::SmolLm3,
            format!("<tool_call>{add}</tool_call> Done."),
            format!("{called} Done."),
        ),
        (ToolFormat::Hermes, format!("<tool_call>{add}"), called.to_owned()),
        (ToolFormat::Llama3, add.replace("arguments", "parameters"), called.to_owned()),
        (ToolFormat::Llama3, format!("\n{add}; {time}"), both.clone()),
        (ToolFormat::Llama3, format!("{add}\n{time}"), both.clone()),
        (ToolFormat::Llama3, format!("<|python_tag|>{add}"), called.to_owned()),
        (
            ToolFormat::Llama3,
            r#"{"type": "function", "name": "add", "parameters": {"a": 1}}"#.to_owned(),
            r#"#0 add({"a": 1})"#.to_owned(),
        ),
        (ToolFormat::Mistral, format!("[TOOL_CALLS] [{add}, {time}]"), both.clone()),
        (
            ToolFormat::Mistral,
            r#"Yes. [TOOL_CALLS][{"name": "add", "arguments": {}, "id": "VvvODy9mT"}]"#.to_owned(),
            "Yes.#0 add({})".to_owned(),
        ),
        (
            ToolFormat::Mistral,
            r#"[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]get_time[CALL_ID]a1b2c3d4e[ARGS]{}"#
                .to_owned(),
            r#"#0 add({"a": 1})#1 get_time({})"#.to_owned(),
        ),
        (
            ToolFormat::Mistral,
            "[TOOL_CALLS]add {\"a\": 1}".to_owned(),
            r#"#0 add({"a": 1})"#.to_owned(),
        ),
        (ToolFormat::Phi, format!("<|tool_call|>[{add}, {time}]<|/tool_call|>"), both.clone()),
        (ToolFormat::Phi, format!("<|tool_call|>{add}<|/tool_call|>"), called.to_owned()),
        (ToolFormat::Phi, format!("functools[{add},{time}]"), both),
    ];
    for (format, text, expected) in cases {
        assert_eq!(whole(format, &text), expected, "{format:?}: {text}");
    }
}

#[test]
fn unusual_arguments_are_read() {
    let call = |arguments: &str| {
        let text = format!("<tool_call>{{\"name\": \"add\"{arguments}}}</tool_call>");
        whole(ToolFormat::Hermes, &text)
    };
    assert_eq!(call(""), "#0 add({})");
    assert_eq!(call(r#", "arguments": null"#), "#0 add({})");
    assert_eq!(call(r#", "arguments": "{\"a\": 1}""#), r#"#0 add({"a": 1})"#);
    assert_eq!(
        call(r#", "id": 7, "arguments": {"a": "\u00e9"}, "x": [1]"#),
        r#"#0 add({"a": "\u00e9"})"#
    );
    let swapped = r#"<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>"#;
    assert_eq!(whole(ToolFormat::Hermes, swapped), r#"#0 add({"a": 1})"#);
}

#[test]
fn what_is_no_call_stays_text() {
    let hermes = [
        "No call.\n",
        " <tool",
        "<tool_call>",
        "<tool_call> \n",
        "<tool_call>add(1)</tool_call>",
        "<tool_call>{\"name\": \"add\", \"arguments\": {\"a\": 1}",
        "<tool_call>{\"name\": \"add\", \"arguments\": {\"a\": 1,}}</tool_call>",
        "<tool_call>{'name': 'add', 'arguments': {}}</tool_call>",
        "<tool_call>{\"name\": \"unknown\", \"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": 5, \"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": \"add\", \"arguments\": [1]}</tool_call>",
        "<tool_call>{\"name\": \"add\", \"arguments\": \"x\"}</tool_call>",
        "<tool_call>{\"arguments\": {}}</tool_call>",
        "<tool_call>{x\"name\": \"add\"}</tool_call>",
        "<tool_call>{}</tool_call>",
        "<tool_call>[]</tool_call>",
        "{\"name\": \"add\", \"arguments\": {}}",
    ];
    let llama = [
        "{\"name\": \"Ann\", \"age\": 5}",
        "{\"name\": \"add\"}",
        "  {\"a\": {}} ",
        "{",
        "The call: {\"name\": \"add\", \"parameters\": {}}",
        "<|python_tag|>print(1)",
    ];
    let mistral = [
        "[TOOL_CALLS]",
        "[TOOL_CALLS]add",
        "[TOOL_CALLS]add[ARGS]",
        "[TOOL_CALLS]other[ARGS]{}",
        "[TOOL_CALLS][add]",
    ];
    let phi = ["from functools import reduce", "functools[1]", "<|tool_call|>"];
    let cases = hermes
        .map(|text| (ToolFormat::Hermes, text))
        .into_iter()
        .chain(llama.map(|text| (ToolFormat::Llama3, text)))
        .chain(mistral.map(|text| (ToolFormat::Mistral, text)))
        .chain(phi.map(|text| (ToolFormat::Phi, text)));
    for (format, text) in cases {
        let expected = [AnswerPart::Text(text.to_owned())];
        assert_eq!(parts(&form(format), &[text]), expected, "{format:?}: {text}");
    }
    // A call after a wrong one is found.
    let text = "<tool_call>{oops <tool_call>{\"name\": \"add\", \"arguments\": {}}</tool_call>";
    assert_eq!(whole(ToolFormat::Hermes, text), "<tool_call>{oops#0 add({})");
}

#[test]
fn without_tools_everything_is_text() {
    let codec = codec("{{ messages[0].content }}", &[]);
    let text = "<tool_call>{\"name\": \"add\", \"arguments\": {}}</tool_call>";
    for options in
        [ChatOptions::default(), ChatOptions { tool_choice: ToolChoice::None, ..options() }]
    {
        let form = AnswerForm::new(&codec, &[1], &options, ToolFormat::Hermes);
        assert_eq!(parts(&form, &[text]), [AnswerPart::Text(text.to_owned())]);
    }
    let single = ChatOptions { parallel_tool_calls: false, ..options() };
    let form = AnswerForm::new(&codec, &[1], &single, ToolFormat::Hermes);
    assert_eq!(shown(&parts(&form, &[text, "\n", text, " and more"])), "#0 add({})");
}

#[test]
fn long_arguments_are_reported_while_they_grow() {
    let form = form(ToolFormat::Hermes);
    let mut parser = AnswerParser::new(&form);
    let head = "<tool_call>{\"name\": \"add\", \"arguments\": {\"a\": \"";
    assert_eq!(parser.push(0, head), []);
    assert_eq!(parser.push(0, &"x".repeat(CHECKED - 7)), []);
    let grown = parser.push(0, "yz");
    assert_eq!(grown.len(), 2);
    assert_eq!(grown[0], AnswerPart::Call { index: 0, name: "add".to_owned() });
    let json = |text: &str| AnswerPart::Arguments { index: 0, json: text.to_owned() };
    assert_eq!(parser.push(0, "more"), [json("more")]);
    assert_eq!(parser.push(0, "\"}}</tool_call>"), [json("\"}")]);
    assert_eq!(parser.finish(""), []);
    assert!(parser.has_whole_calls());

    // If they turn out to be no JSON, they are all text up to the end of the call.
    let mut parser = AnswerParser::new(&form);
    parser.push(0, head);
    parser.push(0, &"x".repeat(CHECKED));
    assert_eq!(parser.push(0, "\"; oops</tool"), [json("\"; oops")]);
    assert_eq!(parser.push(0, "_call> Sorry."), [AnswerPart::Text(" Sorry.".to_owned())]);
    assert!(!parser.has_whole_calls());

    // The token limit cuts them off.
    let mut parser = AnswerParser::new(&form);
    parser.push(0, head);
    parser.push(0, &"x".repeat(CHECKED));
    assert_eq!(parser.finish("yz"), [json("yz")]);
    assert!(!parser.has_whole_calls());
}

#[test]
fn reasoning_is_split_at_the_tags() {
    let split = |inside, text: &str| shown(&parts(&thinking_form(inside), &[text]));
    assert_eq!(split(false, "<think>\nhm\n\n</think>\n\nYes\n"), "{hm}Yes\n");
    assert_eq!(split(false, " \n<think>hm</think>Yes"), "{hm}Yes");
    assert_eq!(split(false, "<think>\n\n</think>\n\nYes"), "Yes");
    assert_eq!(split(false, "<think>hm\n"), "{hm}");
    assert_eq!(split(false, "Yes <think>hm</think>"), "Yes <think>hm</think>");
    assert_eq!(split(false, "\n Yes"), "\n Yes");
    assert_eq!(split(false, "<thin"), "<thin");
    assert_eq!(split(true, "hm\n</think>\n\nYes </think>"), "{hm}Yes </think>");
    assert_eq!(split(true, "<think>\nhm</think>"), "{hm}");
    assert_eq!(split(true, "hm <think> hm"), "{hm <think> hm}");
    let call = "<tool_call>{\"name\": \"add\", \"arguments\": {}}</tool_call>";
    assert_eq!(split(true, &format!("{call}</think>\n{call}")), format!("{{{call}}}#0 add({{}})"));
}

#[test]
fn tokens_of_the_reasoning_are_counted() {
    let count = |inside, pieces: &[&str]| {
        let mut parser = AnswerParser::new(&thinking_form(inside));
        pieces.iter().for_each(|piece| drop(parser.push(0, piece)));
        parser.finish("");
        parser.reasoning_tokens()
    };
    assert_eq!(count(false, &["<", "think>", "a", "</thi", "nk>", "b", "c"]), 5);
    assert_eq!(count(true, &["a", "</think>b", "c"]), 2);
    assert_eq!(count(true, &["a", "b"]), 2);
    assert_eq!(count(false, &["a", "<think>", "b</think>"]), 0);
    assert_eq!(count(false, &["<think>\n\n</think>", "b"]), 1);
}

/// The answer as an engine reports it: with the special tokens removed, and cut before `stop`.
fn sampled(codec: &Arc<Codec>, text: &str, stop: &[String]) -> (Vec<(TokenId, String)>, String) {
    let mut stream = TextStream::new(Arc::clone(codec), stop);
    let mut tokens = Vec::new();
    for id in codec.encode(text).unwrap() {
        let piece = stream.push(id);
        tokens.push((id, piece.text));
        if piece.stopped {
            return (tokens, String::new());
        }
    }
    (tokens, stream.finish().text)
}

fn parts_of_tokens(form: &AnswerForm, text: &str, stop: &[String]) -> Vec<AnswerPart> {
    let (tokens, rest) = sampled(&form.codec, text, stop);
    joined(form.parse(tokens.iter().map(|(id, text)| (*id, text.as_str())), &rest))
}

#[test]
fn special_tokens_begin_calls_and_reasoning() {
    let special = ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "[OTHER]"];
    let codec = codec("{{ '[THINK][/THINK]' }}", &special);
    let form = form_of(&codec, ToolFormat::Mistral, false);
    let line = |text: &str| shown(&parts_of_tokens(&form, text, &[]));
    assert_eq!(
        line(
            "[THINK]hm[/THINK]Yes.[TOOL_CALLS]add[ARGS]{\"a\": \"é漢\"}[TOOL_CALLS]get_time[ARGS]{}"
        ),
        "{hm}Yes.#0 add({\"a\": \"é漢\"})#1 get_time({})"
    );
    assert_eq!(line("[TOOL_CALLS][{\"name\": \"add\", \"arguments\": {}}]"), "#0 add({})");
    // Tokens that begin no call are not in the text, as without tools.
    assert_eq!(line("a [OTHER]b [TOOL_CALLS]c[ARGS] [THINK]"), "a b c ");
    // A text that only looks like the token is text.
    let tokens = codec.encode("[TOOL_CALL").unwrap().into_iter().chain(codec.encode("S]").unwrap());
    let mut stream = TextStream::new(Arc::clone(&codec), &[]);
    let tokens: Vec<_> = tokens.map(|id| (id, stream.push(id).text)).collect();
    let found = form.parse(tokens.iter().map(|(id, text)| (*id, text.as_str())), "add[ARGS]{}");
    assert_eq!(shown(&joined(found)), "[TOOL_CALLS]add[ARGS]{}");
}

#[test]
fn a_special_token_keeps_its_place_while_text_is_held_back() {
    let codec = codec("{{ messages[0].content }}", &["[TOOL_CALLS]"]);
    let form = form_of(&codec, ToolFormat::Mistral, false);
    let call = "[TOOL_CALLS][{\"name\": \"add\", \"arguments\": {}}]";
    let line = |text: &str, stop: &str| shown(&parts_of_tokens(&form, text, &[stop.to_owned()]));
    // "ST" is held back when the token arrives.
    assert_eq!(line(&format!("aST{call}"), "STOP"), "aST#0 add({})");
    assert_eq!(line(&format!("a STOP {call}"), "STOP"), "a ");
    assert_eq!(line(&format!("é{call}"), "}]"), "é[{\"name\": \"add\", \"arguments\": {}");
}

fn any_format() -> impl Strategy<Value = ToolFormat> {
    prop_oneof![
        Just(ToolFormat::Hermes),
        Just(ToolFormat::Llama3),
        Just(ToolFormat::Mistral),
        Just(ToolFormat::Phi),
    ]
}

/// Text of parts of all formats, in random order and sometimes broken.
fn any_answer() -> impl Strategy<Value = String> {
    let call = r#"{"name": "add", "arguments": {"a": 1}}"#;
    let part = prop_oneof![
        2 => Just("<tool_call>".to_owned()),
        2 => Just("</tool_call>".to_owned()),
        2 => Just("[TOOL_CALLS]".to_owned()),
        1 => Just("[CALL_ID]abc".to_owned()),
        1 => Just("[ARGS]".to_owned()),
        1 => Just("add".to_owned()),
        2 => Just("<|tool_call|>".to_owned()),
        1 => Just("<|/tool_call|>".to_owned()),
        1 => Just("functools".to_owned()),
        1 => Just("<|python_tag|>".to_owned()),
        1 => Just("<think>".to_owned()),
        1 => Just("</think>".to_owned()),
        4 => Just(call.to_owned()),
        2 => Just(call.replace("arguments", "parameters")),
        1 => Just(format!("{{\"name\": \"add\", \"arguments\": {{\"a\": \"{}\"}}}}", "é".repeat(600))),
        1 => Just(format!("{{\"name\": \"add\", \"arguments\": {{\"a\": \"{}\" oops", "x".repeat(1100))),
        1 => Just("{\"name\": \"add\", \"arguments\": ".to_owned()),
        1 => Just("{\"a\": 1}".to_owned()),
        4 => "[\\[\\]{},; \n\"é]",
        2 => "[a-z \n]{0,6}",
    ];
    prop::collection::vec(part, 0..10).prop_map(|parts| parts.concat())
}

/// The text in pieces of the given lengths in characters, which repeat.
fn cut<'t>(text: &'t str, lengths: &[usize]) -> Vec<&'t str> {
    let (mut pieces, mut rest) = (Vec::new(), text);
    for length in lengths.iter().cycle() {
        if rest.is_empty() {
            break;
        }
        let end = rest.char_indices().nth(*length).map_or(rest.len(), |(at, _)| at);
        let (piece, after) = rest.split_at(end);
        pieces.push(piece);
        rest = after;
    }
    pieces
}

proptest! {
    #[test]
    fn parts_do_not_depend_on_how_the_text_is_split(
        text in any_answer(), format in any_format(), inside in any::<bool>(), thinks in any::<bool>(),
        lengths in prop::collection::vec(1..9_usize, 1..6),
    ) {
        let form = if thinks {
            AnswerForm { calls: form(format).calls, ..thinking_form(inside) }
        } else {
            form(format)
        };
        let whole = parts(&form, &[&text]);
        prop_assert_eq!(&parts(&form, &cut(&text, &lengths)), &whole);
        prop_assert_eq!(&parts(&form, &cut(&text, &[1])), &whole);
        // All at the end, as after a stop string that was held back.
        prop_assert_eq!(&joined(form.parse([], &text)), &whole);
    }

    #[test]
    fn without_calls_the_text_is_unchanged(text in any_answer(), format in any_format()) {
        let parts = parts(&form(format), &[&text]);
        if parts.iter().all(|part| matches!(part, AnswerPart::Text(_))) {
            let expected = if text.is_empty() { vec![] } else { vec![AnswerPart::Text(text)] };
            prop_assert_eq!(parts, expected);
        }
    }

    #[test]
    fn calls_that_hone_writes_are_read(
        calls in prop::collection::vec((0..2_usize, "[a-z\"\\\\é\n{}<>]{0,12}", any::<i32>()), 1..4),
        format in any_format(), said in "[a-z]{0,5}",
    ) {
        let names = ["add", "get_time"];
        let framing = format.calls();
        let objects: Vec<(String, Value)> = calls
            .iter()
            .map(|(name, text, number)| (names[*name].to_owned(), json!({"t": text, "n": number})))
            .collect();
        let written: Vec<String> = objects
            .iter()
            .map(|(name, arguments)| json!({"name": name, framing.arguments: arguments}).to_string())
            .collect();
        // Llama's calls have no beginning, so they are the whole answer.
        let said = if framing.open.is_empty() { String::new() } else { said };
        let text = format!("{said}{}{}{}", framing.open, written.join(framing.separator), framing.close);
        let found = parts(&form(format), &[&text]);
        let mut expected = Vec::new();
        if !said.is_empty() {
            expected.push(AnswerPart::Text(said));
        }
        for (index, (name, arguments)) in objects.into_iter().enumerate() {
            expected.push(AnswerPart::Call { index, name });
            expected.push(AnswerPart::Arguments { index, json: arguments.to_string() });
        }
        prop_assert_eq!(found, expected);
    }
}

#[test]
fn only_a_grammar_of_calls_leaves_reasoning_and_calls() {
    let text = "Hm.</think><tool_call>{\"name\": \"add\", \"arguments\": {}}</tool_call>";
    let with = |grammar| shown(&parts(&thinking_form(true).constrained(grammar), &[text]));
    let calls = CallGrammar {
        thought: None,
        text: None,
        open: Vec::new(),
        calls: vec![vec![CallPiece::Text("a".to_owned())]],
        separator: None,
        close: Vec::new(),
    };
    let (calls, object) = (calls.spec().unwrap(), GrammarSpec::JsonObject);
    assert_eq!(with(None), "{Hm.}#0 add({})");
    assert_eq!(with(Some(&calls)), "{Hm.}#0 add({})");
    assert_eq!(with(Some(&object)), text);
}
