"""Trains the built-in model for many thousand steps on the ratings of users whose taste drifts, and plots the run.

    python benches/endless.py --binary target/release/hone --steps 20000 --plot docs/training/endless.png

Users ask for sums and post a thumb for each answer. Their satisfaction is two thirds for the right number and one third
for the form `<reasoning>...</reasoning><answer>...</answer>`, of which up to 30 % is taken away for the length of the
reasoning: in every odd period of `--period` steps they like it short, in every even one long. A thumb is up with a
probability equal to the satisfaction. All other settings are the defaults.

Prints a line for every hundredth of the run, and at the end whether satisfaction, KL to the base and entropy of the last
fifth are those of the fifth before. Exits with 1 if a request failed, if training paused, or if one of them ran away.
`--plot` needs matplotlib.
"""

import argparse
import http.client
import json
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import threading
import time

# As in crates/demo/src/task.rs.
PHRASINGS = ["What is {} + {}?", "{} + {} = ?", "How much is {} plus {}?", "Add {} and {}.", "Please calculate {} + {}.",
             "Can you tell me {} + {}?"]
WHOLE = re.compile(r"\s*<reasoning>([^<]*)</reasoning>\s*<answer>([^<]*)</answer>\s*")
# Lengths of the reasoning, in characters, that count as short and as long.
SHORT, LONG = 12, 36
CONFIG = """
[engine]
backend = "native"
[rollout]
max_tokens = 40
[train]
samples_per_step = {samples}
[policy]
promotion = "direct"
publish_every = 4
keep_versions = 4
[store]
retention = {{ kind = "limits", mebibytes = 256 }}
[log]
level = "warn"
[[route]]
name = "default"
reward = [{{ name = "thumbs", kind = "feedback", type = "boolean" }}]
"""


def satisfaction(text: str, answer: int, likes_long: bool) -> tuple[float, int]:
    """From 0 to 1, and the length of the reasoning."""
    whole = WHOLE.fullmatch(text)
    found = re.search(r"<answer>\s*(-?\d+)\s*</answer>", text)
    right = found is not None and int(found.group(1)) == answer
    length = len(whole.group(1)) if whole else 0
    share = min(max((length - SHORT) / (LONG - SHORT), 0.0), 1.0)
    liked = share if likes_long else 1.0 - share
    return (2 * right + (whole is not None)) / 3 * (0.7 + 0.3 * liked), length


class Run:
    def __init__(self, host: str, period: int, seed: int) -> None:
        self.host, self.period, self.seed = host, period, seed
        self.lock, self.ended = threading.Lock(), threading.Event()
        self.step, self.failed, self.ratings = 0, 0, 0
        # (satisfaction, length of the reasoning)
        self.seen: list[tuple[float, int]] = []

    def call(self, connection: http.client.HTTPConnection, path: str, body: dict | None = None) -> dict:
        method, data = ("GET", None) if body is None else ("POST", json.dumps(body))
        connection.request(method, path, data, {"content-type": "application/json"})
        response = connection.getresponse()
        found = response.read()
        if response.status >= 300:
            raise OSError(f"{path}: {response.status} {found[:200]!r}")
        return json.loads(found)

    def user(self, number: int) -> None:
        draw, connection = random.Random(f"{self.seed} {number}"), http.client.HTTPConnection(self.host, timeout=120)
        while not self.ended.is_set():
            a, b = draw.randrange(50), draw.randrange(50)
            messages = [{"role": "user", "content": draw.choice(PHRASINGS).format(a, b)}]
            try:
                answer = self.call(connection, "/v1/chat/completions", {"model": "default", "messages": messages})
                text = answer["choices"][0]["message"]["content"]
                liked, length = satisfaction(text, a + b, self.step // self.period % 2 == 1)
                thumb = {"completion_id": answer["id"], "name": "thumbs", "value": draw.random() < liked}
                self.call(connection, "/v1/feedback", thumb)
            except (OSError, http.client.HTTPException) as error:
                print(f"request failed: {error}", flush=True)
                connection.close()
                with self.lock:
                    self.failed += 1
                continue
            with self.lock:
                self.ratings += 1
                self.seen.append((liked, length))


def mean(values) -> float:
    values = list(values)
    return sum(values) / max(len(values), 1)


def follow(run: Run, steps: int) -> tuple[list[dict], float]:
    """The metrics of a hundredth of the run each, until `steps` are taken, and the longest time without a step."""
    connection = http.client.HTTPConnection(run.host, timeout=120)
    rows, own, stood, moved, seen = [], [], 0.0, time.monotonic(), 0
    every = max(steps // 100, 1)
    while run.step < steps:
        time.sleep(0.2)
        status = run.call(connection, "/admin/train")
        if status["step"] != run.step:
            run.step, moved = status["step"], time.monotonic()
            own.append(status["metrics"])
        stood = max(stood, time.monotonic() - moved)
        if stood > 300.0:
            break
        if run.step >= every * (len(rows) + 1):
            with run.lock:
                recent, seen = run.seen[seen:], len(run.seen)
            row = {"step": run.step, "satisfaction": mean(s for s, _ in recent),
                   "length": mean(n for _, n in recent), "ratings": run.ratings}
            row |= {name: mean(m[name] for m in own if name in m) for name in ["kl", "entropy", "grad_norm"]}
            own = []
            rows.append(row)
            print(" · ".join(f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
                             for name, value in row.items()), flush=True)
    return rows, stood


def plot(rows: list[dict], period: int, path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = {"satisfaction": "satisfaction of users", "length": "length of the reasoning, characters",
             "kl": "KL to the base, nats per token", "entropy": "entropy, nats per token"}
    figure, axes = pyplot.subplots(len(names), sharex=True, figsize=(8, 8))
    steps = [row["step"] for row in rows]
    for axis, (name, title) in zip(axes, names.items(), strict=True):
        axis.plot(steps, [row[name] for row in rows], color="#1f6feb", linewidth=1.2)
        axis.set_title(title, fontsize=9, loc="left")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.2)
        for begin in range(period, steps[-1], 2 * period):
            axis.axvspan(begin, min(begin + period, steps[-1]), color="#999999", alpha=0.15, linewidth=0)
    axes[-1].set_xlabel("optimizer step; users like long reasoning in the gray periods", fontsize=9)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def verdict(rows: list[dict], run: Run, stood: float) -> list[str]:
    """What went wrong."""
    fifth = len(rows) // 5
    before, last = rows[3 * fifth : 4 * fifth], rows[4 * fifth :]
    wrong = [f"{run.failed} requests failed"] if run.failed else []
    if stood > 120.0:
        wrong.append(f"training stood for {stood:.0f} s")
    for name, low, high in [("satisfaction", 0.9, 9.0), ("kl", 0.0, 1.5), ("entropy", 0.5, 2.0)]:
        old, new = mean(r[name] for r in before), mean(r[name] for r in last)
        print(f"{name}: {old:.3f} in the fourth fifth, {new:.3f} in the last")
        if not low * old <= new <= high * old:
            wrong.append(f"{name} went from {old:.3f} to {new:.3f}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", required=True)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--period", type=int, default=1_000, help="steps until users change their taste")
    parser.add_argument("--samples", type=int, default=64, help="train.samples_per_step; a quarter of it if rated")
    parser.add_argument("--users", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--port", type=int, default=8097)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--plot", type=pathlib.Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = pathlib.Path(folder, "hone.toml")
        config.write_text(CONFIG.format(samples=options.samples))
        host = f"127.0.0.1:{options.port}"
        command = [options.binary, "serve", "--config", str(config), "--bind", host]
        server = subprocess.Popen(command, cwd=folder)
        try:
            run = Run(host, options.period, options.seed)
            for _ in range(120):
                try:
                    run.call(http.client.HTTPConnection(host, timeout=10), "/readyz")
                    break
                except OSError:
                    time.sleep(0.5)
            users = [threading.Thread(target=run.user, args=(n,)) for n in range(options.users)]
            for user in users:
                user.start()
            try:
                rows, stood = follow(run, options.steps)
            finally:
                run.ended.set()
                for user in users:
                    user.join()
        finally:
            server.terminate()
            server.wait(60)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.plot:
        plot(rows, options.period, options.plot)
    wrong = verdict(rows, run, stood)
    print(f"failed: {'; '.join(wrong)}" if wrong else f"ok: {run.step} steps, {run.ratings} ratings, 0 failed requests")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
