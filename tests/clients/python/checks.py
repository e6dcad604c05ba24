"""What the sessions share: the daemon's address, the checks of a session, and objects to ask for.

`run.py` starts each session with the variables `HONE_URL` and `HONE_KEY`. A session prints one line of
JSON for each of its checks.
"""

import asyncio
import enum
import inspect
import json
import os
import time
import traceback

import pydantic

URL = os.environ["HONE_URL"]
KEY = os.environ["HONE_KEY"]
MODEL = "default"
# Seconds that a client waits for a response.
TIMEOUT = 60
# Enough for every object and call below, in the tokens of the embedded model.
OBJECT_TOKENS = 200

CHECKS = []


def check(function):
    """Adds a function to the checks of the session."""
    CHECKS.append(function)
    return function


def expect(holds, otherwise):
    if not holds:
        raise AssertionError(otherwise)


def raised(kind, action):
    """The error of type `kind` that an action raises."""
    try:
        result = action()
    except kind as error:
        return error
    raise AssertionError(f"{result!r} instead of {kind.__name__}")


def run():
    """Runs the checks in the order of their definition, and prints what became of them."""
    # One loop for all checks, because the clients keep connections that belong to it.
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    for function in CHECKS:
        began, error = time.monotonic(), None
        try:
            result = function()
            if inspect.isawaitable(result):
                loop.run_until_complete(result)
        except Exception as failure:
            frames = traceback.extract_tb(failure.__traceback__)
            [*_, place] = [frame for frame in frames if "site-packages" not in frame.filename]
            error = f"line {place.lineno}: {type(failure).__name__}: {failure}"
        seconds = time.monotonic() - began
        outcome = {"check": function.__name__, "seconds": seconds, "error": error}
        print(json.dumps(outcome), flush=True)


class Sign(enum.Enum):
    PLUS = "plus"
    MINUS = "minus"


# Classes have no texts of documentation, because these would be part of prompts, which must be short.


# An object without other properties, of which the embedded model would write many.
class Closed(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")


class Operand(Closed):
    value: int = pydantic.Field(ge=0, le=99)


# The schema has definitions, references, an enumeration and an optional property.
class Sum(Closed):
    sign: Sign
    left: Operand
    carry: bool | None = None


# The function of every tool session, as OpenAI's JSON. Arguments are bounded so that the embedded
# model, which does not know functions, ends its calls.
NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
ADD_PARAMETERS = {
    "type": "object",
    "properties": {"a": NUMBER, "b": NUMBER},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ADD = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": ADD_PARAMETERS},
}


def arguments_of_add(text):
    """The two numbers of a call of `add`."""
    arguments = json.loads(text) if isinstance(text, str) else text
    expect(sorted(arguments) == ["a", "b"], f"the arguments are {arguments}")
    a, b = arguments["a"], arguments["b"]
    expect(0 <= a <= 99 and 0 <= b <= 99, f"the arguments are {arguments}")
    return a, b
