"""Lets simulated users sort messages with a running `hone serve`, and rate each answer with a thumb.

    hone serve --config configs/examples/sorting.toml --model models-local/smollm2
    python benches/sorting.py --server http://localhost:8080 --rate 5 --minutes 10

A prompt has about 290 tokens, of which the system prompt and four worked examples, about 250, are the same in all. An
answer is right if it is one of the four labels, and the one of the message. Prints the share of right answers every
half minute, and at the end that of held-out messages, which are never rated. Without `--rate` eight users ask
without a pause.
"""

import argparse
import json
import random
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

SYSTEM = (
    "You sort the messages of a shop's customers. Answer each message with exactly one of four words, and with nothing "
    "else: MONEY for payments, prices, invoices and refunds; TRAVEL for parcels that are on their way, late or lost; "
    "BROKEN for things that do not work or arrived damaged; ACCESS for passwords, accounts and logins."
)
EXAMPLES = [
    ("I was charged twice for my order last week.", "MONEY"),
    ("The parcel should have come on Monday and is not here.", "TRAVEL"),
    ("The lamp flickers and then goes dark after a minute.", "BROKEN"),
    ("I cannot log in since I changed my phone.", "ACCESS"),
]
THINGS = ["kettle", "jacket", "radio", "printer", "bicycle lamp", "toaster", "camera", "drill", "keyboard", "mixer"]
DAYS = ["Monday", "Tuesday", "last week", "three days ago", "yesterday", "two weeks ago"]
CITIES = ["Lyon", "Porto", "Graz", "Turin", "Ghent", "Malmo"]
PATTERNS = {
    "MONEY": [
        "Why did you take {n} euros for the {thing} when it said {m}?",
        "Please send me an invoice for the {thing} that I bought {day}.",
        "When do I get my {n} euros back for the {thing}?",
        "My card was declined when I wanted to pay for the {thing}.",
        "The voucher of {n} euros was not counted when I paid {day}.",
    ],
    "TRAVEL": [
        "Where is the {thing} that I ordered {day}?",
        "The tracking page says that my {thing} is in {city} since {day}.",
        "Can you bring the {thing} to {city} and not to my home?",
        "The driver left my {thing} with a neighbour whom I do not know.",
        "My {thing} was to arrive {day}, and nothing has come to {city}.",
    ],
    "BROKEN": [
        "The {thing} stopped working {day}.",
        "My new {thing} has a crack on the side.",
        "The {thing} makes a loud noise and smells of smoke.",
        "The {thing} from {day} does not turn on any more.",
        "A part of the {thing} fell off when I opened the box.",
    ],
    "ACCESS": [
        "I forgot my password and the mail to reset it does not come.",
        "Your site says that my account is locked since {day}.",
        "How do I change the mail address of my account to one in {city}?",
        "The code that you sent {day} to log in is not accepted.",
        "I want to delete my account with the {thing} on the wish list.",
    ],
}


def messages(seed: int, count: int) -> list[tuple[str, str]]:
    """`(message, label)`, all different."""
    draw, found = random.Random(seed), {}
    while len(found) < count:
        label = draw.choice(list(PATTERNS))
        slots = {"n": draw.randint(5, 99), "m": draw.randint(5, 99), "thing": draw.choice(THINGS)}
        slots |= {"day": draw.choice(DAYS), "city": draw.choice(CITIES)}
        found[draw.choice(PATTERNS[label]).format(**slots)] = label
    return list(found.items())


def post(server: str, path: str, body: dict) -> dict:
    request = urllib.request.Request(server + path, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def get(server: str, path: str) -> dict:
    with urllib.request.urlopen(server + path, timeout=30) as response:
        return json.load(response)


def ask(server: str, message: str, seed: int) -> dict:
    turns = [("system", SYSTEM)]
    for question, label in EXAMPLES:
        turns += [("user", question), ("assistant", label)]
    turns.append(("user", message))
    chat = [{"role": role, "content": text} for role, text in turns]
    body = {"model": "default", "messages": chat, "max_tokens": 8, "temperature": 1.0, "seed": seed}
    return post(server, "/v1/chat/completions", body)


class Users:
    """Users who ask and rate, and what they saw."""

    def __init__(self, server: str, pool: list[tuple[str, str]], seed: int, rated: float, inverted: float) -> None:
        self.server, self.pool, self.draw = server, pool, random.Random(seed)
        self.rated, self.inverted = rated, inverted
        self.lock, self.right, self.failed, self.thumbs = threading.Lock(), [], 0, 0

    def visit(self) -> None:
        """One question, its answer, and perhaps a thumb."""
        with self.lock:
            (message, label), seed = self.draw.choice(self.pool), self.draw.getrandbits(31)
            rates, errs = self.draw.random() < self.rated, self.draw.random() < self.inverted
        try:
            answer = ask(self.server, message, seed)
            right = answer["choices"][0]["message"]["content"].strip() == label
            if rates:
                thumb = {"completion_id": answer["id"], "name": "thumbs", "value": right != errs}
                post(self.server, "/v1/feedback", thumb)
        except OSError as error:
            print(f"failed: {error}", flush=True)
            with self.lock:
                self.failed += 1
            return
        with self.lock:
            self.right.append(right)
            self.thumbs += rates


def share(right: list[bool]) -> str:
    return f"{100 * sum(right) / max(len(right), 1):5.1f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", default="http://localhost:8080")
    parser.add_argument("--rate", type=float, default=0.0, help="questions per second; 0 asks without a pause")
    parser.add_argument("--users", type=int, default=8, help="users who ask without a pause")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rated", type=float, default=1.0, help="share of the answers that get a thumb")
    parser.add_argument("--inverted", type=float, default=0.0, help="share of the thumbs that are wrong")
    arguments = parser.parse_args()
    server, all_messages = arguments.server.rstrip("/"), messages(arguments.seed, 384)
    held_out, pool = all_messages[:64], all_messages[64:]
    users = Users(server, pool, arguments.seed, arguments.rated, arguments.inverted)

    def measure(label: str) -> None:
        with ThreadPoolExecutor(8) as workers:
            answers = list(workers.map(lambda i: ask(server, held_out[i][0], i), range(len(held_out))))
        texts = [answer["choices"][0]["message"]["content"].strip() for answer in answers]
        right = [text == known for text, (_, known) in zip(texts, held_out, strict=True)]
        print(f"held out, {label}: {share(right)} of {len(right)} right", flush=True)

    measure("before")
    began, ended = time.monotonic(), threading.Event()

    def keep_asking() -> None:
        while not ended.is_set():
            users.visit()

    def report() -> None:
        seen, shown = 0, 0.0
        while not ended.wait(1.0):
            elapsed = time.monotonic() - began
            if elapsed - shown < 30.0:
                continue
            shown = elapsed
            with users.lock:
                recent, seen = users.right[seen:], len(users.right)
            status = get(server, "/admin/train")
            kl = status["metrics"].get("kl", 0.0)
            print(
                f"{elapsed / 60:5.1f} min: {share(recent)} right of {len(recent):4d} · {seen} answers, {users.thumbs} thumbs, "
                f"{users.failed} failed · step {status['step']}, version {status['policy_version']}, KL {kl:.2f}",
                flush=True,
            )

    workers = [threading.Thread(target=report)]
    if arguments.rate == 0.0:
        workers += [threading.Thread(target=keep_asking) for _ in range(arguments.users)]
    for worker in workers:
        worker.start()
    pace, until = random.Random(arguments.seed), began + 60.0 * arguments.minutes
    with ThreadPoolExecutor(64) as visits:
        while time.monotonic() < until:
            if arguments.rate == 0.0:
                time.sleep(0.5)
            else:
                visits.submit(users.visit)
                time.sleep(pace.expovariate(arguments.rate))
    ended.set()
    for worker in workers:
        worker.join()
    measure("after")
    last = users.right[-200:]
    print(f"last {len(last)} answers: {share(last)} right; {users.failed} of {len(users.right)} failed", flush=True)


if __name__ == "__main__":
    main()
