"""An agent that learns: a tool loop with OpenAI's Python package, which only rates whole conversations.

    pip install openai
    python examples/agent.py --hone target/release/hone --seed 1

The agent answers questions such as "How many figs and pears are there?" with two local functions: `stock`
looks up one item, `add` adds two numbers. So a right answer about two items needs four turns of the model:
two lookups, an addition, and the answer. Its small model (models/agent, made by examples/pretrain_agent.rs)
calls functions in the right format but makes mistakes: it guesses, or stops half-way.

The script starts `hone serve`, measures how many held-out questions the agent solves, and then lets it work.
After each conversation it posts one rating for its `session_id`: 1 if the last answer was right, else 0.
Hone credits every turn with it and trains. Nothing else is taught: no turn is rated by itself, and the
questions of the exam, about pairs of items that are never asked in between, leave no record.
"""

import argparse
import contextlib
import json
import math
import pathlib
import random
import re
import signal
import subprocess
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai

HERE = pathlib.Path(__file__).resolve().parent
# As in examples/pretrain_agent/episodes.rs, where pairs are held out by the same rule.
ITEMS = ["apples", "beans", "carrots", "dates", "figs", "leeks", "limes", "melons", "nuts", "onions", "pears",
         "plums"]
HELD_OUT = 5
STOCK = 100
TWO_ITEMS = 0.75
MOST_TURNS = 6


def function(name, description, **parameters):
    schema = {"type": "object", "properties": parameters, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [
    function("stock", "How many there are of an item.", item={"type": "string"}),
    function("add", "The sum of two numbers.", a={"type": "integer"}, b={"type": "integer"}),
]


class Task:
    """A question about a store of its own, and the functions that look into it."""

    def __init__(self, draw, held_out):
        self.store = {item: draw.randrange(STOCK) for item in ITEMS}
        pairs = [(a, b) for a in range(len(ITEMS)) for b in range(len(ITEMS))
                 if a != b and ((a + b) % HELD_OUT == 0) == held_out]
        if held_out or draw.random() < TWO_ITEMS:
            asked = [ITEMS[index] for index in draw.choice(pairs)]
        else:
            asked = [draw.choice(ITEMS)]
        self.question = f"How many {' and '.join(asked)} are there?"
        self.answer = sum(self.store[item] for item in asked)

    def call(self, name, arguments):
        """The result of a call as text; errors are for the model to read."""
        try:
            given = json.loads(arguments)
            if name == "stock":
                return str(self.store[given["item"]])
            if name == "add":
                return str(int(given["a"]) + int(given["b"]))
            return f"there is no function {name}"
        except (KeyError, TypeError, ValueError) as error:
            return f"error: {error}"

    def is_solved_by(self, text):
        numbers = re.findall(r"\d+", text or "")
        return bool(numbers) and int(numbers[-1]) == self.answer


def work(client, task, **options):
    """The loop of the agent; whether it solved the task, and the number of the model's turns."""
    messages = [{"role": "user", "content": task.question}]
    for turn in range(1, MOST_TURNS + 1):
        answer = client.chat.completions.create(
            model="default", messages=messages, tools=TOOLS, max_tokens=48, **options)
        message = answer.choices[0].message
        if not message.tool_calls:
            return task.is_solved_by(message.content), turn
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = task.call(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return False, MOST_TURNS


def interval(successes, number):
    """Wilson's interval of a share, 95 %."""
    z, share = 1.96, successes / number
    middle = share + z * z / (2 * number)
    reach = z * math.sqrt(share * (1 - share) / number + z * z / (4 * number * number))
    return [(middle - reach) / (1 + z * z / number), (middle + reach) / (1 + z * z / number)]


def exam(client, args, temperature):
    """How many held-out questions the agent solves. Nothing of it is recorded."""
    def one(number):
        task = Task(random.Random(f"exam {args.seed} {number}"), held_out=True)
        return work(client, task, temperature=temperature, seed=number, store=False)[0]

    with ThreadPoolExecutor(args.clients) as pool:
        solved = sum(pool.map(one, range(args.questions)))
    low, high = interval(solved, args.questions)
    return {"solved": solved / args.questions, "low": low, "high": high}


def session(client, args, number):
    """One conversation and its rating."""
    name = f"{args.seed}-{number}"
    task = Task(random.Random(f"work {name}"), held_out=False)
    solved, turns = work(client, task, temperature=1.0, metadata={"session_id": name})
    rating = {"session_id": name, "name": "solved", "value": 1 if solved else 0}
    client.post("/feedback", body=rating, cast_to=object)
    return solved, turns


def learn(client, args):
    """Works through `args.sessions` questions; the share that was solved in each tenth, and all turns."""
    with ThreadPoolExecutor(args.clients) as pool:
        done = list(pool.map(lambda number: session(client, args, number), range(args.sessions)))
    size = max(args.sessions // 10, 1)
    parts = [done[at:at + size] for at in range(0, args.sessions, size)]
    shares = [sum(solved for solved, _ in part) / len(part) for part in parts]
    return shares, sum(turns for _, turns in done)


@contextlib.contextmanager
def daemon(args):
    """Starts `hone serve` on a free port with fresh data; yields its URL; stops it with SIGTERM."""
    with tempfile.TemporaryDirectory(prefix="hone-agent-") as folder:
        command = [args.hone, "serve", "--bind", "127.0.0.1:0", "--config", args.config, "--data", folder,
                   "--model", args.model, "--backend", args.backend]
        with open(args.log, "wb") as log:
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            line = child.stdout.readline()
            found = re.match(r"listening on (http://\S+)", line)
            if not found:
                raise SystemExit(f"the first line of `hone serve` is {line!r}, see {args.log}")
            threading.Thread(target=child.stdout.read, daemon=True).start()
            yield found[1]
        finally:
            child.send_signal(signal.SIGTERM)
            code = child.wait(timeout=60)
        if code != 0:
            raise SystemExit(f"`hone serve` ended with exit code {code}, see {args.log}")


def version(client):
    answer = client.chat.completions.create(model="default", messages=[{"role": "user", "content": "Hello"}],
                                            max_tokens=1, store=False)
    return answer.system_fingerprint


def wait_for_version_after(client, first):
    """Waits until another version than `first` is served, for a minute at most."""
    deadline = time.monotonic() + 60
    while version(client) == first and time.monotonic() < deadline:
        time.sleep(0.2)


def run(client, args):
    versions = [version(client)]
    before = {"sampled": exam(client, args, 1.0), "greedy": exam(client, args, 0.0)}
    print(f"before, {versions[0]}: {shown(before)}", flush=True)
    shares, turns = learn(client, args)
    print(f"{args.sessions} conversations with {turns} turns; solved in each tenth: "
          + " ".join(f"{share:.2f}" for share in shares), flush=True)
    if args.smoke:
        wait_for_version_after(client, versions[0])
    after = {"sampled": exam(client, args, 1.0), "greedy": exam(client, args, 0.0)}
    versions.append(version(client))
    print(f"after, {versions[1]}: {shown(after)}", flush=True)
    rose = {kind: after[kind]["low"] > before[kind]["high"] for kind in before}
    return {"seed": args.seed, "backend": args.backend, "sessions": args.sessions, "turns": turns,
            "questions": args.questions, "versions": versions, "before": before, "solved": shares,
            "after": after, "rose": rose}


def shown(result):
    return ", ".join(f"{kind} {part['solved']:.2f} ({part['low']:.2f} to {part['high']:.2f})"
                     for kind, part in result.items())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hone", default="target/release/hone", help="the binary")
    parser.add_argument("--config", default=str(HERE / "agent.toml"), help="its configuration")
    parser.add_argument("--model", default=str(HERE.parent / "models" / "agent"), help="the model's directory")
    parser.add_argument("--backend", default="native", help="engine.backend: native or mistralrs")
    parser.add_argument("--seed", type=int, default=1, help="of the questions")
    parser.add_argument("--sessions", type=int, default=4000, help="conversations to learn from")
    parser.add_argument("--questions", type=int, default=400, help="questions of each exam")
    parser.add_argument("--clients", type=int, default=8, help="conversations at a time")
    parser.add_argument("--smoke", action="store_true",
                        help="check only that a version was trained and served, for runs that are short")
    parser.add_argument("--json", metavar="FILE", help="write the result here")
    parser.add_argument("--log", default=str(pathlib.Path(tempfile.gettempdir()) / "hone-agent.log"),
                        help="output of the daemon")
    args = parser.parse_args()
    with daemon(args) as url:
        result = run(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=5, timeout=60), args)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    if args.smoke:
        first, last = result["versions"]
        if first == last:
            raise SystemExit(f"{last} is still served: nothing was learned from the ratings")
    elif not result["rose"]["sampled"]:
        raise SystemExit("the agent's success did not rise: its confidence intervals overlap")


if __name__ == "__main__":
    main()
