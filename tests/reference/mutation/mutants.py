"""Mutation testing: small changes of the sources, and whether a test fails.

    python tests/reference/mutation/mutants.py [--count 170] [--seed 1] [--retry] [--lock FILE]

A seed draws mutants from all that the rules below make of the loss, advantages, token sampling,
packing, batch selection and the ledger's writes. One build contains the whole sample: the body of a
mutated function becomes a `match` with an arm for each mutant, which HONE_MUTANT selects when the
tests run (Untch et al. 1993, "Mutation analysis using mutant schemata"). The few mutants outside of
such functions have a build each. For every mutant the unit tests of its crate and then of the crates
that check it run, until a test fails or does not end (killed) or all pass (survived). Mutants that do
not compile are replaced by the next ones.

The sources are restored after each build, after an interrupt, and at the next start after a kill.
Results are added to results.json, so that an interrupted run continues. `--retry` tests the survivors
again. A `reason` that is written into a survivor there is kept: it says why no test can fail.
"""

import argparse
import fcntl
import json
import os
import pathlib
import random
import re
import resource
import signal
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
RESULTS = HERE / "results.json"
JOURNAL = ROOT / "target" / "mutants.json"

# Areas: sources, and the unit tests to run, in order: a crate and the start of the tests' names.
TRAIN = [("hone-train", "")]
AREAS = {
    "loss": (["crates/train/src/learning/loss"], [("hone-train", "learning::loss")] + TRAIN),
    "advantages": (["crates/train/src/data/advantage"], [("hone-train", "data::")] + TRAIN),
    "packing": (["crates/train/src/data/packing/mod.rs"], [("hone-train", "learning::f")] + TRAIN),
    "batch selection": (
        ["crates/train/src/data/batch_builder", "crates/train/src/data/feedback_cap.rs"],
        [("hone-train", "data::")] + TRAIN,
    ),
    "sampling": (["crates/engine/src/sampling"], [("hone-engine", ""), ("hone-sampler", "")]),
    "ledger": (
        ["crates/store/src/write/apply"],
        [("hone-store", ""), ("hone-rollout", ""), ("hone-train", ""), ("hone", "")],
    ),
}
PACKAGES = ["hone", "hone-train", "hone-engine", "hone-sampler", "hone-store", "hone-rollout"]

# Returns the mutant that a test binary runs with; 0 is none.
SELECTED = """
pub(crate) fn selected_mutant() -> u32 {
    static SELECTED: std::sync::LazyLock<u32> = std::sync::LazyLock::new(|| {
        std::env::var("HONE_MUTANT").ok().and_then(|text| text.parse().ok()).unwrap_or(0)
    });
    *SELECTED
}
"""

# Rules: what a pattern matches, and its replacements. Text is formatted by rustfmt, so binary
# operators have spaces around them and generics do not.
RULES = [
    (r"(?<= )==(?= )", ["!="]),
    (r"(?<= )!=(?= )", ["=="]),
    (r"(?<= )<(?= )", ["<=", ">"]),
    (r"(?<= )>(?= )", [">=", "<"]),
    (r"(?<= )<=(?= )", ["<", ">"]),
    (r"(?<= )>=(?= )", [">", "<"]),
    (r"(?<= )\+(?= (?!'|[A-Z]\w*[a-z]))", ["-"]),
    (r"(?<=[\w)\]] )-(?= )", ["+"]),
    (r"(?<=[\w)\]] )\*(?= )", ["/"]),
    (r"(?<= )/(?= )", ["*"]),
    (r"(?<= )%(?= )", ["/"]),
    (r"(?<= )\+=(?= )", ["-="]),
    (r"(?<= )-=(?= )", ["+="]),
    (r"(?<= )\*=(?= )", ["/="]),
    (r"(?<= )/=(?= )", ["*="]),
    (r"(?<= )&&(?= (?!let ))", ["||"]),
    (r"(?<=[\w)\]}?] )\|\|(?= )", ["&&"]),
    (r"(?<![\w!])!(?=[\w(])", [""]),
    (r"(?<=[(=,|{] )-(?=[\w(])|(?<=\()-(?=[\w(])", [""]),
    (r"(?<=\.)min(?=\()", ["max"]),
    (r"(?<=\.)max(?=\()", ["min"]),
    (r"(?<=\.)any(?=\()", ["all"]),
    (r"(?<=\.)all(?=\()", ["any"]),
    (r"(?<=\.)is_some(?=\(\))", ["is_none"]),
    (r"(?<=\.)is_none(?=\(\))", ["is_some"]),
    (r"(?<=\.)is_some_and(?=\()", ["is_none_or"]),
    (r"(?<=\.)is_none_or(?=\()", ["is_some_and"]),
    (r"(?<=\.)first(?=\()", ["last"]),
    (r"(?<=\.)last(?=\()", ["first"]),
    (r"\.rev\(\)", [""]),
    (r"\.abs\(\)", [""]),
    (r"\.sqrt\(\)", [""]),
    (r"\.exp\(\)", [""]),
    (r"(?<=\w|\)|\])\.\.(?=[\w(])", ["..="]),
    (r"\.\.=(?=[\w(])", [".."]),
    (r"\btrue\b", ["false"]),
    (r"\bfalse\b", ["true"]),
    (r"\bcontinue;", ["break;", ""]),
    (r"\bbreak;", ["continue;", ""]),
    (r"\bSome\(\w[\w.]*\)(?=[;,)\s])(?! =)", ["None"]),
    (r"(?<![\w.])0\.0(?!\w)", ["1.0"]),
    (r"(?<![\w.])1\.0(?!\w)", ["0.0", "2.0"]),
    (r"(?<![\w.])(?!0\.0|1\.0)\d+\.\d+(?!\w)", ["({} + 1.0)", "({} / 2.0)"]),
    (r"(?<![\w.#])0(?![\w.]\w|\.\d|x)\b", ["1"]),
    (r"(?<![\w.#])(?<!\de-)[1-9]\d*(?![\w.]\w|\.\d)\b", ["({} + 1)", "({} - 1)"]),
    # Statements: assignments and calls on one line.
    (r"(?m)(?<=^)[ ]+[\w.*\[\]]+ (?:[-+*/|&]?=) [^;{}]+;$", [""]),
    (r"(?m)(?<=^)[ ]+[\w.]+\.\w+\([^;{}]*\)\??;$", [""]),
]

# Bodies that replace a function's, by the pattern of its return type.
BODIES = [
    (r"", [""]),
    (r"bool", ["true", "false"]),
    (r"f64|f32", ["0.0", "1.0"]),
    (r"usize|u64|u32", ["0", "1"]),
    (r"Option<.*>", ["None"]),
    (r"Option<f64>", ["Some(0.0)", "Some(1.0)"]),
    (r"Vec<.*>", ["Vec::new()"]),
    (r"Result<\(\)(?:, .*)?>", ["Ok(())"]),
    (r"Result<bool(?:, .*)?>", ["Ok(true)", "Ok(false)"]),
]


def masked(text: str) -> str:
    """The source with comments, strings, characters, attributes and test code as spaces."""
    skip = re.compile(
        r"//[^\n]*|/\*.*?\*/|b?r(#*)\".*?\"\1|b?\"(?:\\.|[^\"\\])*\"|b?'(?:\\.[^']*|[^'\\\n])'"
        r"|#!?\[[^\]]*(?:\[[^\]]*\][^\]]*)*\]",
        re.S,
    )
    blank = lambda found: re.sub(r"[^\n]", " ", found.group())
    code = skip.sub(blank, text)
    for found in re.finditer(r"#\[cfg\((?:any\()?test", text):
        if code[found.start()] != " ":
            continue
        brace = code.find("{", found.start())
        semicolon = code.find(";", found.start())
        end = semicolon + 1 if 0 <= semicolon < brace or brace < 0 else closing(code, brace)
        code = code[: found.start()] + re.sub(r"[^\n]", " ", code[found.start() : end]) + code[end:]
    return code


def closing(code: str, brace: int) -> int:
    """The position after the brace that closes the one at `brace`."""
    depth = 0
    for at in range(brace, len(code)):
        depth += {"{": 1, "}": -1}.get(code[at], 0)
        if depth == 0:
            return at + 1
    return len(code)


def parses(code: str, start: int, new: str) -> bool:
    """False for changes that the language does not allow."""
    before = re.split(r"[;{}]", code[:start])[-1]
    after = re.split(r"[;{}]", code[start:])[0]
    if new == "" and code[start] == " ":
        return code[:start].rstrip()[-1] in ";{}"
    if new == "||":
        return not re.search(r"\b(?:if|while) let\b|&& let\b", before + after)
    return not (new == "<" and re.search(r"\bas \w+ $", before))


def functions(code: str) -> list[tuple[int, int, str]]:
    """Start and end of the body and the return type of every function, outer ones first."""
    found = []
    for match in re.finditer(r"\bfn \w+(?:\[[^\]]*\]|[^;{\[])*\{", code):
        returns = re.search(r"\)\s*->\s*(.*?)\s*(?:where.*)?\{$", match.group(), re.S)
        kind = " ".join(returns.group(1).split()) if returns else ""
        found.append((match.end(), closing(code, match.end() - 1) - 1, kind))
    return found


def mutants_of(text: str) -> list[dict]:
    """Every change: its span, its replacement, and the span of the function's body."""
    code, found = masked(text), []
    bodies_of = functions(code)
    for pattern, replacements in RULES:
        for match in re.finditer(pattern, code):
            allowed = [new for new in replacements if parses(code, match.start(), new)]
            found += [(*match.span(), new.replace("{}", match.group())) for new in allowed]
    for start, end, kind in bodies_of:
        for pattern, bodies in BODIES:
            if re.fullmatch(pattern, kind):
                found += [(start, end, f" {body} ") for body in bodies]
    mutants = []
    for start, end, new in found:
        around = [f for f in bodies_of if f[0] <= start and end <= f[1] and "impl " not in f[2]]
        body = around[0][:2] if around else None
        mutants.append({"span": (start, end), "new": new, "body": body})
    return mutants


def all_mutants() -> list[dict]:
    """Every mutant with its place; `span` and `body` are positions in the file's text."""
    mutants = []
    for area, (sources, _) in AREAS.items():
        for source in sources:
            path = ROOT / source
            for file in sorted(path.rglob("*.rs")) if path.is_dir() else [path]:
                if "tests" in file.relative_to(ROOT).parts or file.name == "tests.rs":
                    continue
                text = file.read_text()
                for mutant in mutants_of(text):
                    start, end = mutant["span"]
                    old = text[start:end]
                    mutants.append(
                        {
                            "area": area,
                            "file": str(file.relative_to(ROOT)),
                            "line": text.count("\n", 0, start) + 1,
                            "column": start - text.rfind("\n", 0, start),
                            "old": old if len(old) < 120 else f"{old[:117]}...",
                            **mutant,
                        }
                    )
    return mutants


def key(mutant: dict) -> tuple:
    return tuple(mutant[field] for field in ("file", "line", "column", "old", "new"))


def record(mutant: dict, outcome: str) -> dict:
    """The part of a mutant that results.json has."""
    return {k: mutant[k] for k in mutant if k not in ("span", "body", "number")} | {
        "outcome": outcome
    }


def change(text: str, mutants: list[dict]) -> str:
    """A file with an arm for each mutant of a function, or with the one mutant outside of any."""
    bodies: dict = {}
    for mutant in mutants:
        bodies.setdefault(mutant["body"] or mutant["span"], []).append(mutant)
    for (first, last), group in sorted(bodies.items(), reverse=True):
        arms = []
        for mutant in group:
            start, end = mutant["span"]
            changed = text[first:start] + mutant["new"] + text[end:last]
            if mutant["body"] is None:
                arms = None
                text = text[:start] + mutant["new"] + text[end:]
                break
            number = mutant["number"]
            arms.append(f"{number} => {{ // mutant {number}\n{changed}\n}} // end {number}\n")
        if arms is not None:
            old = text[first:last]
            arms.append(f"_ => {{{old}}}\n")
            text = f"{text[:first]} match crate::selected_mutant() {{\n{''.join(arms)}}}\n{text[last:]}"
    return text


def write_sources(mutants: list[dict]) -> None:
    """Writes the mutants into the sources, whose text the journal keeps."""
    files = sorted({mutant["file"] for mutant in mutants})
    roots = sorted({f"{file.split('/src/')[0]}/src/lib.rs" for file in files})
    JOURNAL.parent.mkdir(exist_ok=True)
    JOURNAL.write_text(json.dumps({f: (ROOT / f).read_text() for f in files + roots}))
    for file in files:
        text = (ROOT / file).read_text()
        (ROOT / file).write_text(change(text, [m for m in mutants if m["file"] == file]))
    for file in roots:
        (ROOT / file).write_text((ROOT / file).read_text() + SELECTED)


def restore() -> None:
    if JOURNAL.exists():
        for file, text in json.loads(JOURNAL.read_text()).items():
            (ROOT / file).write_text(text)
        JOURNAL.unlink()


def compile_tests() -> tuple[dict, list[dict]]:
    """The test binary of each crate, or the compiler's errors."""
    command = ["cargo", "test", "--release", "--lib", "--no-run", "--message-format=json"]
    command += [word for package in PACKAGES for word in ("-p", package)]
    lines = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    binaries, errors = {}, []
    for message in map(json.loads, lines.stdout.decode().splitlines()):
        if message.get("executable"):
            path = pathlib.Path(message["manifest_path"]).parent
            package = re.search(r"([\w-]+)[@#][\d.]+$", message["package_id"]).group(1)
            binaries[package if package in PACKAGES else path.name] = (message["executable"], path)
        if message.get("reason") == "compiler-message" and message["message"]["level"] == "error":
            errors.append(message["message"])
    return ({}, errors) if lines.returncode != 0 else (binaries, [])


def build(mutants: list[dict]) -> tuple[dict, list[dict]]:
    """The test binaries with all mutants that compile, and those that do not."""
    invalid: list[dict] = []
    try:
        while True:
            left = [mutant for mutant in mutants if mutant not in invalid]
            write_sources(left)
            binaries, errors = compile_tests()
            if binaries:
                return binaries, invalid
            wrong = set()
            for error in errors:
                for span in error["spans"]:
                    path = ROOT / span["file_name"]
                    lines = path.read_text().splitlines()[: span["line_start"]]
                    for line in reversed(lines):
                        if found := re.search(r"// (mutant|end) (\d+)$", line):
                            is_last = line is lines[-1]
                            if found[1] == "mutant" or is_last:
                                wrong.add(int(found[2]))
                            break
            if len(left) == 1:
                return {}, mutants
            if not wrong:
                sys.exit(f"errors outside of mutants: {[e['rendered'] for e in errors]}")
            invalid += [mutant for mutant in left if mutant["number"] in wrong]
            print(f"{len(wrong)} mutants do not compile", flush=True)
            restore()
    finally:
        restore()


def passes(binary: tuple[str, pathlib.Path], name: str, number: int, limit: float) -> bool:
    """Whether the tests whose names start with `name` pass within `limit` seconds."""
    variables = {"HONE_MUTANT": str(number), "PROPTEST_DISABLE_FAILURE_PERSISTENCE": "1"}
    memory = 12 << 30
    with subprocess.Popen(
        [binary[0], name, "--quiet"],
        cwd=binary[1],
        env=os.environ | variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (memory, memory)),
    ) as tests:
        try:
            return tests.wait(limit) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            if tests.poll() is None:
                os.killpg(tests.pid, signal.SIGKILL)


class Lock:
    """An optional lock on a file, for machines that run one build at a time."""

    def __init__(self, path: str | None, hold: float) -> None:
        self.path, self.hold = path, hold
        self.file = None

    def acquire(self) -> None:
        """Takes the lock; releases it first if this process has had it for `hold` seconds."""
        if self.file is not None and time.monotonic() - self.since > self.hold:
            self.release()
        if self.path is not None and self.file is None:
            self.file = open(self.path, "w")
            fcntl.flock(self.file, fcntl.LOCK_EX)
            self.since = time.monotonic()

    def release(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None


def write(seed: int, results: list[dict]) -> None:
    valid = [m for m in results if m["outcome"] != "invalid"]
    killed = sum(m["outcome"] == "killed" for m in valid)
    summary = {"seed": seed, "valid": len(valid), "killed": killed}
    lines = ",\n".join(f"  {json.dumps(m)}" for m in results)
    RESULTS.write_text(f'{json.dumps(summary)[:-1]}, "mutants": [\n{lines}\n]}}\n')


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--count", type=int, default=170, help="mutants that compile")
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--retry", action="store_true", help="test the survivors again")
    arguments.add_argument("--list", action="store_true", help="print the sample and stop")
    arguments.add_argument("--lock", help="a file to lock while a build or a test runs")
    arguments.add_argument("--hold", type=float, default=60, help="seconds to keep the lock")
    options = arguments.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    restore()
    every = all_mutants()
    random.Random(options.seed).shuffle(every)
    every = list({key(mutant): mutant for mutant in every}.values())
    for number, mutant in enumerate(every, 1):
        mutant["number"] = number
    if options.list:
        for mutant in every[: options.count]:
            print(f"{mutant['file']}:{mutant['line']}: {mutant['old']!r} -> {mutant['new']!r}")
        print(f"{len(every)} mutants")
        return
    results = json.loads(RESULTS.read_text())["mutants"] if RESULTS.exists() else []
    lock = Lock(options.lock, options.hold)

    def conclude(mutant: dict, outcome: str, seconds: float) -> None:
        place = f"{mutant['file']}:{mutant['line']}"
        print(f"{outcome} {seconds:4.0f} s {place} {mutant['old']!r} -> {mutant['new']!r}", flush=True)
        before = [result for result in results if key(result) == key(mutant)]
        if before:
            before[0]["outcome"] = outcome
        else:
            results.append(record(mutant, outcome))
        write(options.seed, results)

    def test(alive: list[dict], binaries: dict, limits: dict) -> None:
        """Runs the first, fastest tests of all mutants, then the next ones of those that survive."""
        for stage in range(max(len(stages) for _, stages in AREAS.values())):
            survivors = []
            for mutant in alive:
                stages = AREAS[mutant["area"]][1]
                if stage == len(stages):
                    conclude(mutant, "survived", 0)
                    continue
                package, name = stages[stage]
                lock.acquire()
                start = time.monotonic()
                if passes(binaries[package], name, mutant["number"], limits[package]):
                    survivors.append(mutant)
                else:
                    conclude(mutant, "killed", time.monotonic() - start)
            alive = survivors
            print(f"{len(alive)} are alive after stage {stage + 1}", flush=True)
        for mutant in alive:
            conclude(mutant, "survived", 0)

    def run(sample: list[dict]) -> None:
        """Tests a sample with one build, and one for each mutant outside of functions."""
        together = [mutant for mutant in sample if mutant["body"]]
        apart = [[mutant] for mutant in sample if not mutant["body"]]
        for mutants in [together] * bool(together) + apart:
            lock.acquire()
            binaries, invalid = build(mutants)
            results.extend(record(mutant, "invalid") for mutant in invalid)
            write(options.seed, results)
            if mutants is together:
                for package, binary in binaries.items():
                    lock.acquire()
                    start = time.monotonic()
                    if not passes(binary, "", 0, 600):
                        sys.exit(f"the tests of {package} fail without a mutant")
                    limits[package] = 30 + 5 * (time.monotonic() - start)
                    print(f"{package}: {time.monotonic() - start:.0f} s", flush=True)
            test([mutant for mutant in mutants if mutant not in invalid], binaries, limits)
            lock.release()

    limits = dict.fromkeys(PACKAGES, 300.0)
    if options.retry:
        survivors = {key(m) for m in results if m["outcome"] == "survived" and "reason" not in m}
        run([mutant for mutant in every if key(mutant) in survivors])
    else:
        while missing := options.count - sum(m["outcome"] != "invalid" for m in results):
            known = {key(result) for result in results}
            run([mutant for mutant in every if key(mutant) not in known][: max(missing, 1)])
    valid = [mutant for mutant in results if mutant["outcome"] != "invalid"]
    killed = sum(mutant["outcome"] == "killed" for mutant in valid)
    justified = sum("reason" in mutant for mutant in valid)
    print(f"{killed} of {len(valid)} killed, {justified} survivors justified")


if __name__ == "__main__":
    main()
