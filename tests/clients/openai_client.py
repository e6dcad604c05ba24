"""Uses `hone serve` through OpenAI's Python package and checks that its answers improve.

    python tests/clients/openai_client.py --binary target/release/hone
    python tests/clients/openai_client.py --base-url http://127.0.0.1:8080

Asks and posts feedback until `LEARNED` newer policy versions were served, and checks that more answers to
other questions, with the same seeds, are right and well formed than before: by more than twice the
standard error. With `--base-url` the daemon must serve the embedded model with the default route; it
learns from the posted feedback.

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
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai

from daemon import Failure, daemon, expect, wait_until_ready

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


class Hone:
    """A daemon, called through the openai package and, for feedback, through plain HTTP."""

    def __init__(self, url, key):
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=2, timeout=30)
        self.url = url
        self.headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}

    def ask(self, question, seed):
        """A chat completion."""
        return self.openai.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": question}],
            max_tokens=MAX_TOKENS,
            temperature=1.0,
            seed=seed,
        )

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
        completion = hone.ask("What is {} + {}?".format(*pair), seed)
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
            completion = hone.ask(f"What is {a} + {b}?", seed=number)
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


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--base-url", help="a running daemon, without /v1")
    where.add_argument("--binary", help="start this hone binary on a free port")
    parser.add_argument("--backend", default="mistralrs", help="engine of the started binary")
    parser.add_argument("--config", type=pathlib.Path, default=HERE / "serve.toml")
    parser.add_argument("--key", default="unused", help="client key, if the daemon has keys")
    parser.add_argument("--timeout", type=float, default=110, help="seconds for everything")
    arguments = parser.parse_args()
    backend = ("--backend", arguments.backend)
    began = time.monotonic()
    deadline = began + arguments.timeout - 10
    try:
        with contextlib.ExitStack() as stack:
            url = arguments.base_url or stack.enter_context(
                daemon(arguments.binary, arguments.config, arguments.timeout, *backend)
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
