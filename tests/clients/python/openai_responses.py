"""OpenAI's Python package: responses, streams, earlier responses, tools, objects."""

import openai

from checks import (
    ADD_PARAMETERS,
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

CLIENT = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, timeout=TIMEOUT, max_retries=0)
RESPONSES = CLIENT.responses
OPTIONS = {"model": MODEL, "max_output_tokens": 40, "temperature": 0}
QUESTION = "What is 12 + 7?"
ADD = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": ADD_PARAMETERS,
    "strict": True,
}
# Without parallel calls, of which the embedded model may write many.
TOOLS = {"tools": [ADD], "max_output_tokens": OBJECT_TOKENS, "parallel_tool_calls": False}


@check
def a_response():
    response = RESPONSES.create(input=QUESTION, **OPTIONS)
    expect(response.id.startswith("resp_"), f"the id is {response.id!r}")
    expect(response.status in ("completed", "incomplete"), f"status {response.status!r}")
    expect(response.output_text, "no text")
    usage = response.usage
    expect(usage.total_tokens == usage.input_tokens + usage.output_tokens, f"usage {usage}")
    expect(response.error is None, f"error {response.error}")


@check
def input_items_and_instructions():
    response = RESPONSES.create(
        instructions="Answer.",
        input=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "input_text", "text": "What is 1 + 1?"}]},
            {"role": "assistant", "content": "2"},
            {"type": "message", "role": "user", "content": QUESTION},
        ],
        metadata={"session_id": "r"},
        parallel_tool_calls=True,
        store=False,
        text={"format": {"type": "text"}},
        truncation="disabled",
        top_p=0.9,
        user="ann",
        **OPTIONS,
    )
    expect(response.output_text, "no text")
    expect(response.instructions == "Answer.", f"instructions {response.instructions!r}")


@check
def a_stream_has_the_same_text():
    whole = RESPONSES.create(input=QUESTION, **OPTIONS)
    events = list(RESPONSES.create(input=QUESTION, stream=True, **OPTIONS))
    kinds = [event.type for event in events if event.type != "response.output_text.delta"]
    expected = [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{whole.status}",
    ]
    expect(kinds == expected, f"the events are {kinds}")
    numbers = [event.sequence_number for event in events]
    expect(numbers == list(range(len(events))), f"the sequence numbers are {numbers}")
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    final = events[-1].response
    expect(text == final.output_text == whole.output_text, f"{text!r}, {whole.output_text!r}")
    expect(final.usage.output_tokens == whole.usage.output_tokens, f"usage {final.usage}")


@check
def the_helper_of_streams_accumulates():
    with RESPONSES.stream(input=QUESTION, **OPTIONS) as stream:
        parts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    expect("".join(parts) == final.output_text, f"{parts}, then {final.output_text!r}")


@check
def a_response_continues_an_earlier_one():
    first = RESPONSES.create(input=QUESTION, **OPTIONS)
    alone = RESPONSES.create(input="And 1 more?", **OPTIONS)
    options = {**OPTIONS, "input": "And 1 more?", "previous_response_id": first.id}
    second = RESPONSES.create(**options)
    expect(second.previous_response_id == first.id, f"previous {second.previous_response_id!r}")
    grown = second.usage.input_tokens - alone.usage.input_tokens
    expect(grown > first.usage.output_tokens, f"the prompt grows by {grown} tokens")
    *_, last = RESPONSES.create(stream=True, **options)
    expect(last.response.output_text == second.output_text, f"streamed {last.response}")


@check
def responses_are_read_and_deleted():
    kept = RESPONSES.create(input=QUESTION, **OPTIONS)
    expect(RESPONSES.retrieve(kept.id).output_text == kept.output_text, "another text")
    [item] = RESPONSES.input_items.list(kept.id)
    expect(item.content[0].text == QUESTION, f"the item is {item}")
    RESPONSES.delete(kept.id)
    unkept = RESPONSES.create(input=QUESTION, store=False, **OPTIONS)
    for response in (kept, unkept):
        raised(openai.NotFoundError, lambda: RESPONSES.retrieve(response.id))
        earlier = {"previous_response_id": response.id}
        raised(openai.APIStatusError, lambda: RESPONSES.create(input="?", **earlier, **OPTIONS))


@check
def calls_and_their_results():
    options = {**OPTIONS, **TOOLS}
    for tool_choice in ("required", {"type": "function", "name": "add"}):
        first = RESPONSES.create(input=QUESTION, tool_choice=tool_choice, **options)
        [call] = [item for item in first.output if item.type == "function_call"]
        expect(call.name == "add" and call.call_id, f"the call is {call}")
        a, b = arguments_of_add(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": str(a + b)}
    second = RESPONSES.create(
        input=[result], previous_response_id=first.id, tool_choice="none", **options
    )
    expect(second.output_text, f"no text after the result: {second.output}")
    # The same turns, sent as items.
    turns = [{"role": "user", "content": QUESTION}, *first.output, result]
    replayed = RESPONSES.create(input=turns, tool_choice="auto", **options)
    expect(replayed.output_text, f"no text after the result: {replayed.output}")


@check
def streamed_calls():
    options = {**OPTIONS, **TOOLS}
    stream = RESPONSES.create(input=QUESTION, tool_choice="required", stream=True, **options)
    events = list(stream)
    kind = "response.function_call_arguments"
    text = "".join(event.delta for event in events if event.type == f"{kind}.delta")
    [done] = [event for event in events if event.type == f"{kind}.done"]
    expect(text == done.arguments, f"{text!r}, then {done.arguments!r}")
    arguments_of_add(text)
    [call] = [item for item in events[-1].response.output if item.type == "function_call"]
    expect(call.arguments == text, f"the call is {call}")


@check
def an_object_is_parsed():
    options = {**OPTIONS, "max_output_tokens": OBJECT_TOKENS}
    response = RESPONSES.parse(input=QUESTION, text_format=Sum, **options)
    expect(isinstance(response.output_parsed, Sum), f"parsed {response.output_parsed!r}")


@check
def errors_are_typed():
    wrong = {**OPTIONS, "temperature": 3}
    error = raised(openai.BadRequestError, lambda: RESPONSES.create(input="?", **wrong))
    expect(error.param == "temperature", f"param {error.param!r}")
    raised(openai.NotFoundError, lambda: RESPONSES.create(model="no-such-model", input="?"))
    earlier = {"previous_response_id": "resp_" + "0" * 32}
    raised(openai.APIStatusError, lambda: RESPONSES.create(input="?", **earlier, **OPTIONS))
    image = [{"role": "user", "content": [{"type": "input_image", "image_url": "https://x/y"}]}]
    raised(openai.BadRequestError, lambda: RESPONSES.create(input=image, **OPTIONS))
    search = [{"type": "web_search"}]
    raised(openai.BadRequestError, lambda: RESPONSES.create(input="?", tools=search, **OPTIONS))


if __name__ == "__main__":
    run()
