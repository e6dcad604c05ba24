"""LiteLLM: chat, streams, tools, objects, responses, Anthropic's messages, and typed errors."""

import litellm

from checks import (
    ADD,
    KEY,
    MODEL,
    OBJECT_TOKENS,
    TIMEOUT,
    URL,
    Sum,
    arguments_of_add,
    check,
    expect,
    raised,
    run,
)

QUESTION = {"role": "user", "content": "What is 12 + 7?"}
OPENAI = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": KEY, "timeout": TIMEOUT}
ANTHROPIC = {**OPENAI, "model": f"anthropic/{MODEL}", "api_base": URL}


def ask(server=OPENAI, messages=(QUESTION,), **more):
    options = {"max_tokens": 40, "temperature": 0, "num_retries": 0, **server, **more}
    return litellm.completion(messages=list(messages), **options)


def check_chat(server):
    """A completion and a stream with the same text."""
    whole = ask(server)
    text = "".join(part.choices[0].delta.content or "" for part in ask(server, stream=True))
    expected = whole.choices[0].message.content
    expect(text and text == expected, f"streamed {text!r}, whole {expected!r}")
    expect(whole.usage.total_tokens > 0, f"usage {whole.usage}")


def check_tools(server):
    """A forced call, its result, and an answer."""
    options = {"max_tokens": OBJECT_TOKENS, "tools": [ADD], "parallel_tool_calls": False}
    first = ask(server, tool_choice="required", **options).choices[0].message
    [call] = first.tool_calls
    a, b = arguments_of_add(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": str(a + b)}
    turns = [QUESTION, first.model_dump(), result]
    answer = ask(server, turns, tool_choice="none", **options).choices[0].message
    expect(answer.content, f"no text after the result: {answer}")
    stream = list(ask(server, tool_choice="required", stream=True, **options))
    built = litellm.stream_chunk_builder(stream).choices[0].message.tool_calls
    expect(len(built) == 1, f"the calls are {built}")
    streamed = arguments_of_add(built[0].function.arguments)
    expect(streamed == (a, b), f"streamed {streamed}, whole {(a, b)}")


@check
def chat():
    check_chat(OPENAI)


@check
def tools():
    check_tools(OPENAI)


@check
def objects():
    answer = ask(response_format=Sum, max_tokens=OBJECT_TOKENS).choices[0].message.content
    Sum.model_validate_json(answer)


@check
async def the_asynchronous_client():
    options = {**OPENAI, "messages": [QUESTION], "max_tokens": 8, "temperature": 0}
    stream = await litellm.acompletion(stream=True, **options)
    parts = [part.choices[0].delta.content or "" async for part in stream]
    expect("".join(parts), "no text")


@check
def text_completions():
    options = {**OPENAI, "model": f"text-completion-openai/{MODEL}"}
    answer = litellm.text_completion(prompt="1 + 1 =", max_tokens=8, temperature=0, **options)
    expect(answer.choices[0].text, f"no text: {answer}")


@check
def responses():
    options = {**OPENAI, "max_output_tokens": 40, "temperature": 0}
    answer = litellm.responses(input="What is 12 + 7?", **options)
    expect(answer.output[0].content[0].text, f"no text: {answer}")


@check
def messages_of_anthropic():
    check_chat(ANTHROPIC)
    check_tools(ANTHROPIC)


@check
def errors_are_typed():
    raised(litellm.NotFoundError, lambda: ask(model="openai/no-such-model"))
    raised(litellm.AuthenticationError, lambda: ask(api_key="no-such-key"))
    raised(litellm.BadRequestError, lambda: ask(temperature=3))
    long = [{"role": "user", "content": "1 " * 3000}]
    raised(litellm.ContextWindowExceededError, lambda: ask(messages=long))


if __name__ == "__main__":
    run()
