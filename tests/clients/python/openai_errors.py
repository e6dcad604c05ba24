"""OpenAI's Python package: the types of errors, and retries after a limit."""

import openai

from checks import KEY, MODEL, TIMEOUT, URL, check, expect, raised, run


def client(key=KEY, retries=0):
    return openai.OpenAI(base_url=f"{URL}/v1", api_key=key, timeout=TIMEOUT, max_retries=retries)


def ask(key=KEY, **more):
    options = {"model": MODEL, "messages": [{"role": "user", "content": "1"}], "max_tokens": 4}
    return client(key).chat.completions.create(**{**options, **more})


def error_of(kind, action, **fields):
    """The error of an action, which must have these fields."""
    error = raised(kind, action)
    found = {name: getattr(error, name) for name in fields}
    expect(found == fields, f"{kind.__name__} has {found}, not {fields}")
    expect(error.request_id, f"{kind.__name__} has no request id")
    return error


@check
def bad_requests():
    wrong = {"param": "temperature", "code": "invalid_value", "type": "invalid_request_error"}
    error_of(openai.BadRequestError, lambda: ask(temperature=3), **wrong)
    unknown = {"param": "no_such_field", "code": "unsupported_parameter"}
    error_of(openai.BadRequestError, lambda: ask(extra_body={"no_such_field": 1}), **unknown)
    long = [{"role": "user", "content": "1 " * 3000}]
    too_long = {"code": "context_length_exceeded"}
    error_of(openai.BadRequestError, lambda: ask(messages=long), **too_long)
    error_of(openai.BadRequestError, lambda: list(ask(messages=long, stream=True)), **too_long)
    image = [{"type": "image_url", "image_url": {"url": "https://x/y"}}]
    error_of(openai.BadRequestError, lambda: ask(messages=[{"role": "user", "content": image}]))


@check
def keys_and_scopes():
    error_of(openai.AuthenticationError, lambda: ask("no-such-key"), code="invalid_api_key")
    error_of(openai.PermissionDeniedError, lambda: ask("feedback-key"), code="missing_scope")


@check
def things_that_do_not_exist():
    error_of(openai.NotFoundError, lambda: ask(model="no-such-model"), code="model_not_found")
    missing = "chatcmpl-" + "0" * 32
    for action in (
        lambda: client().chat.completions.retrieve(missing),
        lambda: feedback(completion_id=missing, value=1),
    ):
        error_of(openai.NotFoundError, action, code="completion_not_found")
    error_of(openai.NotFoundError, lambda: client().files.list(), code="not_found")


def feedback(**body):
    """Posts feedback through the package, which has no method for it."""
    return client().post("/feedback", cast_to=object, body={"name": "thumbs", **body})


@check
def a_key_of_feedback_that_is_used_twice():
    target = {"completion_id": ask().id, "idempotency_key": "once"}
    feedback(value=1, **target)
    code = {"code": "idempotency_key_reused"}
    error_of(openai.UnprocessableEntityError, lambda: feedback(value=0, **target), **code)


@check
def retries_after_a_limit():
    key, message = "limited-openai-key", [{"role": "user", "content": "1"}]
    retrying = client(key, retries=3).chat.completions.with_raw_response
    # More than once, because the limit may permit a request between the two.
    for _ in range(5):
        error = error_of(openai.RateLimitError, lambda: use_up(key), code="rate_limit_exceeded")
        wait = float(error.response.headers["retry-after"])
        expect(0 < wait <= 2, f"Retry-After is {wait}")
        raw = retrying.create(model=MODEL, messages=message, max_tokens=4)
        expect(raw.parse().choices, "no choice after the wait")
        if raw.retries_taken > 0:
            return
    raise AssertionError("no request was repeated")


def use_up(key):
    """Sends requests until the limit of the key refuses one."""
    limited = client(key)
    for _ in range(200):
        limited.models.list()


if __name__ == "__main__":
    run()
