"""Runs `hone demo` with several seeds and prints the table of docs/demo.md.

    python benches/demo.py --hone target/release/hone --seeds 1 2 3 4 5
    python benches/demo.py --hone target/release/hone --seeds 1 2 --rewards feedback graded
"""

import argparse
import itertools
import json
import subprocess
import tempfile
from pathlib import Path


def cell(row: dict) -> str:
    """Mean reward before and after, the latter with its 95 % interval."""
    after = row["after"]["reward"]
    low, high = after["interval"]["low"], after["interval"]["high"]
    return f"{row['before']['reward']['mean']:.2f} → {after['mean']:.2f} ({low:.2f}–{high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hone", required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--rewards", nargs="+", default=["both"])
    arguments = parser.parse_args()
    kinds = [f"{kind}, {way}" for kind in ("asked", "larger") for way in ("greedy", "sampled")]
    print(f"| rewards | seed | {' | '.join(kinds)} | failed | seconds |")
    print("| --- " * (len(kinds) + 4) + "|")
    for rewards, seed in itertools.product(arguments.rewards, arguments.seeds):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "report.json"
            command = [arguments.hone, "demo", "--seed", str(seed), "--rewards", rewards]
            subprocess.run([*command, "--report", str(file)], check=True, capture_output=True)
            report = json.loads(file.read_text())
        rows = {f"{row['kind']}, {row['decoding']}": cell(row) for row in report["held_out"]}
        last = [report["failed_requests"], f"{report['wall_seconds']:.0f}"]
        cells = [rewards, seed, *(rows[kind] for kind in kinds), *last]
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
