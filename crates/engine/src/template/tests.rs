use std::fs;
use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value as Json, json};

use hone_core::types::{Role, Tool, ToolCall, ToolChoice};

use super::*;

fn message(role: Role, content: &str) -> Message {
    Message::new(role, content)
}

fn render(template: &str, messages: &[Message]) -> Result<String, EngineError> {
    let tokens = BTreeMap::from([("bos_token".to_owned(), "<s>".to_owned())]);
    ChatTemplate::new(template, &tokens)?.render(messages)
}

fn user(content: &str) -> Vec<Message> {
    vec![message(Role::User, content)]
}

#[test]
fn templates_render_as_in_jinja() {
    for (template, role, content, expected) in [
        (
            "{{ bos_token }}{% for m in messages %}\n  {% if m.role == 'user' %}\n\
             [{{ m['content'].strip() }}]\n  {% endif %}\n{% endfor %}\n\
             {%- if add_generation_prompt %}<a>{% endif %}",
            Role::User,
            "  hi ",
            "<s>[hi]\n<a>",
        ),
        (
            "{{ messages[0] | tojson }} {{ [1, 'ü'] | tojson(indent=2) }}",
            Role::User,
            "a<b>&'\"",
            "{\"role\": \"user\", \"content\": \"a<b>&'\\\"\"} [\n  1,\n  \"ü\"\n]",
        ),
        ("{{ messages[0].role }}", Role::Developer, "d", "system"),
        ("{# developer #}{{ messages[0].role }}", Role::Developer, "d", "developer"),
    ] {
        assert_eq!(render(template, &[message(role, content)]).unwrap(), expected, "{template}");
    }
    assert!(render("{{ strftime_now('%Q!') }}", &user("x")).is_err());
}

#[test]
fn a_refusal_has_the_templates_message() {
    let error = render("{{ raise_exception('no system role here') }}", &user("x"));
    assert_eq!(
        error.unwrap_err().to_string(),
        "the chat template refuses these messages: no system role here"
    );
}

#[test]
fn supports_features_of_published_templates() {
    let template = "{% if tools is not none %}tools{% endif %}\
        {% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}\
        {% generation %}{{ m.content }}{% endgeneration %}{% endfor %}\
        {{ strftime_now('%Y') | length }}{{ 'a,b'.split(',')[1] }}{{ missing.none_is_fine is defined }}";
    let messages = [message(Role::User, "one"), message(Role::User, "two")];
    // An attribute of an undefined value is an error in jinja2, too.
    assert!(render(template, &messages).is_err());
    let template = template.replace("missing.none_is_fine", "missing");
    assert_eq!(render(&template, &messages).unwrap(), "one4bFalse");
}

#[test]
fn the_hash_is_that_of_the_text() {
    let hash = |text: &str| ChatTemplate::new(text, &BTreeMap::new()).unwrap().hash().to_owned();
    assert_eq!(hash("abc"), "ba7816bf8f01cfea");
}

/// Written by `tests/reference/models/make_chat_templates.py`.
#[derive(Deserialize)]
struct Reference {
    special_tokens: BTreeMap<String, String>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    name: String,
    template: String,
    variables: Map<String, Json>,
    messages: Vec<Message>,
    tools: Vec<Json>,
    rendered: String,
}

fn tool(json: &Json) -> Tool {
    let function = &json["function"];
    Tool {
        name: function["name"].as_str().unwrap().to_owned(),
        description: function["description"].as_str().map(str::to_owned),
        parameters: function.get("parameters").cloned(),
        strict: true,
    }
}

#[test]
fn renders_tools_as_transformers_does() {
    let path = "../../tests/reference/models/chat_templates.json";
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap();
    let reference: Reference = serde_json::from_str(&text).unwrap();
    assert!(reference.cases.len() > 20);
    for case in reference.cases {
        let template = ChatTemplate::new(&case.template, &reference.special_tokens).unwrap();
        let options = ChatOptions {
            tools: case.tools.iter().map(tool).collect(),
            template_variables: case.variables,
            ..ChatOptions::default()
        };
        let format = match case.name.as_str() {
            // Formats unknown to Hone. Templates get OpenAI's fields if one is configured.
            "deepseek" | "command-r" | "granite" | "gpt-oss" => ToolFormat::Hermes,
            _ => template.tool_format(),
        };
        let rendered = template.render_with(&case.messages, &options, format, true).unwrap();
        assert_eq!(rendered, case.rendered, "{} {:?}", case.name, case.messages);
    }
}

fn options(tools: &[&str]) -> ChatOptions {
    let tool = |name: &&str| Tool {
        name: (*name).to_owned(),
        description: Some(format!("It is {name}.")),
        parameters: Some(json!({"type": "object", "properties": {"b": {}, "a": {}}})),
        strict: true,
    };
    ChatOptions { tools: tools.iter().map(tool).collect(), ..ChatOptions::default() }
}

/// An answer with two calls, and their results.
fn calls() -> Vec<Message> {
    let call = |id: &str, name: &str, arguments: &str| ToolCall {
        id: id.to_owned(),
        name: name.to_owned(),
        arguments: arguments.to_owned(),
    };
    let result = |id: &str, content: &str| Message {
        tool_call_id: Some(id.to_owned()),
        ..message(Role::Tool, content)
    };
    let calls = vec![call("call_1", "add", "{\"b\":1,\"a\":2}"), call("call_2", "now", "oops")];
    vec![
        message(Role::User, "3?"),
        Message { tool_calls: calls, ..message(Role::Assistant, "") },
        result("call_1", "3"),
        result("call_2", "noon"),
    ]
}

const PLAIN: &str =
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] + '\n' }}{% endfor %}";

/// What jinja2 prints, where minijinja alone would print double quotes.
#[test]
fn lists_and_maps_print_as_in_python_wherever_they_are_printed() {
    let map = "{'role': 'user', 'content': \"it's\"}";
    for (template, expected) in [
        ("{{ messages[0] }}", map.to_owned()),
        ("{{ messages[0] | trim }}", map.to_owned()),
        ("{{ '%s' | format(messages[0]) }}", map.to_owned()),
        ("{{ [messages[0], 1] | join('+') }}", format!("{map}+1")),
        ("{{ messages }}", format!("[{map}]")),
        ("{{ messages | upper }}", format!("[{map}]").to_uppercase()),
        ("{{ messages[0] | tojson }}", r#"{"role": "user", "content": "it's"}"#.to_owned()),
    ] {
        assert_eq!(render(template, &user("it's")).unwrap(), expected, "{template}");
    }
}

#[test]
fn templates_without_tools_get_text() {
    let template = ChatTemplate::new(PLAIN, &BTreeMap::new()).unwrap();
    assert_eq!(template.tool_format(), ToolFormat::Prompt);
    let text = |messages: &[Message], options: &ChatOptions, format| {
        template.render_with(messages, options, format, true).unwrap()
    };
    let described = text(&user("Hi"), &options(&["add"]), ToolFormat::Prompt);
    let (head, tail) = described.split_once("<tools>\n").unwrap();
    assert!(head.starts_with("[system] # Tools\n\nYou may call"), "{head}");
    assert_eq!(
        tail,
        "{\"type\": \"function\", \"function\": {\"name\": \"add\", \"description\": \"It is add.\", \
         \"parameters\": {\"type\": \"object\", \"properties\": {\"b\": {}, \"a\": {}}}}}\n</tools>\n\n\
         For each function call, return a json object with function name and arguments within \
         <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": \
         <args-json-object>}\n</tool_call>\n[user] Hi\n"
    );
    let system = [message(Role::Developer, "Be brief."), message(Role::User, "Hi")];
    let described = text(&system, &options(&["add"]), ToolFormat::Prompt);
    assert!(described.starts_with("[system] Be brief.\n\n# Tools\n"), "{described}");
    assert_eq!(described.matches("[system]").count(), 1);
    let phi = text(&user("Hi"), &options(&["add"]), ToolFormat::Phi);
    assert!(phi.contains("<|tool_call|>[{\"name\": <function-name>"), "{phi}");
    let refused = ChatOptions { tool_choice: ToolChoice::None, ..options(&["add"]) };
    assert_eq!(text(&user("Hi"), &refused, ToolFormat::Prompt), "[user] Hi\n");

    let conversation = text(&calls(), &ChatOptions::default(), ToolFormat::Prompt);
    assert_eq!(
        conversation,
        "[user] 3?\n[assistant] <tool_call>\n{\"name\": \"add\", \"arguments\": {\"b\": 1, \"a\": 2}}\n\
         </tool_call>\n<tool_call>\n{\"name\": \"now\", \"arguments\": \"oops\"}\n</tool_call>\n\
         [user] <tool_response>\n3\n</tool_response>\n<tool_response>\nnoon\n</tool_response>\n"
    );
    let phi = text(&calls(), &ChatOptions::default(), ToolFormat::Phi);
    assert!(phi.ends_with("[tool_response] 3\n[tool_response] noon\n"), "{phi}");
}

#[test]
fn the_description_moves_to_the_user_if_the_template_refuses_systems() {
    let refusing =
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}";
    let template = ChatTemplate::new(&format!("{refusing}{PLAIN}"), &BTreeMap::new()).unwrap();
    let text =
        template.render_with(&user("Hi"), &options(&["add"]), ToolFormat::Prompt, true).unwrap();
    assert!(
        text.starts_with("[user] # Tools\n") && text.ends_with("</tool_call>\n\nHi\n"),
        "{text}"
    );
    let system = [message(Role::System, "Be brief."), message(Role::User, "Hi")];
    let error =
        template.render_with(&system, &options(&["add"]), ToolFormat::Prompt, true).unwrap_err();
    assert!(error.to_string().ends_with("no system"), "{error}");
}

#[test]
fn templates_with_tools_get_openais_fields() {
    let shown = "{% for m in messages %}{% for c in m.tool_calls %}{{ c | tojson }};{% endfor %}\
                 {{ m.name }},{{ m.tool_call_id }},{{ m.content is none }}\n{% endfor %}\
                 {% if tools %}<tool_call>{% endif %}{{ effort }}";
    let render = |template: &str, format| {
        let template = ChatTemplate::new(template, &BTreeMap::new()).unwrap();
        let mut options = options(&["add"]);
        options.template_variables.insert("effort".to_owned(), json!("low"));
        template.render_with(&calls(), &options, format, true).unwrap()
    };
    assert_eq!(
        render(shown, ToolFormat::Hermes),
        ",,False\n\
         {\"id\": \"call_1\", \"type\": \"function\", \"function\": {\"name\": \"add\", \"arguments\": \
         {\"b\": 1, \"a\": 2}}};{\"id\": \"call_2\", \"type\": \"function\", \"function\": {\"name\": \
         \"now\", \"arguments\": \"oops\"}};,,True\n\
         add,call_1,False\nnow,call_2,False\n<tool_call>low"
    );
    // Mistral's templates accept ids of nine letters and digits.
    let ids = "{% for m in messages %}{% for c in m.tool_calls %}{{ c.id }};{% endfor %}\
               {{ m.tool_call_id }},{% endfor %}{{ tools | length }}[TOOL_CALLS]";
    let shown = render(ids, ToolFormat::Mistral);
    let (made, answered) = shown.split_once(";,").unwrap();
    let made: Vec<&str> = made.trim_start_matches(',').split(';').collect();
    assert_eq!(answered, format!("{},{},1[TOOL_CALLS]", made[0], made[1]));
    assert!(made.iter().all(|id| id.len() == 9) && made[0] != made[1]);
    // A template that concatenates the content of a silent turn gets an empty text.
    let joined =
        "{# tool_calls #}{% for m in messages %}{{ m.content + '.' }}{% endfor %}{# tools #}";
    assert_eq!(
        render(&format!("{joined}{{{{ tools | length }}}}"), ToolFormat::Hermes),
        "3?..3.noon.1"
    );
}

#[test]
fn think_tags_are_recognized() {
    let tags = |text: &str| ChatTemplate::new(text, &BTreeMap::new()).unwrap().think_tags();
    assert_eq!(tags("{{ messages[0].content }}"), None);
    assert_eq!(tags("{{ '</think>' }}").unwrap().open, "<think>");
    assert_eq!(tags("{{ '[THINK]x[/THINK]' }}").unwrap().close, "[/THINK]");
}

/// Without bounds each would take hours or gigabytes.
#[test]
fn renderings_have_bounds_of_time_and_memory() {
    let grown = |start: &str, step: &str| {
        format!(
            "{{% set ns = namespace(a={start}) %}}{{% for i in range(100000) %}}{{% set ns.a = {step} %}}\
             {{% endfor %}}{{{{ ns.a == ns.a }}}}"
        )
    };
    let raw = format!("{}{}{}", "{% for j in range(1000) %}", "x".repeat(10_000), "{% endfor %}");
    let hostile = [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% for k in range(100000) %}\
         {% endfor %}{% endfor %}{% endfor %}"
            .to_owned(),
        format!("{{% set a %}}{{% for i in range(100000) %}}{raw}{{% endfor %}}{{% endset %}}"),
        format!("{{% for i in range(100000) %}}{raw}{{% endfor %}}"),
        grown("'x'", "ns.a + ns.a"),
        grown("'x'", "ns.a ~ ns.a"),
        grown("'x'", "ns.a.replace('x', 'xx')"),
        grown("'x'", "ns.a | replace('x', 'xx')"),
        grown("[1]", "ns.a + ns.a"),
        grown("[1]", "[ns.a, ns.a]"),
        grown("[1]", "[ns.a]"),
        grown("[1]", "{'a': ns.a}"),
        grown("[1]", "ns.a | batch(1) | list"),
        grown("1", "ns"),
        grown("range(100000)", "ns.a[1:]"),
        grown("[1]", "ns.a | chain([1])"),
        grown("1", "[ns]"),
        grown("['x' * 100000]", "ns.a + [ns.a[0] | upper]"),
        "{% macro f(a) %}{{ f(a + a) }}{% endmacro %}{{ f('x') }}".to_owned(),
        "{{ 'a\nb' | indent(1000000000) }}".to_owned(),
        "{{ 'a\nb' | indent(width=1000000000) }}".to_owned(),
        "{{ ['a\nb'] | map('indent', 1000000000) | list }}".to_owned(),
        "{{ '%1000000000d' | format(1) }}".to_owned(),
        "{{ '{:>1000000000}'.format(1) }}".to_owned(),
        "{{ [1] | batch(100000000000) }}".to_owned(),
        "{{ [1] | slice(100000000000) }}".to_owned(),
        "{{ range(100000) | join('x' * 100000) }}".to_owned(),
        "{{ (['x' * 100000] * 100000) | join }}".to_owned(),
        "{% include 'chat_template' %}".to_owned(),
    ];
    for template in &hostile {
        assert!(render(template, &user("Hi")).is_err(), "{template}");
    }
    let errors = [0, 3, 9, hostile.len() - 1]
        .map(|i: usize| render(&hostile[i], &user("Hi")).unwrap_err().to_string());
    insta::assert_snapshot!(errors.join("\n"), @r"
    the chat template refuses these messages: engine ran out of fuel (in chat_template:1)
    the chat template refuses these messages: it builds more than a chat template may
    the chat template refuses these messages: its values are nested too deeply
    the chat template does not parse: invalid operation: a chat template cannot include another
    ");
    // These would be read by recursion.
    for (start, step) in [
        ("[1]", "ns.a | reverse"),
        ("[1]", "ns.a | map('string')"),
        ("[1]", "ns.a[0:]"),
        ("{'a': 1}", "ns.a | chain({'b': 2})"),
    ] {
        assert!(render(&grown(start, step), &user("Hi")).is_ok(), "{step}");
    }
    // Ordinary templates have room for long conversations.
    let plain = ChatTemplate::new(PLAIN, &BTreeMap::new()).unwrap();
    let long: Vec<Message> = (0..20_000).map(|_| message(Role::User, "Hi")).collect();
    plain.render(&long).unwrap();
}

#[test]
fn operators_and_filters_have_their_values_within_the_bounds() {
    let template = "{{ 1 + 2 }} {{ 1.5 + 2 }} {{ 7 * 6 }} {{ 'ab' * 2 }} {{ [1] + [2] }} {{ [1] * 2 }} \
        {{ 'a' ~ 1 ~ none ~ '[x]' ~ true }} {{ {'b': 1, 'a': 2} }} {{ 'a\nb' | indent(2) }} \
        {{ ['a', 'b'] | join('-') }} {{ ','.join(['a', 'b']) }} {{ 'aXb'.replace('X', '+') }} \
        {{ '%s-%d' | format('a', 1) }} {{ [1, 2, 3] | batch(2) | list }} {{ ['a'] | map('upper') | join }}\
        {% macro f(a) %}[{{ a }}]{% endmacro %} {{ f('x') ~ f('y') }}\
        {% for x in [1, 2] %}{% if x == 1 %} one {{ x }}{% else %} two{% endif %}{% endfor %} \
        {% set a, b = 1, 2 %}{{ a }}{{ b }} {{ (1, 2) + (3,) }} {% set c %}{{ a }}+{% endset %}{{ c }}";
    let expected = "3 3.5 42 abab [1, 2] [1, 1] a1None[x]True {'b': 1, 'a': 2} a\n  b a-b a,b a+b a-1 \
                    [[1, 2], [3]] A [x][y] one 1 two 12 [1, 2, 3] 1+";
    assert_eq!(render(template, &user("x")).unwrap(), expected);
    let slices = "{{ 'abcd'[::-1] }} {{ ''[::-1] }} {{ [1, 2, 3, 4][3:0:-1] }} {{ [][::-1] }} {{ 'é字x'[1:] }} \
        {{ [1, 2, 3][-2:] }} {{ [1, 2, 3][:-5] }} {{ 'abcdef'[1:5:2] }} {{ [1, 2][9:] }} {{ missing[1:] }}";
    assert_eq!(render(slices, &user("x")).unwrap(), "dcba  [4, 3, 2] [] 字x [2, 3] [] bd [] []");
    for refused in [
        "{{ none + 1 }}",
        "{{ [1][::0] }}",
        "{{ 3[1:] }}",
        "{{ missing + 'a' }}",
        "{{ 'a' + 1 }}",
        "{{ 'a' * 'b' }}",
    ] {
        assert!(render(refused, &user("x")).is_err(), "{refused}");
    }
}

#[test]
fn arguments_keep_every_digit() {
    let long = "{\"id\": 18446744073709551617}";
    assert_eq!(arguments_json(long), Json::String(long.to_owned()));
    assert_eq!(
        arguments_json("{\"id\": 1844674407370955161}")["id"],
        1_844_674_407_370_955_161_u64
    );
}
