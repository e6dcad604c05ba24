"""Instructor: objects by calls and by schemas, whole and in part, and validation with a second try."""

import instructor
import openai
import pydantic

from checks import KEY, MODEL, OBJECT_TOKENS, TIMEOUT, URL, Closed, Operand, Sum, check, expect, run

OPENAI = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, timeout=TIMEOUT, max_retries=0)
OPTIONS = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is 12 + 7?"}],
    "max_tokens": OBJECT_TOKENS,
    "temperature": 0,
}


def client(mode):
    return instructor.from_openai(OPENAI, mode=mode)


@check
def objects_by_calls():
    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT):
        answer = client(mode).create(response_model=Operand, max_retries=0, **OPTIONS)
        expect(isinstance(answer, Operand), f"{answer!r} with {mode}")


@check
def objects_by_schemas():
    answer = client(instructor.Mode.JSON_SCHEMA).create(
        response_model=Sum, max_retries=0, **OPTIONS
    )
    expect(isinstance(answer, Sum), f"{answer!r}")


@check
def a_partial_object():
    stream = client(instructor.Mode.TOOLS).create_partial(response_model=Operand, **OPTIONS)
    *_, last = stream
    expect(last.value is not None, f"{last!r}")


@check
def a_second_try_after_a_failed_validation():
    tries = []

    # Short names, because the second prompt has the schema, the first call and the error.
    class Yes(Closed):
        ok: bool

        @pydantic.field_validator("ok")
        @classmethod
        def only_the_second_time(cls, ok):
            tries.append(ok)
            if len(tries) == 1:
                raise ValueError("no")
            return ok

    answer, raw = client(instructor.Mode.TOOLS).create_with_completion(
        response_model=Yes, max_retries=2, **OPTIONS
    )
    expect(isinstance(answer, Yes) and len(tries) == 2, f"{answer!r} after {tries}")
    expect(raw.choices[0].message.tool_calls, f"no call: {raw}")


if __name__ == "__main__":
    run()
