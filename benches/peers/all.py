"""Measures Hone beside TRL and transformers, and writes the tables of docs/benchmarks.md and README.md.

    cargo build --release --workspace
    python benches/peers/all.py --hone target/release/hone --smollm2 models-local/smollm2

For each model: an optimizer step on given completions, sampling, and a whole step (sampling, rewards,
training, publication), with the peak memory. Both sides run on the same CPUs with the same number of
threads, in turns (A B A B). TRL and transformers first try every setting briefly; the best is timed. Needs
about 40 minutes on two cores with nothing else to do. `--only` repeats some rows, `--tables-only` only
writes the tables from results.json, `--check` fails if they differ.
"""

import argparse
import itertools
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import tables
from peer import MARK

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
RESULTS = os.path.join(HERE, "results.json")
GROUP, RANK, BETA = 8, 16, 0.01
COMPILE_SECONDS = 180

# Shapes of the work. `probe`, `warm_up` (not timed) and `steps` are numbers of steps.
MODELS = {
    "tiny": {
        "train": {"groups": 8, "prompt": 20, "completion": 24, "spread": 0.5, "probe": 3, "warm_up": 3, "steps": 10},
        "sample": [1, 8, 64],
        "whole": {"groups": 8, "max_tokens": 40, "warm_up": 5, "steps": 20},
    },
    "100m": {
        "train": {"groups": 1, "prompt": 64, "completion": 448, "spread": 0, "probe": 1, "warm_up": 1, "steps": 1},
        "sample": [1, 16],
        "whole": {"groups": 2, "max_tokens": 64, "warm_up": 2, "steps": 4},
    },
    "smollm2": {
        "train": {"groups": 2, "prompt": 130, "completion": 40, "spread": 0, "probe": 1, "warm_up": 1, "steps": 1},
        "sample": [1, 16],
        "whole": {"groups": 2, "max_tokens": 64, "warm_up": 2, "steps": 4},
    },
}
SAMPLE = {"prompt": 20, "tokens": 64, "runs": 3}

CONFIG = """
data.dir = "{scratch}/data"
model.path = "{model}"
dataset = {{ path = "{dataset}", held_out = 8 }}
rollout = {{ group_size = {group_size}, temperature = 1.0, max_tokens = {max_tokens}, max_ready_groups = {groups} }}
policy = {{ promotion = "direct", publish_every = 1 }}
engine = {{ compute = "{compute}" }}
run = {{ eval_every = 0, samples_every = 0 }}
[train]
max_steps = {last}
samples_per_step = {count}
learning_rate = 1e-7
warmup_steps = 0
beta = {beta}
compute = "{compute}"
lora = {{ r = {rank}, alpha = {alpha} }}
[[route]]
name = "default"
reward = [
    {{ name = "correct", kind = "exact_match" }},
    {{ name = "format", kind = "format_strict", weight = 0.5 }},
]
"""


def say(text):
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


class Peer:
    """A process of `peer.py`."""

    def __init__(self, bench):
        self.bench = bench
        self.process = subprocess.Popen(
            [sys.executable, os.path.join(HERE, "peer.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=bench.log, text=True)

    def ask(self, timeout=None, **job):
        """The result of a job; `{"error": …}` if it fails or takes more than `timeout` seconds."""
        job = {"threads": self.bench.threads, "model": self.bench.model, "scratch": self.bench.scratch,
               "group_size": GROUP, "rank": RANK, "beta": BETA, **job}
        timer = threading.Timer(timeout or 3600, self.process.kill)
        timer.start()
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        found = next((line for line in self.process.stdout if line.startswith(MARK)), None)
        timer.cancel()
        if not found:
            self.process.wait()
        result = json.loads(found[len(MARK):]) if found else {"error": "took too long, or was ended"}
        if "error" in result and not timeout:
            sys.exit(f"{result['error']}; see {self.bench.log.name}")
        return result

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()


class Bench:
    """The rows of one model."""

    def __init__(self, args, name, model, log, scratch):
        self.hone, self.turns, self.threads = os.path.abspath(args.hone), args.turns, args.threads
        self.name, self.model, self.log, self.scratch = name, os.path.abspath(model), log, scratch
        self.shape = MODELS[name]

    def run_hone(self, *words, program=""):
        """The program is `hone`, or with "-bench" the one beside it. Standard output and the peak of the process's memory in bytes."""
        with tempfile.TemporaryFile("w+") as out:
            child = subprocess.Popen([self.hone + program, *map(str, words)], stdout=out, stderr=self.log)
            _, status, usage = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
            if child.returncode:
                sys.exit(f"hone{program} {words[0]} failed; see {self.log.name}")
            out.seek(0)
            return out.read(), usage.ru_maxrss * 1024

    def train(self):
        shape = self.shape["train"]
        samples = self.samples()
        count = len(samples)
        data = os.path.join(self.scratch, "data.json")
        with open(data, "w") as file:
            json.dump({"samples": samples}, file)
        job = {"samples": samples, "groups": shape["groups"]}
        micros = sorted({min(micro, count) for micro in (1, 2, 4, 8, count)}, reverse=True)
        settings = [dict(zip(("micro", "checkpointing", "attention", "dtype"), values)) for values in
                    itertools.product(micros, (False, True), ("sdpa", "eager"), ("f32", "bf16"))]
        with Peer(self) as peer:
            probes = peer.ask(kind="probe", settings=settings, steps=shape["probe"], **job)
        fastest = {on: best(probes, lambda p: p["checkpointing"] == on) for on in (False, True)}
        lean = min((p for p in probes if "growth_bytes" in p), key=lambda probe: probe["growth_bytes"])
        with Peer(self) as peer:
            lean_bytes = peer.ask(kind="train", setting=lean, warm_up=0, steps=1, **job)["peak_bytes"]
        runs = {"trl kept": [], "hone kept": [], "trl recomputed": [], "hone recomputed": []}
        with Peer(self) as kept, Peer(self) as recomputed:
            for turn in range(self.turns):
                for key, peer, on in (("kept", kept, False), ("recomputed", recomputed, True)):
                    runs[f"trl {key}"].append(peer.ask(
                        kind="train", setting=fastest[on], warm_up=shape["warm_up"], steps=shape["steps"], **job))
                    out, _ = self.run_hone(
                        "train", "--model", self.model, "--data", data, "--rank", RANK, "--beta", BETA,
                        "--steps", max(2, shape["steps"]), "--threads", self.threads, "--json",
                        "--compute", fastest[on]["dtype"], "--recompute", "always" if on else "never", program="-bench")
                    report = json.loads(out)
                    steps = [step["wall"] for step in report["steps"]]
                    runs[f"hone {key}"].append({"steps": steps, "peak_bytes": report["peak_bytes"]})
        return {
            **shape, "completions": count, "probes": probes, "lean": {**lean, "peak_bytes": lean_bytes},
            "settings": {"kept": fastest[False], "recomputed": fastest[True]},
            # Hone's arithmetic is that of TRL's setting.
            "compute": {f"hone {key}": fastest[on]["dtype"] for key, on in (("kept", False), ("recomputed", True))},
            "seconds": {key: [statistics.median(run["steps"]) for run in all] for key, all in runs.items()},
            # Of a fresh process: later runs in it start with fragmented memory.
            "peak_bytes": {key: all[0]["peak_bytes"] for key, all in runs.items()},
        }

    def samples(self):
        """Random tokens in groups that share a prompt; evenly spread advantages of mean 0, deviation 1."""
        shape, rng = self.shape["train"], random.Random(2)
        with open(os.path.join(self.model, "config.json")) as file:
            vocab = json.load(file)["vocab_size"]
        ids = lambda count: [rng.randrange(vocab) for _ in range(count)]
        deviation = ((GROUP * GROUP - 1) / 12) ** 0.5
        samples = []
        for _ in range(shape["groups"]):
            prompt = ids(shape["prompt"])
            for member in range(GROUP):
                length = round(shape["completion"] * (1 + shape["spread"] * rng.uniform(-1, 1)))
                samples.append({"prompt": prompt, "completion": ids(length),
                                "advantage": (member - (GROUP - 1) / 2) / deviation})
        return samples

    def sample(self, batch):
        group = min(batch, GROUP)
        job = {"kind": "sample", "batch": batch, "group": group, **SAMPLE}
        settings = [dict(zip(("cache", "compile", "attention", "dtype"), values)) for values in itertools.product(
            ("dynamic", "static"), (False, True), ("sdpa", "eager"), ("f32", "bf16"))]
        settings = [s for s in settings if not s["compile"] or (s["cache"], s["attention"]) == ("static", "sdpa")]
        probes, peer = [], Peer(self)
        for setting in settings:
            run = peer.ask(COMPILE_SECONDS, setting=setting, **{**job, "runs": 1})
            if peer.process.poll() is not None:
                peer = Peer(self)
            probes.append({**setting, "error": run["error"]} if "error" in run
                          else {**setting, "seconds": 1 / max(run["rates"])})
        fastest, rates = best(probes), {"hone": [], "transformers": []}
        with peer:
            for turn in range(self.turns):
                rates["transformers"].append(statistics.median(peer.ask(setting=fastest, **job)["rates"]))
                out, _ = self.run_hone(
                    "sample", "--model", self.model, "--batch", batch, "--group", group,
                    "--prompt", SAMPLE["prompt"], "--tokens", SAMPLE["tokens"], "--runs", SAMPLE["runs"],
                    "--threads", self.threads, "--json", program="-bench")
                rates["hone"].append(statistics.median(json.loads(out)["tokens_per_second"]))
        return {"batch": batch, "setting": fastest, "probes": probes, "rates": rates}

    def whole(self, training, sampling):
        """Tries TRL's fastest settings of the other rows with f32 and with bf16, and times the faster."""
        shape = self.shape["whole"]
        count = shape["groups"] * GROUP
        job = {"kind": "train", "dataset": os.path.join(ROOT, "datasets", "additions.jsonl"),
               "groups": shape["groups"], "max_tokens": shape["max_tokens"]}
        cache = best(sampling["probes"], lambda p: not p["compile"])["cache"]
        probes = []
        with Peer(self) as peer:
            for dtype in ("f32", "bf16"):
                setting = {**best(training["probes"], lambda p: p["dtype"] == dtype), "cache": cache}
                # A micro-batch of all completions is one of all here too.
                setting["micro"] = count if setting["micro"] == training["completions"] else setting["micro"]
                run = peer.ask(setting=setting, warm_up=1, steps=1, **job)
                probes.append({**setting, "seconds": run["steps"][-1] / run["lengths"][-1]})
        fastest, runs = best(probes), {"hone": [], "trl": []}
        with Peer(self) as peer:
            for turn in range(self.turns):
                # TRL has no queue of samples to fill.
                runs["trl"].append(peer.ask(
                    setting=fastest, warm_up=shape["warm_up"] // 2, steps=shape["steps"] // 2, **job))
                runs["hone"].append(self.whole_hone(count, fastest["dtype"]))
        mean = lambda key, part: [statistics.mean(run[part]) for run in runs[key]]
        return {
            "completions": count, "max_tokens": shape["max_tokens"], "setting": fastest, "probes": probes,
            "compute": {"hone": fastest["dtype"]},
            "seconds": {key: mean(key, "steps") for key in runs},
            "lengths": {key: mean(key, "lengths") for key in runs},
            "peak_bytes": {key: all[0]["peak_bytes"] for key, all in runs.items()},
            "staleness": mean("hone", "staleness"),
        }

    def whole_hone(self, count, compute):
        shape = self.shape["whole"]
        with tempfile.TemporaryDirectory() as scratch:
            config = os.path.join(scratch, "hone.toml")
            with open(config, "w") as file:
                file.write(CONFIG.format(
                    scratch=scratch, model=self.model, count=count, group_size=GROUP, beta=BETA, rank=RANK,
                    alpha=2 * RANK, compute=compute, last=shape["warm_up"] + shape["steps"],
                    dataset=os.path.join(ROOT, "datasets", "additions.jsonl"), **shape))
            _, peak = self.run_hone("train", "--config", config)
            with open(os.path.join(scratch, "data", "run", "steps.jsonl")) as file:
                steps = [json.loads(line) for line in file]
        ends = [step["time_ms"] / 1e3 for step in steps[shape["warm_up"] - 1:]]
        timed = steps[shape["warm_up"]:]
        return {"steps": [b - a for a, b in zip(ends, ends[1:])], "peak_bytes": peak,
                "lengths": [step["completion_length"] for step in timed],
                "staleness": [step["staleness_versions"] for step in timed]}


def best(probes, condition=lambda probe: True):
    """The fastest setting that was not given up and meets the condition."""
    return min((p for p in probes if "seconds" in p and condition(p)), key=lambda p: p["seconds"])


class OtherWork:
    """The share of the machine's processor time that other processes take."""

    def __init__(self):
        self.begun, self.used = time.monotonic(), self.seconds()

    def seconds(self):
        own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        with open("/proc/stat") as file:
            user, nice, system, _idle, _wait, irq, softirq, steal, *_ = map(int, file.readline().split()[1:])
        ticks = user + nice + system + irq + softirq + steal
        return ticks / os.sysconf("SC_CLK_TCK") - sum(used.ru_utime + used.ru_stime for used in own)

    def share(self):
        return (self.seconds() - self.used) / (time.monotonic() - self.begun) / os.cpu_count()


def environment(args, packages=("torch", "transformers", "trl", "peft")):
    """Versions and machine."""
    from importlib.metadata import version

    output = lambda *words: subprocess.run(words, capture_output=True, text=True, cwd=ROOT).stdout.strip()
    commit = output("git", "rev-parse", "--short=7", "HEAD")
    if output("git", "status", "--porcelain", "--", "src", "crates", "Cargo.toml", "Cargo.lock"):
        commit += " with changes"
    with open("/proc/cpuinfo") as file:
        lines = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    with open("/proc/meminfo") as file:
        memory = int(file.readline().split()[1]) / (1 << 20)
    return {
        "hone": commit, "rustc": output("rustc", "--version").split(" (")[0].removeprefix("rustc "),
        "python": sys.version.split()[0],
        **{name: version(name).split("+")[0] for name in packages},
        "processor": lines[0] if lines else "unknown", "cores": os.cpu_count(), "threads": args.threads,
        "memory_gib": round(memory), "date": time.strftime("%Y-%m-%d"), "load": os.getloadavg()[0],
    }


def limit_threads(args):
    """Limits this process and its children to `args.threads` processors, and sets that to their number."""
    cpus = sorted(os.sched_getaffinity(0))[:args.threads]
    args.threads = len(cpus)
    # As `taskset` does; children inherit it.
    os.sched_setaffinity(0, cpus)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"):
        os.environ[name] = str(args.threads)
    os.environ.update(TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")


def measure(args, results):
    limit_threads(args)
    found, began = environment(args), time.monotonic()
    if found["load"] > 0.5:
        say(f"WARNING: the load is {found['load']:.1f}; other work slows the threads of torch far more than Hone's")
    with tempfile.TemporaryDirectory() as scratch, open(args.log, "w") as log:
        random_model = os.path.join(scratch, "100m")
        models = {"tiny": os.path.join(ROOT, "models", "embedded"), "100m": random_model, "smollm2": args.smollm2}
        subprocess.run([args.hone + "-bench", "train", "--model", "100m-bf16", "--write-model", random_model],
                       check=True, stdout=log)
        for name, model in models.items():
            if not model:
                say("SKIPPED: smollm2; --smollm2 DIR gives its directory, which examples/smollm2.py writes")
                continue
            bench = Bench(args, name, model, log, scratch)
            rows = {f"{name} train": bench.train}
            for batch in bench.shape["sample"]:
                rows[f"{name} sample {batch}"] = lambda batch=batch: bench.sample(batch)
            last = f"{name} sample {bench.shape['sample'][-1]}"
            rows[f"{name} whole"] = lambda: bench.whole(results["rows"][f"{name} train"], results["rows"][last])
            for row, run in rows.items():
                if args.only and not any(part in row for part in args.only):
                    continue
                say(row)
                others = OtherWork()
                results["rows"][row] = {**run(), "environment": {**found, "others": others.share()}}
                with open(RESULTS, "w") as file:
                    json.dump(results, file, indent=1)
    say(f"measured in {(time.monotonic() - began) / 60:.0f} minutes")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hone", default="target/release/hone", help="the binary, with hone-bench beside it")
    parser.add_argument("--smollm2", help="directory of SmolLM2-135M-Instruct, from examples/smollm2.py")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="threads and CPUs of both")
    parser.add_argument("--turns", type=int, default=3, help="runs of each side")
    parser.add_argument("--only", nargs="+", metavar="ROW", help='measure only rows with this text: "tiny train"')
    parser.add_argument("--log", default=os.path.join(tempfile.gettempdir(), "peers.log"), help="output of both sides")
    parser.add_argument("--tables-only", action="store_true", help="only write the tables")
    parser.add_argument("--check", action="store_true", help="only check that the tables are those of results.json")
    args = parser.parse_args()
    results = {"rows": {}}
    if (args.only or args.tables_only or args.check) and os.path.exists(RESULTS):
        with open(RESULTS) as file:
            results = json.load(file)
    if not (args.tables_only or args.check):
        measure(args, results)
    documents = tables.documents(results["rows"])
    if args.check:
        return tables.check(ROOT, documents, results["documents"])
    results["documents"] = documents
    with open(RESULTS, "w") as file:
        json.dump(results, file, indent=1)
        file.write("\n")
    tables.write(ROOT, documents)


if __name__ == "__main__":
    sys.exit(main())
