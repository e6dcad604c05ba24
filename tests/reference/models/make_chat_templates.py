"""Makes chat_templates.json: what transformers renders with templates that have tools.

The templates are small ones of this script, with the constructs that the templates of twelve families have:
how they print functions, calls and results, and how they refuse conversations. `messages` and `tools` are
those of an OpenAI client. transformers gets them as its documentation asks: the arguments of calls as
objects, and functions without `strict`.

Needs transformers >= 5 and jinja2. Run from the repository root:
    python tests/reference/models/make_chat_templates.py
"""

import copy
import json
import pathlib
import sys

from transformers.utils.chat_template_utils import render_jinja_template

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
from provenance import made_by  # noqa: E402

OUT = pathlib.Path(__file__).with_name("chat_templates.json")
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

HERMES = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools>\\nWrite <tool_call>{...}</tool_call>.<|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}{%- else %}{%- set content = '' %}{%- endif %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content is string %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

LLAMA3 = """\
{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "[system] " + date_string + " " + system_message + "<|eot_id|>" }}
{%- if not tools is none %}
    {%- set first_user_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
    {{- "[user] <|python_tag|> or JSON\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
    {{- first_user_message + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '[' + message['role'] + '] ' + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("one call at a time") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '[assistant] {"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "[ipython] " }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '[assistant] ' }}
{%- endif %}
"""

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("roles must alternate") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS][" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST]" + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST]" + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS][" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}
                {{- raise_exception("ids have length 9") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- message["content"] + eos_token }}
    {%- elif message["role"] == "tool" %}
        {%- if message.content is defined and message.content.content is defined %}
            {%- set content = message.content.content %}
        {%- else %}
            {%- set content = message.content %}
        {%- endif %}
        {{- '[TOOL_RESULTS]{"content": ' + content|string + ", " }}
        {{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception("unknown role") }}
    {%- endif %}
{%- endfor %}
"""

SMOLLM3 = """\
{%- if messages[0].role == "system" -%}
    {%- set custom_instructions = messages[0].content.replace("/no_think", "").rstrip() -%}
{%- endif -%}
{{- "<|im_start|>system\\n" -}}
{%- if custom_instructions -%}{{- custom_instructions + "\\n\\n" -}}{%- endif -%}
{%- if xml_tools or python_tools -%}
    {%- if xml_tools -%}
        {%- set ns = namespace(shown="<tools>\\n") -%}
        {%- for tool in xml_tools[:] -%}
            {%- set ns.shown = ns.shown ~ (tool | string) ~ "\\n" -%}
        {%- endfor -%}
        {{- ns.shown + "</tools>\\nWrite <tool_call>{...}</tool_call>." -}}
    {%- endif -%}
{%- endif -%}
{{- "<|im_end|>\\n" -}}
{%- for message in messages -%}
    {%- set content = message.content if message.content is string else "" -%}
    {%- if message.role == "user" -%}
        {{ "<|im_start|>user\\n" + content + "<|im_end|>\\n" }}
    {%- elif message.role == "assistant" -%}
        {% generation %}{{ "<|im_start|>assistant\\n" + content.lstrip("\\n") + "<|im_end|>\\n" }}{% endgeneration %}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ "<|im_start|>assistant\\n" }}{%- endif -%}
"""

PHI4 = """\
{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}\
{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}\
{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"""

DEEPSEEK = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{- '<User>' + message['content'] }}{%- endif %}
    {%- if message['role'] == 'assistant' and message['content'] is none %}
        {{- '<Calls>' + message['tool_calls'][0]['function']['name'] + (tools | tojson) }}
    {%- endif %}
    {%- if message['role'] == 'assistant' and message['content'] is not none %}
        {{- '<Assistant>' + message['content'].split('</think>')[-1] }}
    {%- endif %}
    {%- if message['role'] == 'tool' %}{{- '<Output>' + message['content'] }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<Assistant><think>\\n' }}{%- endif %}"""

GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] | trim + '\\n\\n' %}\
{% set turns = messages[1:] %}{% else %}{% set first = '' %}{% set turns = messages %}{% endif %}\
{% for message in turns %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('roles must alternate') }}{% endif %}\
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}\
{{ '<start_of_turn>' + role + '\\n' + (first if loop.first else '') + message['content'] | trim + '<end_of_turn>\\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

LLAMA2 = """\
{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}\
{% set system_message = '<<SYS>>\\n' + messages[0]['content'].strip() + '\\n<</SYS>>\\n\\n' %}\
{% else %}{% set loop_messages = messages %}{% set system_message = '' %}{% endif %}\
{% for message in loop_messages %}\
{% if loop.index0 == 0 and system_message != false %}{% set content = system_message + message['content'] %}\
{% else %}{% set content = message['content'] %}{% endif %}\
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""

PHI3 = """\
{% for message in messages %}{% if message['role'] in ['system', 'user', 'assistant'] and message['content'] %}\
{{ '<|' ~ message['role'] ~ '|>\\n' ~ message['content'] ~ '<|end|>\\n' }}{% else %}{% continue %}{% endif %}\
{% endfor %}{{ {true: '<|assistant|>\\n', false: eos_token}[add_generation_prompt] }}"""

COMMAND_R = """\
{{ bos_token }}{% macro parameters(tool) -%}
{%- for name, field in (tool.parameters or {'properties': {}}).properties | items -%}
{{ '    ' if loop.first }}{{ name }} ({{ field.type | upper }}{{ ', required' if name in tool.parameters.required }})
{%- if not loop.last %}, {% endif -%}
{%- endfor -%}
{%- endmacro %}
{% set ns = namespace(turn=0) %}
{% for tool in tools or [] %}
## {{ tool.function.name | default('unnamed', true) }}: {{ parameters(tool.function) }}
{% endfor %}
{% for message in messages | rejectattr('role', 'equalto', 'tool') %}
{% set ns.turn = ns.turn + 1 %}
{{ '%d/%d' | format(ns.turn, messages | length) }} <|{{ message.role | upper }}_TOKEN|>{{ message.content or '' -}}
{% for made in message.tool_calls or [] %}
{{ {'tool_name': made.function.name, 'parameters': made.function.arguments, 'id': loop.index0} | tojson(indent=4) }}
{% endfor %}
{% endfor %}"""

GRANITE = """\
{%- set roles = {'user': 'u', 'tool': 'tool_response', 'assistant': 'a', 'system': 's'} -%}
{%- for role in roles %}{{- role ~ ';' }}{%- endfor -%}
{%- if tools %}{{- '<|tools|>' + tools | tojson(indent=2, sort_keys=true) + '\\n' }}{%- endif -%}
{%- for message in messages -%}
    {%- set m = dict(role=roles[message.role], calls=message.tool_calls | default([], true) | length) -%}
    {{- '<|' + m['role'] + '|' ~ m.calls ~ '>' ~ (message['content'] or '')[:12] ~ '\\n' -}}
{%- endfor -%}"""

GPT_OSS = """\
{%- macro shown(value, level=0) -%}
    {%- if value is mapping -%}
        {%- for key, inner in value | dictsort -%}{{- '\\n' ~ ' ' * level ~ key ~ ':' ~ shown(inner, level + 1) -}}{%- endfor -%}
    {%- elif value is iterable and value is not string -%}
        {{- value | map('string') | join(' | ') -}}
    {%- else -%}{{- value -}}{%- endif -%}
{%- endmacro -%}
{{- '<|start|>system<|message|>' ~ ('Reasoning: ' ~ (reasoning_effort | default('medium'))) ~ '<|end|>' -}}
{%- for tool in tools or [] -%}{{- 'type ' ~ tool.function.name ~ shown(tool.function.parameters or {}) -}}{%- endfor -%}
{%- for message in messages | reverse | list -%}
    {%- if loop.revindex0 == 0 %}{% break %}{% endif -%}
    {{- '<|start|>' ~ message.role ~ ('<|channel|>final' if message.role == 'assistant') ~ '<|message|>' ~ (message.content or '') -}}
{%- endfor -%}"""

DUMPS = """\
{%- set value = {'zz': [1, 2.5, 1e16, 1e-5, {}, []], 'b': {'é"': '🦀\\n', 'a': none}, 'c': true} -%}
{{ value | tojson }};{{ value | tojson(indent=2) }};{{ value | tojson(indent=0) }};{{ value | tojson(sort_keys=true) }};\
{{ value | tojson(separators=(',', ':')) }};{{ value | tojson(indent=1, separators=(', ', ' = ')) }};\
{{ value | tojson(ensure_ascii=true) }};{{ value | tojson(ensure_ascii=true, sort_keys=true, indent=3) }};\
{% for key in value %}{{ key }},{% endfor %}{{ value }}{{ value.zz }}{{ value.b.a }}{{ value | length }}"""

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city, as °C & \"words\".",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "it's a <name>"},
                "days": {"type": "integer", "minimum": 0, "default": None, "items": []},
                "exact": {"type": "boolean", "default": True, "multipleOf": 0.5, "enum": [True, False]},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "now", "description": "The time\nnow."}}


def call(identifier: str, name: str, arguments: str) -> dict:
    function = {"name": name, "arguments": arguments}
    return {"id": identifier, "type": "function", "function": function}


SYSTEM = {"role": "system", "content": "Be brief. "}
ASK = {"role": "user", "content": " Is it cold in Zürich? "}
ONE_CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [call("a1b2c3d4e", "get_weather", '{"days": 2, "city": "Zürich", "exact": true}')],
}
TWO_CALLS = {
    "role": "assistant",
    "content": "Let me see.",
    "tool_calls": [call("a1b2c3d4e", "get_weather", '{"city": "Zürich"}'), call("f6g7h8i9j", "now", "{}")],
}
RESULT = {"role": "tool", "tool_call_id": "a1b2c3d4e", "content": '{"degrees": -3.5}'}
TIME = {"role": "tool", "tool_call_id": "f6g7h8i9j", "content": "12:30"}
ANSWER = {"role": "assistant", "content": "Yes, it's -3.5 °C."}
THANKS = {"role": "user", "content": "Thanks!"}
THOUGHT = {**ONE_CALL, "reasoning_content": "\nA tool knows.\n"}

TOOLS = [WEATHER, CLOCK]
# Templates that show no functions. Hone describes those in the system message, which transformers does not.
WITHOUT_TOOLS = ["gemma", "llama2", "phi3", "dumps"]
# name: (template, variables, conversations)
CASES = {
    "hermes": (
        HERMES,
        {},
        [[SYSTEM, ASK], [ASK, ONE_CALL, RESULT], [SYSTEM, ASK, TWO_CALLS, RESULT, TIME, ANSWER, THANKS]],
    ),
    "hermes, thinking": (HERMES, {"enable_thinking": False}, [[ASK, THOUGHT, RESULT]]),
    "llama3": (LLAMA3, {"date_string": "1 Jan 2025"}, [[SYSTEM, ASK], [ASK, ONE_CALL, RESULT, ANSWER, THANKS]]),
    "mistral": (
        MISTRAL,
        {},
        [[SYSTEM, ASK], [ASK, ONE_CALL, RESULT, ANSWER, THANKS], [ASK, TWO_CALLS, RESULT, TIME]],
    ),
    "smollm3": (SMOLLM3, {}, [[ASK], [SYSTEM, ASK, ANSWER, THANKS]]),
    "phi4": (PHI4, {}, [[SYSTEM, ASK], [SYSTEM, ASK, ANSWER, THANKS]]),
    "deepseek": (DEEPSEEK, {}, [[ASK, ONE_CALL, RESULT]]),
    "gemma": (GEMMA, {}, [[ASK], [ASK, ANSWER, THANKS]]),
    "llama2": (LLAMA2, {}, [[SYSTEM, ASK], [ASK, ANSWER, THANKS]]),
    "phi3": (PHI3, {}, [[SYSTEM, ASK], [ASK, ANSWER, THANKS]]),
    "command-r": (COMMAND_R, {}, [[SYSTEM, ASK], [ASK, ONE_CALL, RESULT, ANSWER, THANKS]]),
    "granite": (GRANITE, {}, [[SYSTEM, ASK, ANSWER, THANKS]]),
    "gpt-oss": (GPT_OSS, {"reasoning_effort": "low"}, [[SYSTEM, ASK], [ASK, ANSWER, THANKS]]),
    "dumps": (DUMPS, {}, [[ASK]]),
}


def as_transformers_asks(messages: list[dict]) -> list[dict]:
    """A copy with the arguments of calls as objects."""
    messages = copy.deepcopy(messages)
    for message in messages:
        for made in message.get("tool_calls", []):
            made["function"]["arguments"] = json.loads(made["function"]["arguments"])
    return messages


def rendered(name: str, template: str, variables: dict, messages: list[dict], tools: list[dict] | None) -> str:
    messages = as_transformers_asks(messages)
    variables = {**SPECIAL_TOKENS, **variables}
    if tools and name == "smollm3":
        variables["xml_tools"] = tools
    if tools and name == "phi4":
        functions = [tool["function"] for tool in tools]
        messages[0]["tools"] = json.dumps(functions, ensure_ascii=False)
    texts, _ = render_jinja_template(
        conversations=[messages],
        tools=tools,
        chat_template=template,
        add_generation_prompt=True,
        **variables,
    )
    return texts[0]


def main() -> None:
    cases = []
    for name, (template, variables, conversations) in CASES.items():
        for messages in conversations:
            for tools in (None,) if name in WITHOUT_TOOLS else (None, TOOLS):
                cases.append(
                    {
                        "name": name,
                        "template": template,
                        "variables": variables,
                        "messages": messages,
                        "tools": tools or [],
                        "rendered": rendered(name, template, variables, messages, tools),
                    }
                )
    content = {"made_by": made_by("transformers"), "special_tokens": SPECIAL_TOKENS, "cases": cases}
    OUT.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n")
    print(f"{len(cases)} cases in {OUT.name}")


if __name__ == "__main__":
    main()
