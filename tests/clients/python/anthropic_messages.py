"""Anthropic's Python package: messages, streams, tools, objects, token counts, errors, retries."""

from typing import Literal

import anthropic
import pydantic

from checks import (
    ADD_PARAMETERS,
    KEY,
    MODEL,
    OBJECT_TOKENS,
    TIMEOUT,
    URL,
    arguments_of_add,
    check,
    expect,
    raised,
    run,
)


def client(key=KEY, retries=0):
    return anthropic.Anthropic(base_url=URL, api_key=key, timeout=TIMEOUT, max_retries=retries)


MESSAGES = client().messages
QUESTION = {"role": "user", "content": "What is 12 + 7?"}
# The package has no argument for the temperature.
OPTIONS = {"model": MODEL, "max_tokens": 40, "extra_body": {"temperature": 0}}
ADD = {"name": "add", "description": "Adds.", "input_schema": ADD_PARAMETERS}
TOOLS = {**OPTIONS, "max_tokens": OBJECT_TOKENS, "tools": [ADD]}


def text_of(message):
    """The text of a message."""
    return "".join(block.text for block in message.content if block.type == "text")


@check
def a_message():
    message = MESSAGES.create(messages=[QUESTION], **OPTIONS)
    expect(message.id.startswith("msg_"), f"the id is {message.id!r}")
    expect((message.type, message.role) == ("message", "assistant"), f"{message}")
    expect(message.stop_reason in ("end_turn", "max_tokens"), f"reason {message.stop_reason!r}")
    expect(text_of(message), f"no text: {message.content}")
    expect(message.usage.input_tokens > 0 and message.usage.output_tokens > 0, f"{message.usage}")


@check
def systems_blocks_and_options():
    message = MESSAGES.create(
        system=[{"type": "text", "text": "Answer.", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "What is 1 + 1?"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "2"}]},
            QUESTION,
        ],
        metadata={"user_id": "ann"},
        stop_sequences=["\n\n\n"],
        service_tier="auto",
        thinking={"type": "disabled"},
        model=MODEL,
        max_tokens=20,
        extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 20, "seed": 1},
    )
    expect(text_of(message), f"no text: {message.content}")


@check
def a_stop_sequence_ends_the_text():
    whole = text_of(MESSAGES.create(messages=[QUESTION], **OPTIONS))
    stop = whole[2:4]
    message = MESSAGES.create(messages=[QUESTION], stop_sequences=[stop], **OPTIONS)
    found = (message.stop_reason, message.stop_sequence, text_of(message))
    expect(found == ("stop_sequence", stop, whole[: whole.index(stop)]), f"{found} of {whole!r}")


@check
def a_stream_has_the_same_text():
    whole = MESSAGES.create(messages=[QUESTION], **OPTIONS)
    events = list(MESSAGES.create(messages=[QUESTION], stream=True, **OPTIONS))
    kinds = [event.type for event in events if event.type not in ("content_block_delta", "ping")]
    expected = [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    expect(kinds == expected, f"the events are {kinds}")
    text = "".join(e.delta.text for e in events if e.type == "content_block_delta")
    expect(text == text_of(whole), f"streamed {text!r}, whole {text_of(whole)!r}")
    [end] = [event for event in events if event.type == "message_delta"]
    expect(end.delta.stop_reason == whole.stop_reason, f"the end is {end}")
    expect(end.usage.output_tokens == whole.usage.output_tokens, f"usage {end.usage}")


@check
def the_helper_of_streams_accumulates():
    with MESSAGES.stream(messages=[QUESTION], **OPTIONS) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    expect(text and text == text_of(final), f"{text!r}, then {final.content}")


def call_of(message):
    """The only call of a message."""
    expect(message.stop_reason == "tool_use", f"stop reason {message.stop_reason!r}")
    [call] = [block for block in message.content if block.type == "tool_use"]
    expect(call.name == "add" and call.id, f"the call is {call}")
    return call


@check
def calls_and_their_results():
    any_tool = {"type": "any", "disable_parallel_tool_use": True}
    for tool_choice in (any_tool, {"type": "tool", "name": "add"}):
        first = MESSAGES.create(messages=[QUESTION], tool_choice=tool_choice, **TOOLS)
        call = call_of(first)
        a, b = arguments_of_add(call.input)
    block = {"type": "tool_result", "tool_use_id": call.id, "content": str(a + b)}
    parts = {**block, "content": [{"type": "text", "text": str(a + b)}], "is_error": False}
    for result, choice in ((block, {"type": "none"}), (parts, {"type": "auto"})):
        turns = [QUESTION, {"role": "assistant", "content": first.content}]
        turns.append({"role": "user", "content": [result]})
        answer = MESSAGES.create(messages=turns, tool_choice=choice, **TOOLS)
        expect(text_of(answer), f"no text after the result: {answer.content}")


@check
def streamed_calls():
    choice = {"type": "tool", "name": "add", "disable_parallel_tool_use": True}
    whole = call_of(MESSAGES.create(messages=[QUESTION], tool_choice=choice, **TOOLS))
    with MESSAGES.stream(messages=[QUESTION], tool_choice=choice, **TOOLS) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        call = call_of(stream.get_final_message())
    expect(arguments_of_add("".join(parts)) == arguments_of_add(call.input), f"{parts}, {call}")
    expect(call.input == whole.input, f"streamed {call}, whole {whole}")


@check
def an_object_is_parsed():
    class Answer(pydantic.BaseModel):
        sign: Literal["plus", "minus"]
        certain: bool

    options = {**OPTIONS, "max_tokens": OBJECT_TOKENS}
    message = MESSAGES.parse(messages=[QUESTION], output_format=Answer, **options)
    expect(isinstance(message.parsed_output, Answer), f"parsed {message}")


@check
def tokens_are_counted():
    for more in ({}, {"system": "Answer."}, {"tools": [ADD]}):
        options = {"model": MODEL, "messages": [QUESTION], **more}
        counted = MESSAGES.count_tokens(**options).input_tokens
        usage = MESSAGES.create(max_tokens=1, **options).usage
        # As with Anthropic, the input tokens do not contain those from the prefix cache.
        used = usage.input_tokens + (usage.cache_read_input_tokens or 0)
        expect(counted == used, f"{counted} counted, {used} used, with {more}")


def error_of(kind, name, action):
    """The error of an action, whose body must have Anthropic's shape."""
    error = raised(kind, action)
    expect(error.body["type"] == "error", f"the body is {error.body}")
    expect(error.body["error"]["type"] == name, f"the body is {error.body}")
    expect(error.body["error"]["message"], f"the body is {error.body}")
    return error


@check
def errors_are_typed():
    def ask(key=KEY, messages=(QUESTION,), **more):
        return client(key).messages.create(messages=list(messages), **{**OPTIONS, **more})

    invalid = (anthropic.BadRequestError, "invalid_request_error")
    error_of(*invalid, lambda: ask(extra_body={"temperature": 3}))
    error_of(*invalid, lambda: ask(extra_body={"no_such_field": 1}))
    error_of(*invalid, lambda: ask(messages=[]))
    error_of(*invalid, lambda: ask(messages=[{"role": "user", "content": "1 " * 3000}]))
    image = {"type": "image", "source": {"type": "url", "url": "https://x/y"}}
    error_of(*invalid, lambda: ask(messages=[{"role": "user", "content": [image]}]))
    unknown = (anthropic.AuthenticationError, "authentication_error")
    error_of(*unknown, lambda: ask("no-such-key"))
    error_of(anthropic.PermissionDeniedError, "permission_error", lambda: ask("feedback-key"))
    error_of(anthropic.NotFoundError, "not_found_error", lambda: ask(model="no-such-model"))


@check
def retries_after_a_limit():
    key = "limited-anthropic-key"
    options = {"model": MODEL, "messages": [QUESTION]}

    def use_up():
        for _ in range(200):
            client(key).messages.count_tokens(**options)

    # More than once, because the limit may permit a request between the two.
    for _ in range(5):
        error = error_of(anthropic.RateLimitError, "rate_limit_error", use_up)
        expect(0 < float(error.response.headers["retry-after"]) <= 2, f"{error.response.headers}")
        raw = client(key, retries=3).messages.with_raw_response.create(max_tokens=4, **options)
        expect(raw.parse().usage.output_tokens > 0, "no answer after the wait")
        if raw.retries_taken > 0:
            return
    raise AssertionError("no request was repeated")


if __name__ == "__main__":
    run()
