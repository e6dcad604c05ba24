"""Uses one daemon for hours, with faults, and checks that nothing grows and no request fails.

    python tests/soak/run.py --binary target/release/hone
    python tests/soak/run.py --binary target/release/hone --minutes 10

Clients ask and rate while the daemon learns. An operator activates versions, erases end users, makes backups and sends
SIGHUP. Faults: the process is stopped for seconds (SIGSTOP), clients disconnect in the middle of a stream, send large,
broken or incomplete requests. Each minute has a line with the memory, the open files and the sizes of files. At the end
come their slopes, by least squares over the second half of the lines, and the checked ledger.

Fails if a request fails that is no fault itself, if the ledger has problems, or, from 60 minutes on, if a slope is
larger than its limit. Needs Linux. Exits with 0 and a last line `ok: ...`, else with 1 and `failed: ...`.
"""

import argparse
import http.client
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
MIB = 1 << 20
# What may grow so much in an hour, in the second half. Of n versions about log2(n) keep their files, each 1.2 MiB.
LIMITS = {"rss_mib": 16.0, "open_files": 4.0, "ledger_mib": 8.0, "adapters_mib": 2.0, "checkpoints_mib": 4.0}
# The process is stopped for at most so many seconds, so every request has an answer within `PATIENCE`.
STOPPED, PATIENCE = 4.0, 60.0


class Soak:
    def __init__(self, url, pid, data):
        self.url, self.pid, self.data = url, pid, data
        self.host = url.removeprefix("http://")
        self.end, self.lock = threading.Event(), threading.Lock()
        self.counts, self.failures = {}, []
        # Users whose completions are erased are not rated.
        self.users = 0

    def count(self, name):
        with self.lock:
            self.counts[name] = self.counts.get(name, 0) + 1

    def fail(self, text):
        self.count("failed")
        print(f"request failed: {text}", flush=True)
        self.failures.append(text)

    def call(self, name, path, body=None):
        """The answer of a request that must succeed; `None` if it failed."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                content = json.load(answer)
        except urllib.error.HTTPError as error:
            return self.fail(f"{name}: {error.code} {error.read()[:300]}")
        except (OSError, ValueError, http.client.HTTPException) as error:
            return self.fail(f"{name}: {error!r}")
        self.count(name)
        return content

    # What runs all the time.

    def question(self, draw, user, stream=False):
        a, b = draw.randrange(10), draw.randrange(10)
        return {
            "model": "default", "max_tokens": 24, "seed": draw.randrange(1 << 30), "user": user, "stream": stream,
            "messages": [{"role": "user", "content": f"What is {a} + {b}?"}],
            "metadata": {"answer": str(a + b)},
        }

    def client(self, number):
        draw = random.Random(number)
        while not self.end.is_set():
            user = f"user-{number}-{draw.randrange(20)}"
            answer = self.call("completion", "/v1/chat/completions", self.question(draw, user))
            if answer:
                rating = {"completion_id": answer["id"], "name": "thumbs", "value": draw.random(), "end_user": user}
                self.call("rating", "/v1/feedback", rating)
            self.end.wait(draw.expovariate(10))

    def operator(self):
        draw = random.Random("operator")
        work = [self.activate, self.erase, self.backup, self.hang_up]
        turn = 0
        while not self.end.wait(15):
            work[turn % len(work)](draw)
            turn += 1

    def activate(self, draw):
        """Activates a version of which the files are kept; the next step follows after `policy.hold_seconds`."""
        policies = self.call("versions", "/admin/policies")
        if policies:
            versions = [row["version"] for row in policies["data"] if row["state"] in ("active", "retired")]
            kept = [v for v in versions[-4:] if v == 0 or (self.data / f"adapters/v{v:06}").exists()]
            if kept:
                self.call("activation", f"/admin/policies/{draw.choice(kept)}/activate", {})

    def erase(self, draw):
        user = f"leaver-{self.users}"
        self.users += 1
        for _ in range(3):
            self.call("completion", "/v1/chat/completions", self.question(draw, user))
        erased = self.call("erasure", "/admin/erase", {"end_user": user})
        if erased and erased["completions"] != 3:
            self.fail(f"erasure: {erased}")

    def backup(self, _):
        made = self.call("backup", "/admin/backup", {})
        if made:
            shutil.rmtree(made["path"])

    def hang_up(self, _):
        os.kill(self.pid, signal.SIGHUP)
        self.count("SIGHUP")

    # Faults.

    def faults(self):
        draw = random.Random("faults")
        kinds = [self.stop, self.disconnect, self.large, self.broken, self.incomplete]
        while not self.end.wait(draw.expovariate(1 / 6)):
            kind = draw.choice(kinds)
            try:
                kind(draw)
                self.count(f"fault: {kind.__name__}")
            except (OSError, http.client.HTTPException) as error:
                self.fail(f"{kind.__name__}: {error!r}")

    def stop(self, draw):
        os.kill(self.pid, signal.SIGSTOP)
        self.end.wait(draw.uniform(0.1, STOPPED))
        os.kill(self.pid, signal.SIGCONT)

    def post(self, body, length=None):
        connection = http.client.HTTPConnection(self.host, timeout=PATIENCE)
        headers = {"content-type": "application/json", "content-length": str(length or len(body))}
        connection.request("POST", "/v1/chat/completions", body, headers)
        return connection

    def disconnect(self, draw):
        connection = self.post(json.dumps(self.question(draw, "guest", stream=True)).encode())
        connection.getresponse().read(20)
        connection.close()

    def refused(self, body, statuses):
        connection = self.post(body)
        try:
            status = connection.getresponse().status
        except (BrokenPipeError, ConnectionResetError):
            # The server may close the connection before it has read a large body.
            status = statuses[0]
        connection.close()
        if status not in statuses:
            self.fail(f"a request that must be refused: {status}")

    def large(self, _):
        body = json.dumps({"model": "default", "messages": [{"role": "user", "content": "x" * (24 * MIB)}]})
        try:
            self.refused(body.encode(), (413, 400))
        except (BrokenPipeError, ConnectionResetError):
            pass

    def broken(self, draw):
        body = json.dumps(self.question(draw, "guest"))
        self.refused(body[: draw.randrange(1, len(body) - 1)].encode(), (400, 422))

    def incomplete(self, draw):
        """A body that never comes; the connection is closed after a while."""
        connection = self.post(b"{", length=1000)
        self.end.wait(draw.uniform(0, 2))
        connection.close()

    # Measurements.

    def measure(self):
        status = pathlib.Path(f"/proc/{self.pid}/status").read_text()
        rss = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
        sizes = {name: size(self.data / name) / MIB for name in ("ledger.redb", "adapters", "checkpoints")}
        return {
            "rss_mib": int(rss.split()[1]) / 1024,
            "open_files": len(os.listdir(f"/proc/{self.pid}/fd")),
            "ledger_mib": sizes["ledger.redb"],
            "adapters_mib": sizes["adapters"],
            "checkpoints_mib": sizes["checkpoints"],
        }


def size(path):
    """Bytes of a file or a directory; files may be removed meanwhile."""
    files = [path] if path.is_file() else (pathlib.Path(d) / f for d, _, names in os.walk(path) for f in names)
    total = 0
    for file in files:
        try:
            total += file.stat().st_size
        except OSError:
            pass
    return total


def slope(times, values):
    """The slope of the line with the least squares, per hour."""
    mean_t, mean_v = sum(times) / len(times), sum(values) / len(values)
    spread = sum((t - mean_t) ** 2 for t in times)
    return 3600 * sum((t - mean_t) * (v - mean_v) for t, v in zip(times, values)) / spread if spread else 0.0


def soak(binary, minutes, data, log):
    command = [binary, "serve", "--bind", "127.0.0.1:0", "--config", HERE / "soak.toml", "--data", data]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, stdin=subprocess.DEVNULL, text=True)
    problems = []
    try:
        line = child.stdout.readline()
        if not line.startswith("listening on "):
            return [f"the first line of `hone serve` is {line!r}"]
        run = Soak(line.split()[2], child.pid, data)
        works = [run.operator, run.faults, *(lambda n=n: run.client(n) for n in range(3))]
        threads = [threading.Thread(target=work, daemon=True) for work in works]
        for thread in threads:
            thread.start()
        began, rows = time.monotonic(), []
        while time.monotonic() - began < minutes * 60 and child.poll() is None:
            time.sleep(min(60.0, minutes * 3))
            rows.append((time.monotonic() - began, run.measure()))
            shown = "  ".join(f"{name} {value:.1f}" for name, value in rows[-1][1].items())
            print(f"minute {rows[-1][0] / 60:.1f}: {shown}", flush=True)
        run.end.set()
        for thread in threads:
            thread.join(2 * PATIENCE)
        if child.poll() is not None:
            problems.append(f"the daemon ended with {child.returncode}")
        else:
            status = run.call("status", "/admin/train") or {}
            print(f"counts: {json.dumps(run.counts, sort_keys=True)}")
            print(f"trainer: {json.dumps({key: status.get(key) for key in ('state', 'step', 'policy_version', 'restarts')})}")
            if not status.get("step") or status.get("restarts") or status.get("state") == "failed":
                problems.append(f"the trainer failed or has not learned: {status}")
            child.send_signal(signal.SIGTERM)
            if child.wait(timeout=120) != 0:
                problems.append(f"exit code {child.returncode} after SIGTERM")
        if run.failures:
            problems.append(f"{len(run.failures)} requests failed, the first one: {run.failures[0]}")
        half = rows[len(rows) // 2 :]
        for name, limit in LIMITS.items():
            found = slope([t for t, _ in half], [row[name] for _, row in half])
            judged = minutes >= 60
            print(f"slope of {name}: {found:+.2f} per hour (limit {limit}{'' if judged else ', not judged'})")
            if judged and found > limit:
                problems.append(f"{name} grows by {found:.2f} per hour")
    finally:
        if child.poll() is None:
            child.kill()
        child.wait()
    checked = subprocess.run([binary, "db", "check", "--data", data], capture_output=True, text=True)
    if checked.returncode != 0:
        problems.append(f"the ledger has problems: {checked.stdout[-2000:]}{checked.stderr[-500:]}")
    return problems


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=pathlib.Path, required=True, help="a release binary of hone")
    parser.add_argument("--minutes", type=float, default=120, help="how long the load lasts (120)")
    parser.add_argument("--log", type=pathlib.Path, help="file for the daemon's log (standard error)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hone-soak-") as folder:
        log = open(args.log, "w") if args.log else None
        problems = soak(args.binary.resolve(), args.minutes, pathlib.Path(folder) / "data", log)
    for problem in problems:
        print(f"failed: {problem}")
    if problems:
        return 1
    print(f"ok: {args.minutes:g} minutes without a failed request")
    return 0


if __name__ == "__main__":
    sys.exit(main())
