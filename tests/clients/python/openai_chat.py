"""OpenAI's Python package: chat and text completions, streams, objects, and stored completions."""

import asyncio

import openai

from checks import KEY, MODEL, OBJECT_TOKENS, TIMEOUT, URL, Sum, check, expect, raised, run

CLIENT = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, timeout=TIMEOUT, max_retries=0)
CHAT = CLIENT.chat.completions


def messages(question="What is 12 + 7?"):
    return [{"role": "user", "content": question}]


def ask(question="What is 12 + 7?", **more):
    options = {"model": MODEL, "max_completion_tokens": 40, "seed": 1, **more}
    return CHAT.create(messages=messages(question), **options)


@check
def models_are_listed():
    names = [model.id for model in CLIENT.models.list()]
    expect(MODEL in names, f"the models are {names}")
    expect(CLIENT.models.retrieve(MODEL).id == MODEL, "the model has another id")


@check
def a_completion_has_usage_and_log_probabilities():
    completion = ask(logprobs=True, top_logprobs=2)
    expect(completion.id.startswith("chatcmpl-"), f"the id is {completion.id!r}")
    choice = completion.choices[0]
    expect(choice.finish_reason in ("stop", "length"), f"finish_reason {choice.finish_reason!r}")
    tokens = choice.logprobs.content
    expect(tokens and all(token.logprob <= 0 for token in tokens), f"tokens {tokens}")
    expect(all(len(token.top_logprobs) == 2 for token in tokens), "not two top_logprobs per token")
    usage = completion.usage
    expect(usage.prompt_tokens > 0 and usage.completion_tokens >= len(tokens), f"usage {usage}")
    expect(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, f"usage {usage}")


@check
def the_version_is_in_the_headers():
    raw = CHAT.with_raw_response.create(model=MODEL, messages=messages(), max_tokens=8)
    version, fingerprint = raw.headers["x-hone-policy-version"], raw.parse().system_fingerprint
    expect(fingerprint == f"hone-v{version}", f"{fingerprint!r} with version {version!r}")
    expect(raw.request_id, "no request id")


@check
def a_stream_has_the_same_text():
    whole = ask()
    text, finish, usage = "", None, None
    for chunk in ask(stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    expect(usage == whole.usage, f"usage {usage}, whole {whole.usage}")
    streamed, choice = (text, finish), whole.choices[0]
    expect(streamed == (choice.message.content, choice.finish_reason), f"{streamed}, {choice}")


@check
def the_helper_of_streams_accumulates():
    options = {"model": MODEL, "messages": messages(), "max_completion_tokens": 40, "seed": 1}
    with CHAT.stream(**options) as stream:
        parts = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    text = final.choices[0].message.content
    expect("".join(parts) == text == ask().choices[0].message.content, f"{parts}, then {text!r}")


@check
def common_fields_are_accepted():
    completion = CHAT.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": "Answer."},
            {"role": "user", "name": "ann", "content": [{"type": "text", "text": "What is"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "What?"}], "refusal": None},
            {"role": "user", "content": [{"type": "text", "text": t} for t in ("1 + ", "2?")]},
        ],
        frequency_penalty=0.5,
        logit_bias={"5": -100},
        max_completion_tokens=12,
        metadata={"session_id": "s"},
        modalities=["text"],
        n=2,
        parallel_tool_calls=True,
        presence_penalty=0.5,
        prompt_cache_key="k",
        prompt_cache_options={"mode": "implicit"},
        reasoning_effort="low",
        response_format={"type": "text"},
        safety_identifier="x",
        service_tier="auto",
        stop=["\n\n\n"],
        store=False,
        temperature=0.7,
        top_p=0.9,
        user="ann",
        verbosity="low",
    )
    expect([choice.index for choice in completion.choices] == [0, 1], f"{completion.choices}")


@check
def an_object_is_parsed():
    parsed = CHAT.parse(
        model=MODEL,
        messages=messages(),
        response_format=Sum,
        max_completion_tokens=OBJECT_TOKENS,
        temperature=0,
    )
    message = parsed.choices[0].message
    expect(isinstance(message.parsed, Sum), f"parsed {message.parsed!r} from {message.content!r}")


@check
def a_streamed_object_is_parsed():
    options = {"response_format": Sum, "max_completion_tokens": OBJECT_TOKENS, "temperature": 0}
    with CHAT.stream(model=MODEL, messages=messages(), **options) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_completion().choices[0].message
    expect("content.done" in kinds, f"the events are {kinds}")
    expect(isinstance(message.parsed, Sum), f"parsed {message.parsed!r} from {message.content!r}")


@check
def json_mode_answers_an_object():
    # Only a stop token ends an object with certainty, so the text may be cut.
    answer = ask(response_format={"type": "json_object"}, temperature=0).choices[0]
    expect(answer.message.content.lstrip().startswith("{"), f"the text is {answer.message.content!r}")


@check
def text_completions():
    options = {"model": MODEL, "seed": 3, "max_tokens": 12, "temperature": 1.0}
    whole = CLIENT.completions.create(prompt="What is 3 + 4?", logprobs=2, echo=False, **options)
    expect(whole.id.startswith("cmpl-"), f"the text completion's id is {whole.id!r}")
    choice = whole.choices[0]
    tokens = choice.logprobs.tokens
    expect("".join(tokens) == choice.text, f"{tokens} are not the tokens of {choice.text!r}")
    parts = CLIENT.completions.create(prompt="What is 3 + 4?", stream=True, **options)
    text = "".join(choice.text for part in parts for choice in part.choices)
    expect(text == choice.text, f"streamed {text!r}, whole {choice.text!r}")
    several = CLIENT.completions.create(prompt=["1 + 1", "2 + 2"], n=2, echo=True, **options)
    starts = [choice.text[:5] for choice in several.choices]
    expect(starts == ["1 + 1"] * 2 + ["2 + 2"] * 2, f"the echoed prompts are {starts}")


@check
def stored_completions():
    unkept = ask(store=False)
    error = raised(openai.NotFoundError, lambda: feedback(unkept.id))
    expect(error.code == "completion_not_stored", f"feedback without store: {error}")
    kept = [ask(f"What is 5 + {n}?", metadata={"n": str(n)}) for n in range(3)]
    ids = {completion.id for completion in kept}
    listed = {completion.id for completion in CHAT.list(order="desc", limit=2)}
    expect(ids <= listed and unkept.id not in listed, "the list of completions is wrong")
    found = CHAT.list(metadata={"n": "1"}).data
    expect(any(completion.id == kept[1].id for completion in found), "metadata does not filter")
    read = CHAT.retrieve(kept[0].id)
    expect(read.choices[0].message.content == kept[0].choices[0].message.content, "another text")
    [message] = CHAT.messages.list(kept[0].id).data
    expect((message.role, message.content) == ("user", "What is 5 + 0?"), f"message {message}")
    changed = CHAT.update(kept[0].id, metadata={"x": "y"})
    expect(changed.metadata == {"x": "y"}, f"metadata {changed.metadata}")
    expect(CHAT.delete(kept[0].id).deleted, "the completion is not deleted")
    error = raised(openai.NotFoundError, lambda: CHAT.retrieve(kept[0].id))
    expect(error.code == "completion_not_found", f"erased completion: {error}")


def feedback(completion_id):
    """Posts feedback through the package, which has no method for it."""
    body = {"completion_id": completion_id, "name": "thumbs", "value": 1}
    return CLIENT.post("/feedback", cast_to=object, body=body)


@check
async def concurrent_streams_of_the_asynchronous_client():
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, timeout=TIMEOUT) as client:

        async def text(seed):
            options = {"model": MODEL, "messages": messages(), "max_tokens": 20, "seed": seed}
            parts = await client.chat.completions.create(stream=True, **options)
            return "".join([c.delta.content or "" async for part in parts for c in part.choices])

        texts = await asyncio.gather(*[text(seed) for seed in (1, 2, 1)])
    expect(texts[0] == texts[2], f"two texts with one seed: {texts}")


if __name__ == "__main__":
    run()
