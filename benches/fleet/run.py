#!/usr/bin/env python3
"""Measures a fleet of the release binary on a real S3 server, and writes benches/fleet/results.json.

    python3 benches/fleet/run.py --binary target/release/hone --environments target/fleet
    python3 benches/fleet/run.py --binary target/release/hone --environments target/fleet --only costs

- throughput: in turns on one machine, a server that ships, the same server while the store is stopped, and a process
  that is no member of a fleet. Nothing is trained.
- intake: how fast a trainer takes the records of `throughput` in.
- costs: requests to the store and bytes, without traffic and at a steady rate.
- publication: from the rating that completes a step's samples to the new version on all three servers.
"""

import argparse
import http.client
import json
import os
import pathlib
import statistics
import sys
import tempfile
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tests/fleet"))
import run as fleets  # noqa: E402

RESULTS = HERE / "results.json"
COUNTERS = {
    "writes": r'hone_fleet_store_requests_total\{kind="write"\}',
    "reads": r'hone_fleet_store_requests_total\{kind="read"\}',
    "sent": r'hone_fleet_store_bytes_total\{direction="sent"\}',
    "received": r'hone_fleet_store_bytes_total\{direction="received"\}',
}


class Client:
    """A user with one connection."""

    def __init__(self, server):
        self.connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)

    def post(self, path, body):
        self.connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answer = self.connection.getresponse()
        text = answer.read()
        if answer.status >= 300:
            raise SystemExit(f"{path}: {answer.status} {text[:200]}")
        return json.loads(text)

    def ask(self, number):
        content = f"What is {number % 10} + {number // 10 % 10}?"
        body = {"model": "default", "max_tokens": 24, "messages": [{"role": "user", "content": content}]}
        return self.post("/v1/chat/completions", body)["id"]

    def rate(self, answer, value):
        self.post("/v1/feedback", {"completion_id": answer, "name": "thumbs", "value": float(value)})


def processor_seconds(process):
    fields = pathlib.Path(f"/proc/{process.child.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def load(servers, seconds, users, pause=0.0):
    """Answers and ratings for a time. Returns the number of completions."""
    counts, end = [0] * users, time.monotonic() + seconds

    def user(place):
        client = Client(servers[place % len(servers)])
        while time.monotonic() < end:
            client.rate(client.ask(counts[place] + 7 * place), counts[place] % 2)
            counts[place] += 1
            time.sleep(pause)

    threads = [threading.Thread(target=user, args=(place,)) for place in range(users)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts)


def spread(values, digits=3):
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, digits) for name, value in found.items()} | {"n": len(values)}


def started(process):
    process.start()
    fleets.until(f"{process.name} is ready", process.ready, 90)


def variables(processes, **more):
    for process in processes:
        process.variables = {**process.variables, **more}


def ready(fleet):
    fleet.store.start()
    fleets.until("the store", fleet.answers, 90)
    fleet.command("init", "--data", str(fleet.trainers[0].data))
    for process in [*fleet.trainers, *fleet.servers]:
        process.start()
    for server in fleet.servers:
        fleets.until(f"{server.name} is ready", server.ready, 90)


def throughput(fleet, rounds, seconds):
    fleet.servers, fleet.trainers = fleet.servers[:1], fleet.trainers[:1]
    trainer, alone = fleet.trainers[0], fleets.Hone(fleet, "all", "alone")
    variables([*fleet.servers, trainer, alone], HONE_TRAIN_ENABLED="false")
    ready(fleet)
    trainer.kill(fleets.signal.SIGTERM)
    variables([alone], HONE_FLEET_URL="")
    fleet.trainers.append(alone)
    started(alone)
    sides = {"shipping": fleet.servers[0], "held": fleet.servers[0], "alone": alone}
    turns, shipped = [], 0
    for turn in range(rounds + 1):
        figures = {}
        for name in sorted(sides, key=lambda name: (list(sides).index(name) + turn) % 3):
            process = sides[name]
            if name == "held":
                fleet.store.child.send_signal(fleets.signal.SIGSTOP)
            before, began = processor_seconds(process), time.monotonic()
            count = load([process], seconds, 8)
            used = processor_seconds(process) - before
            figures[name] = (count / (time.monotonic() - began), 1000 * used / count)
            shipped += count if name != "alone" else 0
            if name == "held":
                fleet.store.child.send_signal(fleets.signal.SIGCONT)
                time.sleep(6)
                fleets.until("all shipped", lambda: process.metric("hone_fleet_unshipped_batches") == 0)
        # The first turn warms up.
        if turn:
            turns.append(figures)
            print({name: [round(value, 2) for value in pair] for name, pair in figures.items()}, flush=True)
    rates = lambda name, place: spread([figures[name][place] for figures in turns], 2)
    ratio = lambda to, place: spread([figures["shipping"][place] / figures[to][place] for figures in turns])
    found = {name: {"completions_per_second": rates(name, 0), "processor_ms": rates(name, 1)} for name in sides}
    for name in ["held", "alone"]:
        found[name] |= {"ratio": ratio(name, 0), "ratio_of_processor_time": ratio(name, 1)}
    alone.kill()
    fleets.until("all shipped", lambda: fleet.servers[0].metric("hone_fleet_unshipped_batches") == 0)
    trainer.start()
    fleets.until("the trainer", trainer.ready, 90)
    taken = lambda: fleets.rows(trainer)
    before, began, used = taken(), time.monotonic(), processor_seconds(trainer)
    fleets.until("the intake", lambda: taken() >= shipped, 300)
    wall = time.monotonic() - began
    intake = {
        "completions": shipped - before, "completions_per_second": round((shipped - before) / wall),
        "processor_ms": round(1000 * (processor_seconds(trainer) - used) / max(shipped - before, 1), 3),
    }
    return {**found, "intake": intake}


def counted(processes):
    return {p.name: {name: p.metric(pattern) for name, pattern in COUNTERS.items()} for p in processes}


def costs(fleet, seconds):
    variables(fleet.trainers, HONE_TRAIN_ENABLED="false")
    ready(fleet)
    found, active = {}, fleet.trainer()
    for name, users, pause in [("idle", 0, 0.0), ("light", 3, 1.0), ("busy", 12, 0.1)]:
        # The reports and what was shipped last are counted with the time in which they happened.
        time.sleep(8)
        before = counted([*fleet.servers, active])
        began = time.monotonic()
        count = load(fleet.servers, seconds, users, pause) if users else time.sleep(seconds) or 0
        time.sleep(6)
        wall = time.monotonic() - began
        after = counted([*fleet.servers, active])
        change = {p: {key: after[p][key] - before[p][key] for key in COUNTERS} for p in after}
        servers = [change[server.name] for server in fleet.servers]
        total = lambda rows: {key: sum(row[key] for row in rows) for key in COUNTERS}
        share = lambda row, by: {key: round(value / by, 3) for key, value in row.items()}
        found[name] = {
            "completions_per_second": round(count / wall, 2),
            "server": share(total(servers), wall * len(servers)), "trainer": share(change[active.name], wall),
            "for_each_completion": share(total(change.values()), count) if count else None,
        }
        print(name, json.dumps(found[name]), flush=True)
    return found


def publication(fleet, trials):
    # In a fleet the trainer has a machine of its own, which no request holds up.
    variables(fleet.trainers, HONE_TRAIN_SAMPLES_PER_STEP="8", HONE_TRAIN_PRIORITY="normal")
    ready(fleet)
    clients = [Client(server) for server in fleet.servers]
    all_servers, steps = [], fleet.trainer()
    step_seconds = r"hone_train_step_duration_seconds_sum"
    began_step, began_count = steps.metric(step_seconds), steps.metric("hone_train_steps_total")
    files_before = counted([*fleet.servers, steps])
    for trial in range(trials):
        answers = [clients[number % 3].ask(trial + 11 * number) for number in range(8)]
        for number, answer in enumerate(answers[1:]):
            clients[number % 3].rate(answer, number % 2)
        time.sleep(2.0)
        before = max(server.version() for server in fleet.servers)
        clients[trial % 3].rate(answers[0], 1.0)
        began = time.monotonic()
        while min(server.version() for server in fleet.servers) <= before:
            if time.monotonic() > began + 60:
                raise SystemExit(f"trial {trial}: no version after {before}")
            time.sleep(0.02)
        all_servers.append(time.monotonic() - began)
        print(f"{all_servers[-1]:.2f}", end=" ", flush=True)
    print()
    time.sleep(6)
    files = counted([*fleet.servers, steps])
    change = lambda process, key: files[process.name][key] - files_before[process.name][key]
    count = steps.metric("hone_train_steps_total") - began_count
    step = (steps.metric(step_seconds) - began_step) / max(count, 1)
    return {"seconds": spread(all_servers, 2), "step_seconds": round(step, 3),
            "sent_for_each_version": round(change(steps, "sent") / count),
            "received_by_each_server": round(change(fleet.servers[0], "received") / count)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=pathlib.Path, required=True)
    parser.add_argument("--environments", type=pathlib.Path, required=True)
    parser.add_argument("--only", choices=["throughput", "costs", "publication"], action="append")
    parser.add_argument("--rounds", type=int, default=12, help="turns of both sides")
    parser.add_argument("--seconds", type=float, default=10, help="of each turn, and a third of each part of costs")
    parser.add_argument("--trials", type=int, default=40, help="versions that are timed")
    arguments = parser.parse_args()
    program = fleets.seaweed(arguments.environments.absolute())
    if not program:
        raise SystemExit("SeaweedFS cannot be installed")
    parts = {
        "throughput": lambda fleet: throughput(fleet, arguments.rounds, arguments.seconds),
        "costs": lambda fleet: costs(fleet, 3 * arguments.seconds),
        "publication": lambda fleet: publication(fleet, arguments.trials),
    }
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in arguments.only or parts:
        with tempfile.TemporaryDirectory(prefix="hone-fleet-") as folder:
            fleet = fleets.Fleet(arguments.binary.absolute(), program, pathlib.Path(folder), arguments)
            try:
                results[name] = parts[name](fleet)
            except BaseException:
                for process in [fleet.store, *fleet.servers, *fleet.trainers]:
                    print(f"--- {process.log.name}\n{process.text()[-1500:]}", file=sys.stderr)
                raise
            finally:
                for process in [*fleet.servers, *fleet.trainers, fleet.store]:
                    process.kill(fleets.signal.SIGTERM)
        load_now, date = round(os.getloadavg()[0], 1), time.strftime("%Y-%m-%d")
        results["machine"] = {"processors": os.cpu_count(), "load": load_now, "date": date}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
