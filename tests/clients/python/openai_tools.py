"""OpenAI's Python package: tools, forced and not, streamed and not, and a loop over two turns."""

import openai
import pydantic

from checks import ADD, KEY, MODEL, OBJECT_TOKENS, TIMEOUT, URL, arguments_of_add, check, expect, run

CLIENT = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, timeout=TIMEOUT, max_retries=0)
CHAT = CLIENT.chat.completions
QUESTION = {"role": "user", "content": "What is 12 + 7?"}
OPTIONS = {
    "model": MODEL,
    "tools": [ADD],
    "max_completion_tokens": OBJECT_TOKENS,
    "temperature": 0,
    # Otherwise the embedded model may call without end.
    "parallel_tool_calls": False,
}
NAMED = {"type": "function", "function": {"name": "add"}}


def call_of(choice):
    """The only call of a choice."""
    expect(choice.finish_reason == "tool_calls", f"finish_reason {choice.finish_reason!r}")
    [call] = choice.message.tool_calls
    expect(call.type == "function" and call.function.name == "add", f"the call is {call}")
    return call


@check
def required_and_named_calls():
    for tool_choice in ("required", NAMED):
        answer = CHAT.create(messages=[QUESTION], tool_choice=tool_choice, **OPTIONS)
        call = call_of(answer.choices[0])
        expect(call.id, "the call has no id")
        expect(answer.choices[0].message.content is None, "content beside the call")
        arguments_of_add(call.function.arguments)


@check
def streamed_calls():
    whole = call_of(CHAT.create(messages=[QUESTION], tool_choice=NAMED, **OPTIONS).choices[0])
    ids, names, arguments, finish = [], [], "", None
    for chunk in CHAT.create(messages=[QUESTION], tool_choice=NAMED, stream=True, **OPTIONS):
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            for delta in choice.delta.tool_calls or []:
                expect(delta.index == 0, f"index {delta.index}")
                ids += [delta.id] if delta.id else []
                names += [delta.function.name] if delta.function.name else []
                arguments += delta.function.arguments or ""
    expect(len(ids) == 1 and names == ["add"] and finish == "tool_calls", f"{ids} {names} {finish}")
    expect(arguments == whole.function.arguments, f"{arguments!r}, whole {whole.function}")


@check
def the_helpers_parse_arguments():
    class Add(pydantic.BaseModel):
        """Adds."""

        a: int = pydantic.Field(ge=0, le=99)
        b: int = pydantic.Field(ge=0, le=99)

    options = {**OPTIONS, "tools": [openai.pydantic_function_tool(Add)], "tool_choice": "required"}
    parsed = CHAT.parse(messages=[QUESTION], **options).choices[0].message.tool_calls[0].function
    expect(isinstance(parsed.parsed_arguments, Add), f"parsed {parsed}")
    with CHAT.stream(messages=[QUESTION], **options) as stream:
        done = [e for e in stream if e.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion().choices[0].message.tool_calls[0].function
    expect(len(done) == 1, f"{len(done)} calls are done")
    expect(final.parsed_arguments == parsed.parsed_arguments, f"{final}, whole {parsed}")


@check
def a_loop_of_two_turns():
    messages = [{"role": "system", "content": "Use add."}, QUESTION]
    first = CHAT.create(messages=messages, tool_choice="required", **OPTIONS).choices[0]
    call = call_of(first)
    a, b = arguments_of_add(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": str(a + b)}
    # Once as the package's object and once as its dictionary with all fields.
    for received in (first.message, first.message.model_dump()):
        for tool_choice in ("none", "auto"):
            turns = [*messages, received, result]
            answer = CHAT.create(messages=turns, tool_choice=tool_choice, **OPTIONS).choices[0]
            expect(answer.message.content, f"no text with {tool_choice}: {answer}")
            expect(not answer.message.tool_calls, f"a call with {tool_choice}: {answer}")


@check
def several_functions():
    half = {"type": "function", "function": {"name": "half", "strict": True}}
    half["function"]["parameters"] = {
        "type": "object",
        "properties": {"of": {"type": "boolean"}},
        "required": ["of"],
        "additionalProperties": False,
    }
    allowed = {"type": "function", "function": {"name": "half"}}
    options = {**OPTIONS, "tools": [ADD, half]}
    for tool_choice in (
        allowed,
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [allowed]}},
    ):
        answer = CHAT.create(messages=[QUESTION], tool_choice=tool_choice, **options)
        [call] = answer.choices[0].message.tool_calls
        expect(call.function.name == "half", f"the call is {call}")
    answer = CHAT.create(messages=[QUESTION], tool_choice="required", **options)
    [call] = answer.choices[0].message.tool_calls
    expect(call.function.name in ("add", "half"), f"the call is {call}")


if __name__ == "__main__":
    run()
