"""Trains on one long conversation, and compares the memory that `hone serve` takes with its plan.

    python benches/memory_long.py --hone target/release/hone --model models-local/smollm2 --tokens 6000

It starts `hone serve`, rates two short conversations and takes a step, so that there is a baseline. Then
it sends a conversation of about `--tokens` tokens, rates it, and takes a step that trains on it and
publishes a version. All the while it reads the resident memory of the process from /proc. The plan is
that of `hone serve --explain-memory --json` with the same configuration.

The exit code is 1 if the measured peak is outside 0.85 to 1.15 of the planned one, or if the
conversation was neither trained on nor rejected.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

MIB = 1 << 20
# The measured peak as a share of the planned one.
BOUNDS = (0.85, 1.15)
# Seconds between two readings of the resident memory.
INTERVAL = 0.01
# Seconds that a request or a phase may take.
PATIENCE = 1800

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
max_sampler_difference = 0.0
priority = "normal"

[policy]
promotion = "direct"
publish_every = 1
parity_tolerance = 1000.0
"""


class Memory(threading.Thread):
    """Reads the resident memory of a process until it ends, and keeps the peak of each phase."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.status = Path(f"/proc/{pid}/status")
        self.phase = "start"
        self.peaks: dict[str, dict[str, int]] = {}
        self.ends: dict[str, dict[str, int]] = {}

    def run(self) -> None:
        while True:
            try:
                lines = self.status.read_text().splitlines()
            except OSError:
                return
            fields = dict(line.split(":", 1) for line in lines)
            if "VmRSS" not in fields:
                return
            now = {key: int(fields[key].split()[0]) << 10 for key in ("VmRSS", "RssAnon", "RssFile")}
            phase = self.phase
            if now["VmRSS"] > self.peaks.get(phase, now)["VmRSS"] or phase not in self.peaks:
                self.peaks[phase] = now
            self.ends[phase] = now
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
        raise SystemExit(f"no {what} within {PATIENCE} s: {status}")

    def metric(self, name: str) -> float:
        """The sum of a metric's samples whose name and labels start with `name`."""
        text = self.call("/metrics")["text"]
        lines = [line for line in text.splitlines() if line.startswith(name)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def step(self, phase: str) -> dict:
        """Waits for a group, and takes a step. Its publication is a phase of its own."""
        before = self.train()
        dropped = self.metric("hone_train_dropped_groups_total")
        arrived = lambda s: s["ready_groups"] > 0 and s["in_flight_groups"] + s["queued_prompts"] == 0
        self.wait_for("group", arrived)
        self.memory.phase = phase
        result: dict = {}
        take = lambda: result.update(self.call("/admin/train/step", method="POST"))
        caller = threading.Thread(target=take)
        caller.start()
        while caller.is_alive():
            if self.train()["state"] == "publishing":
                self.memory.phase = f"{phase}: publication"
            caller.join(0.01)
        self.memory.phase = "after"
        status = self.train()
        return {
            "trained": status["step"] > before["step"],
            "rejected": self.metric("hone_train_dropped_groups_total") > dropped,
            "status": status,
        }

    def stop(self) -> None:
        self.child.terminate()
        self.child.wait(timeout=PATIENCE)


def run(arguments: argparse.Namespace, folder: Path) -> dict:
    longest = arguments.tokens + arguments.tokens // 8
    config = folder / "hone.toml"
    config.write_text(
        CONFIG.format(
            completion=arguments.completion,
            data=folder / "data",
            rollouts=str(not arguments.no_rollouts).lower(),
            cache=max(32_768, 2 * longest),
            longest=longest,
        )
    )
    command = [arguments.hone, "serve", "--config", str(config), "--model", str(arguments.model)]
    plan = None
    if not arguments.no_plan:
        explain = [*command, "--explain-memory", "--json"]
        shown = subprocess.run(explain, check=True, capture_output=True, text=True).stdout
        plan = json.loads(shown)
    daemon = Daemon(command, folder / "log.txt")
    try:
        daemon.wait_for("trainer", lambda s: s.get("max_sample_tokens", 0) > 0)
        daemon.memory.phase = "short"
        for value in (1, 0):
            daemon.rate(daemon.chat("What is 2 + 3?")["id"], value)
        daemon.step("short step")
        daemon.memory.phase = "conversation"
        # Each repetition has as many tokens as the difference between two and one.
        word = "What is 12 + 30? "
        short = [daemon.chat(word * n)["usage"]["prompt_tokens"] for n in (1, 2)]
        count = (arguments.tokens - short[0]) // (short[1] - short[0])
        answer = daemon.chat(word * count)
        daemon.memory.phase = "rollout"
        daemon.rate(answer["id"], 1)
        outcome = daemon.step("step")
        time.sleep(1)
        limit = daemon.train()["max_sample_tokens"]
        print([l for l in daemon.call("/metrics")["text"].splitlines() if l.startswith(("hone_rollout", "hone_train_dropped", "hone_train_skipped"))])
    finally:
        daemon.stop()
    memory = daemon.memory
    peak = max(peak["VmRSS"] for peak in memory.peaks.values())
    return {
        "tokens": answer["usage"]["total_tokens"],
        "max_sample_tokens": limit,
        "trained": outcome["trained"],
        "rejected": outcome["rejected"],
        "plan": plan,
        "peaks": memory.peaks,
        "ends": memory.ends,
        "peak": peak,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hone", required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--completion", type=int, default=32)
    parser.add_argument("--no-rollouts", action="store_true")
    parser.add_argument("--no-plan", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = run(arguments, Path(folder))
    for name, peak in report["peaks"].items():
        end = report["ends"][name]
        f = lambda d: " ".join(f"{k} {v / MIB:8.1f}" for k, v in d.items())
        print(f"{name:<24} peak {f(peak)}   end {f(end)}")
    print({k: v for k, v in report.items() if k not in ("peaks", "ends", "plan")})
    return 0


if __name__ == "__main__":
    sys.exit(main())
