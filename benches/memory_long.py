"""Trains on one long conversation, and compares the memory that `hone serve` takes with its plan.

    python benches/memory_long.py --hone target/release/hone --model models-local/smollm2 --tokens 6000
    python benches/memory_long.py --hone target/release/hone --model models-local/smollm2 --backend native
    python benches/memory_long.py --hone target/release/hone --model models-local/smollm2 --backend native \
        --quantize q8_0

It starts `hone serve`, rates two short conversations and takes a step, so that there is a baseline. Then
it sends a conversation of about `--tokens` tokens, rates it, and takes a step that trains on it and
publishes a version. While the step runs, a client sends the conversation again, because the plan counts
both at once. All the while the script reads the resident memory of the process from /proc. The plan is
that of `hone serve --explain-memory --json` with the same configuration.

The plan counts every cache in full. The engine's cache is as large as the conversation needs, so that the
process fills it. The ledger's cache holds at most the ledger, which is small here. So the script also
compares with the plan without the parts of these two caches that the run has not filled ("reached"). The
last line compares the peak with the stored weights and the planned caches and activations together.

The exit code is 1 if the measured peak is below 0.9 of the plan at the reached fill or above 1.05 of the
plan, if it is more than 1.6 times that sum with the native backend, or if the conversation was neither
trained on nor rejected.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

MIB = 1 << 20
# The least measured peak as a share of the plan at the reached fill, and the largest as one of the plan.
BOUNDS = (0.9, 1.05)
# The native backend's peak as a multiple of the stored weights with the planned caches and activations.
NATIVE_BOUND = 1.6
# Parts of the plan that are caches, and those that are activations: of the sampler's passes, and of a step.
CACHES = ("ledger cache", "kept adapters", "sampler cache", "conversations")
ACTIVATIONS = ("sampler buffers", "layer inputs", "kept activations", "one layer or logits")
# Seconds between two readings of the resident memory.
INTERVAL = 0.01
# Seconds that a request or a phase may take.
PATIENCE = 1800
# A sentence that is repeated.
SENTENCE = "What is 12 + 30? "

CONFIG = """
[server]
bind = "127.0.0.1:0"
default_max_tokens = {completion}

[data]
dir = "{data}"

[rollout]
enabled = {rollouts}
group_size = 2
max_tokens = {completion}
max_batch_tokens = {cache}

[train]
max_tokens = {longest}
samples_per_step = 64
priority = "normal"

[policy]
promotion = "direct"
publish_every = 1

[[route]]
name = "default"

[[route.reward]]
name = "thumbs"
kind = "feedback"
weight = 1.0

[[route.reward]]
name = "length"
kind = "length"
weight = 0.1
ideal = 20
spread = 20
"""


class Memory(threading.Thread):
    """Reads the resident memory of a process until it ends, and keeps the peak of each phase."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.status = Path(f"/proc/{pid}/status")
        self.phase = "load"
        self.now = 0
        self.peaks: dict[str, int] = {}

    def run(self) -> None:
        while True:
            try:
                lines = self.status.read_text().splitlines()
            except OSError:
                return
            resident = next((line for line in lines if line.startswith("VmRSS:")), None)
            if resident is None:
                return
            self.now = int(resident.split()[1]) << 10
            self.peaks[self.phase] = max(self.now, self.peaks.get(self.phase, 0))
            time.sleep(INTERVAL)


class Daemon:
    """A running `hone serve`."""

    def __init__(self, command: list[str], log: Path) -> None:
        self.log = log
        with open(log, "wb") as errors:
            self.child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        self.memory = Memory(self.child.pid)
        self.memory.start()
        line = self.child.stdout.readline()
        if not line.startswith("listening on "):
            raise SystemExit(f"hone serve did not start:\n{log.read_text()}")
        self.url = line.split()[-1]

    def call(self, path: str, body: dict | None = None, method: str | None = None) -> dict:
        """Sends a request; a text that is not JSON is returned as `text`."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as response:
                text = response.read().decode()
        except urllib.error.HTTPError as error:
            return {"status": error.code, **json.loads(error.read() or "{}")}
        return json.loads(text) if text.startswith("{") else {"text": text}

    def chat(self, content: str) -> dict:
        messages = [{"role": "user", "content": content}]
        answer = self.call("/v1/chat/completions", {"model": "default", "messages": messages})
        if "id" not in answer:
            raise SystemExit(f"the conversation was refused: {answer}")
        return answer

    def rate(self, completion: str, value: float) -> None:
        rating = {"completion_id": completion, "name": "thumbs", "value": value}
        answer = self.call("/v1/feedback", rating)
        if not answer.get("trained"):
            raise SystemExit(f"the rating was refused: {answer}")

    def train(self) -> dict:
        """The trainer's status."""
        return self.call("/admin/train")

    def wait_for(self, what: str, holds) -> dict:
        """Waits until the trainer's status fulfils a condition."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if self.child.poll() is not None:
                raise SystemExit(f"hone serve ended:\n{self.log.read_text()}")
            status = self.train()
            if holds(status):
                return status
            time.sleep(0.05)
        raise SystemExit(f"no {what} within {PATIENCE} s: {status}\n{self.log.read_text()}")

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        lines = self.call("/metrics")["text"].splitlines()
        samples = [line for line in lines if line.startswith((name + " ", name + "{"))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in samples)

    def dropped(self) -> float:
        """Groups that the trainer has dropped."""
        return self.metric("hone_train_dropped_groups_total")

    def cache_filled(self) -> float:
        """The share of the native engine's cache that holds something; 1 without that engine."""
        capacity = self.metric("hone_engine_cache_capacity_pages")
        return self.metric("hone_engine_cache_pages") / capacity if capacity else 1.0

    def step(self, beside: str = "") -> dict:
        """Waits for a group, takes a step, and sends the conversation `beside` while it runs."""
        before, dropped = self.train(), self.dropped()
        is_sampled = lambda s: s["in_flight_groups"] + s["queued_prompts"] == 0
        self.wait_for("group", lambda s: s["ready_groups"] > 0 and is_sampled(s))
        self.memory.phase = "long step" if beside else "short step"
        threads = [threading.Thread(target=self.call, args=("/admin/train/step", None, "POST"))]
        if beside:
            threads.append(threading.Thread(target=self.chat, args=(beside,)))
        for thread in threads:
            thread.start()
        while threads[0].is_alive():
            if beside and self.train()["state"] == "publishing":
                self.memory.phase = "publication"
            threads[0].join(0.02)
        for thread in threads:
            thread.join()
        trained = self.train()["step"] > before["step"]
        return {"trained": trained, "rejected": self.dropped() > dropped}

    def stop(self) -> None:
        self.child.terminate()
        self.child.wait(timeout=PATIENCE)


def run(arguments: argparse.Namespace, folder: Path) -> dict:
    """Measures one daemon and returns the report."""
    longest = arguments.tokens + 4 * arguments.completion
    config = folder / "hone.toml"
    config.write_text(
        CONFIG.format(
            completion=arguments.completion,
            data=folder / "data",
            rollouts=str(not arguments.no_rollouts).lower(),
            cache=longest + 64,
            longest=longest,
        )
    )
    command = [arguments.hone, "serve", "--config", str(config), "--model", str(arguments.model)]
    command += ["--backend", arguments.backend, "--quantize", arguments.quantize]
    explain = [*command, "--explain-memory", "--json"]
    plan = json.loads(subprocess.run(explain, check=True, capture_output=True, text=True).stdout)
    daemon = Daemon(command, folder / "log.txt")
    memory = daemon.memory
    try:
        daemon.wait_for("trainer", lambda s: s.get("max_sample_tokens", 0) > 0)
        started = memory.now
        memory.phase = "short step"
        for value in (1, 0):
            daemon.rate(daemon.chat("What is 2 + 3?")["id"], value)
        daemon.step()
        memory.phase = "conversation"
        probes = [daemon.chat(SENTENCE * n) for n in (1, 2)]
        for probe in probes:
            daemon.rate(probe["id"], 0)
        one, two = (probe["usage"]["prompt_tokens"] for probe in probes)
        count = 1 + (arguments.tokens - one) // (two - one)
        answer = daemon.chat(SENTENCE * count)
        daemon.rate(answer["id"], 1)
        outcome = daemon.step(beside=SENTENCE * count)
        filled = daemon.cache_filled()
        limit = daemon.train()["max_sample_tokens"]
    finally:
        daemon.stop()
    ledger = sum(path.stat().st_size for path in (folder / "data").glob("ledger*"))
    parts = {part["part"]: part["bytes"] for part in plan["parts"]}
    unfilled = max(0, parts["ledger cache"] - ledger)
    unfilled += round(parts["sampler cache"] * max(0.0, 1 - filled))
    held = plan["start"] + plan["generation"]
    planned = {
        "start": plan["start"],
        "conversation": held,
        "long step": held + plan["step"],
        "publication": held + plan["staging"],
        "peak": plan["peak"],
    }
    measured = {**memory.peaks, "start": started, "peak": max(memory.peaks.values())}
    phases = {
        name: {
            "planned": size,
            "reached": size - unfilled,
            "measured": measured[name],
            "ratio": measured[name] / size,
            "ratio_reached": measured[name] / (size - unfilled),
        }
        for name, size in planned.items()
        if name in measured
    }
    total = lambda names: sum(parts.get(name, 0) for name in names)
    base, caches, activations = parts["base weights"], total(CACHES), total(ACTIVATIONS)
    return {
        "base": base,
        "caches": caches,
        "activations": activations,
        "unfilled": unfilled,
        "multiple": measured["peak"] / (base + caches + activations),
        "tokens": answer["usage"]["total_tokens"],
        "max_sample_tokens": limit,
        **outcome,
        "plan": plan,
        "phases": phases,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hone", required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--backend", default="mistralrs", choices=["mistralrs", "native"])
    parser.add_argument("--quantize", default="none", choices=["none", "q8_0", "q4_k"])
    parser.add_argument("--tokens", type=int, default=6000, help="length of the conversation")
    parser.add_argument("--completion", type=int, default=32, help="tokens of its completion")
    parser.add_argument("--no-rollouts", action="store_true", help="sample no shadows")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = run(arguments, Path(folder))
    if arguments.json:
        print(json.dumps(report))
    else:
        outcome = "trained" if report["trained"] else "rejected" if report["rejected"] else "lost"
        limit = report["max_sample_tokens"]
        print(f"a conversation of {report['tokens']} tokens, limit {limit}: {outcome}")
        print("| phase | planned, MiB | reached, MiB | measured, MiB | of planned | of reached |")
        print("| --- " * 6 + "|")
        for name, row in report["phases"].items():
            sizes = " | ".join(f"{row[x] / MIB:,.0f}" for x in ("planned", "reached", "measured"))
            print(f"| {name} | {sizes} | {row['ratio']:.2f} | {row['ratio_reached']:.2f} |")
        sizes = [f"{name} {report[name] / MIB:,.0f}" for name in ("base", "caches", "activations")]
        print(f"peak: {report['multiple']:.2f} times {', '.join(sizes)} MiB together")
    low, high = BOUNDS
    peak = report["phases"]["peak"]
    within = low <= peak["ratio_reached"] and peak["ratio"] <= high
    if arguments.backend == "native":
        within = within and report["multiple"] <= NATIVE_BOUND
    return 0 if within and (report["trained"] or report["rejected"]) else 1


if __name__ == "__main__":
    sys.exit(main())
