"""Uses `hone serve` through OpenAI's Python package and checks that its answers improve.

    python tests/clients/openai_client.py --binary target/release/hone
    python tests/clients/openai_client.py --base-url http://127.0.0.1:8080

Chats with and without streaming, reads the policy version, posts feedback until `LEARNED` newer versions
were served, and checks that more answers to other questions, with the same seeds, are right and well
formed than before: by more than twice the standard error. With `--base-url` the daemon must serve the
embedded model with the default route; it learns from the posted feedback.

Exits with 0 and a last line `ok: ...` if every check passes, else with 1 and `failed: ...`.
"""

import argparse
import contextlib
import itertools
import json
import math
import pathlib
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai

HERE = pathlib.Path(__file__).resolve().parent
WELL_FORMED = re.compile(
    r"\s*<reasoning>[^<]*</reasoning>\s*<answer>\s*(\d+)\s*</answer>\s*"
)
MAX_TOKENS = 40
# Policy versions to learn, and the most feedback to post: with tests/clients/serve.toml a version needs 32
# pieces, with the default configuration twice as many.
LEARNED = 24
MAX_FEEDBACK = 4000
EXAM_QUESTIONS = 96
CLIENTS = 4


class Failure(Exception):
    """A check that did not pass."""


def expect(holds, otherwise):
    if not holds:
        raise Failure(otherwise)


class Hone:
    """A daemon, called through the openai package and, for feedback, through plain HTTP."""

    def __init__(self, url, key):
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=2, timeout=30)
        self.url = url
        self.headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}

    def ask(self, question, seed, temperature=1.0, **more):
        """A chat completion and the policy version of its headers."""
        raw = self.openai.chat.completions.with_raw_response.create(
            model="default",
            messages=[{"role": "user", "content": question}],
            max_tokens=MAX_TOKENS,
            temperature=temperature,
            seed=seed,
            **more,
        )
        return raw.parse(), raw.headers.get("x-hone-policy-version")

    def ask_streamed(self, question, seed):
        """Text, fingerprints, usage and finish reason of a streamed chat completion."""
        text, fingerprints, usage, finish = "", set(), None, None
        stream = self.openai.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": question}],
            max_tokens=MAX_TOKENS,
            temperature=1.0,
            seed=seed,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            fingerprints.add(chunk.system_fingerprint)
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
        return text, fingerprints, usage, finish

    def feedback(self, **body):
        """Status code and body of `POST /v1/feedback`."""
        request = urllib.request.Request(
            f"{self.url}/v1/feedback", json.dumps(body).encode(), self.headers, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


def version_of(completion):
    """7 of `hone-v7`."""
    match = re.fullmatch(r"hone-v(\d+)", completion.system_fingerprint or "")
    expect(match, f"system_fingerprint is {completion.system_fingerprint!r}, not hone-vN")
    return int(match[1])


def check_surface(hone):
    """Checks what every OpenAI client relies on."""
    names = [model.id for model in hone.openai.models.list()]
    expect("default" in names, f"/v1/models lists {names}, not default")

    completion, header = hone.ask("What is 12 + 7?", seed=1, logprobs=True, top_logprobs=2)
    expect(completion.id.startswith("chatcmpl-"), f"the completion's id is {completion.id!r}")
    expect(str(version_of(completion)) == header, f"x-hone-policy-version is {header!r}")
    choice = completion.choices[0]
    expect(choice.finish_reason in ("stop", "length"), f"finish_reason {choice.finish_reason!r}")
    tokens = choice.logprobs.content
    expect(tokens, "no log-probabilities")
    expect(all(t.logprob <= 0 for t in tokens), "a log-probability above 0")
    expect(all(len(t.top_logprobs) == 2 for t in tokens), "not two top_logprobs per token")
    usage = completion.usage
    expect(usage.prompt_tokens > 0 and usage.completion_tokens >= len(tokens), f"usage {usage}")
    expect(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, f"usage {usage}")

    # The same seed has the same text, streamed or not, as long as the policy is the same.
    for seed in range(5):
        whole, _ = hone.ask("What is 30 + 4?", seed)
        text, fingerprints, usage, finish = hone.ask_streamed("What is 30 + 4?", seed)
        expect(len(fingerprints) == 1, f"one stream names several policies: {fingerprints}")
        expect(usage and usage.completion_tokens > 0, "no usage at the end of the stream")
        if fingerprints == {whole.system_fingerprint}:
            streamed, answer = (text, finish), whole.choices[0]
            answer = (answer.message.content, answer.finish_reason)
            expect(streamed == answer, f"streamed {streamed!r}, whole {answer!r}")
            break
    else:
        raise Failure("the policy changed between any two requests")

    two, _ = hone.ask("What is 3 + 4?", seed=5, n=2)
    expect([c.index for c in two.choices] == [0, 1], "n=2 does not return two choices")

    try:
        hone.openai.chat.completions.create(
            model="no-such-model", messages=[{"role": "user", "content": "hi"}]
        )
    except openai.NotFoundError as error:
        expect(error.code == "model_not_found", f"unknown model: code {error.code!r}")
    else:
        raise Failure("an unknown model is answered")

    unknown = "chatcmpl-" + "0" * 32
    status, body = hone.feedback(completion_id=unknown, choice=0, name="thumbs", value=1)
    expect(status == 404, f"feedback on an unknown completion: {status} {body}")
    expect("message" in json.loads(body).get("error", {}), "the error is not in OpenAI's shape")


def check_text(hone):
    """Checks the older completions."""
    options = {"model": "default", "seed": 3, "max_tokens": 12, "temperature": 1.0}
    whole = hone.openai.completions.create(prompt="What is 3 + 4?", logprobs=2, echo=False, **options)
    expect(whole.id.startswith("cmpl-"), f"the text completion's id is {whole.id!r}")
    choice = whole.choices[0]
    tokens = choice.logprobs.tokens
    expect("".join(tokens) == choice.text, f"{tokens} are not the tokens of {choice.text!r}")
    parts = hone.openai.completions.create(prompt="What is 3 + 4?", stream=True, **options)
    text = "".join(choice.text for part in parts for choice in part.choices)
    expect(text == choice.text, f"streamed {text!r}, whole {choice.text!r}")
    several = hone.openai.completions.create(prompt=["1 + 1", "2 + 2"], n=2, echo=True, **options)
    starts = [choice.text[:5] for choice in several.choices]
    expect(starts == ["1 + 1"] * 2 + ["2 + 2"] * 2, f"the echoed prompts are {starts}")


def check_stored(hone):
    """Checks what is kept of completions, and that it can be read, changed and erased."""
    stored = hone.openai.chat.completions
    unkept, _ = hone.ask("What is 5 + 6?", seed=1, store=False)
    status, body = hone.feedback(completion_id=unkept.id, name="thumbs", value=1)
    code = json.loads(body)["error"]["code"]
    expect((status, code) == (404, "completion_not_stored"), f"feedback without store: {body}")
    kept = [hone.ask(f"What is 5 + {n}?", seed=n, metadata={"n": str(n)})[0] for n in range(3)]
    ids = {completion.id for completion in kept}
    listed = {completion.id for completion in stored.list(order="desc", limit=2)}
    expect(ids <= listed and unkept.id not in listed, "the list of completions is wrong")
    found = stored.list(metadata={"n": "1"}).data
    expect(any(completion.id == kept[1].id for completion in found), "metadata does not filter")
    read = stored.retrieve(kept[0].id)
    expect(read.choices[0].message.content == kept[0].choices[0].message.content, "another text")
    [message] = stored.messages.list(kept[0].id).data
    expect((message.role, message.content) == ("user", "What is 5 + 0?"), f"message {message}")
    changed = stored.update(kept[0].id, metadata={"x": "y"})
    expect(changed.metadata == {"x": "y"}, f"metadata {changed.metadata}")
    expect(stored.delete(kept[0].id).deleted, "the completion is not deleted")
    try:
        stored.retrieve(kept[0].id)
    except openai.NotFoundError as error:
        expect(error.code == "completion_not_found", f"erased completion: code {error.code!r}")
    else:
        raise Failure("an erased completion is answered")


def is_good(completion, a, b):
    """Whether the answer is right and well formed."""
    answer = WELL_FORMED.fullmatch(completion.choices[0].message.content or "")
    return answer is not None and int(answer[1]) == a + b


def exam_pairs():
    """The operands of the exam, which is never rewarded; `teach` asks other questions."""
    draw = random.Random("exam")
    return [(draw.randrange(50), draw.randrange(50)) for _ in range(EXAM_QUESTIONS)]


def exam(hone):
    """For each question of the exam, whether its sampled answer is good; and the versions."""

    def ask(seed, pair):
        completion, _ = hone.ask("What is {} + {}?".format(*pair), seed)
        return is_good(completion, *pair), version_of(completion)

    with ThreadPoolExecutor(CLIENTS) as pool:
        good, versions = zip(*pool.map(ask, itertools.count(), exam_pairs()))
    return good, set(versions)


def teach(hone, wanted, deadline):
    """Asks and rewards until version `wanted` is served; counts the questions and the thumbs up."""
    counter, lock = itertools.count(), threading.Lock()
    tally = {"asked": 0, "up": 0, "version": 0}
    stop, examined = threading.Event(), set(exam_pairs())

    def user():
        while not stop.is_set() and time.monotonic() < deadline:
            number = next(counter)
            if number >= MAX_FEEDBACK:
                return
            draw = random.Random(number)
            a, b = draw.randrange(50), draw.randrange(50)
            if (a, b) in examined:
                continue
            completion, _ = hone.ask(f"What is {a} + {b}?", seed=number)
            up = is_good(completion, a, b)
            status, body = hone.feedback(
                completion_id=completion.id,
                choice=0,
                name="thumbs",
                value=1 if up else 0,
                idempotency_key=f"client-{completion.id}",
            )
            expect(200 <= status < 300, f"feedback: {status} {body}")
            with lock:
                tally["asked"] += 1
                tally["up"] += up
                tally["version"] = max(tally["version"], version_of(completion))
                if tally["version"] >= wanted:
                    stop.set()

    def user_until_failure():
        try:
            user()
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(CLIENTS) as pool:
        for done in [pool.submit(user_until_failure) for _ in range(CLIENTS)]:
            done.result()
    expect(
        tally["version"] >= wanted,
        f"version {tally['version']} after {tally['asked']} pieces of feedback, wanted {wanted}",
    )
    return tally


def run(hone, deadline):
    check_surface(hone)
    check_text(hone)
    check_stored(hone)
    good, before = exam(hone)
    first = max(before)
    tally = teach(hone, first + LEARNED, deadline)
    new_good, after = exam(hone)
    expect(min(after) > first, f"versions {sorted(after)} are not newer than {first}")
    differences = [new - old for old, new in zip(good, new_good)]
    rise = statistics.mean(differences)
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    result = (
        f"{sum(good)} of {EXAM_QUESTIONS} answers are good with version {first}, "
        f"{sum(new_good)} with version {max(after)}, after {tally['asked']} pieces of feedback "
        f"({tally['up']} up); the rise is {rise:.2f} with standard error {error:.2f}"
    )
    expect(rise > 2 * error, f"the policy did not become better: {result}")
    return result


@contextlib.contextmanager
def daemon(binary, config, timeout):
    """Starts `hone serve` on a free port with fresh data; yields its URL; stops it with SIGTERM."""
    with tempfile.TemporaryDirectory(prefix="hone-client-") as folder:
        log_path = pathlib.Path(folder) / "log"
        command = [binary, "serve", "--bind", "127.0.0.1:0", "--config", config]
        command += ["--data", pathlib.Path(folder) / "data"]
        with open(log_path, "wb") as log:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        # Ends a daemon that hangs.
        watchdog = threading.Timer(timeout, child.kill)
        watchdog.start()
        try:
            line = child.stdout.readline()
            match = re.match(r"listening on (http://\S+)", line)
            expect(match, f"the first line of `hone serve` is {line!r}")
            threading.Thread(target=child.stdout.read, daemon=True).start()
            yield match[1]
            child.send_signal(signal.SIGTERM)
            expect(child.wait(timeout=20) == 0, f"exit code {child.returncode} after SIGTERM")
        except BaseException:
            print(log_path.read_text(errors="replace")[-4000:], file=sys.stderr)
            raise
        finally:
            watchdog.cancel()
            if child.poll() is None:
                child.kill()
            child.wait()


def wait_until_ready(url, seconds=60):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/readyz", timeout=5):
            return
        time.sleep(0.1)
    raise Failure(f"{url}/readyz is not ready after {seconds} s")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--base-url", help="a running daemon, without /v1")
    where.add_argument("--binary", help="start this hone binary on a free port")
    parser.add_argument("--config", type=pathlib.Path, default=HERE / "serve.toml")
    parser.add_argument("--key", default="unused", help="client key, if the daemon has keys")
    parser.add_argument("--timeout", type=float, default=110, help="seconds for everything")
    arguments = parser.parse_args()
    began = time.monotonic()
    deadline = began + arguments.timeout - 10
    try:
        with contextlib.ExitStack() as stack:
            url = arguments.base_url or stack.enter_context(
                daemon(arguments.binary, arguments.config, arguments.timeout)
            )
            wait_until_ready(url)
            result = run(Hone(url.rstrip("/"), arguments.key), deadline)
    except (Failure, openai.OpenAIError, OSError, subprocess.SubprocessError) as error:
        print(f"failed: {type(error).__name__}: {error}")
        return 1
    print(f"ok: {result}; {time.monotonic() - began:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
