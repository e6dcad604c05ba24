"""Runs `hone demo` with several seeds and prints the table of docs/demo.md.

    python benches/demo.py --hone target/release/hone --seeds 1 2 3 4 5
    python benches/demo.py --hone target/release/hone --seeds 1 2 --rewards feedback
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path


def cell(stats: dict) -> str:
    reward = stats["reward"]
    interval = reward["interval"]
    return f"{reward['mean']:.2f} ({interval['low']:.2f}–{interval['high']:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hone", required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--rewards", default="both")
    arguments = parser.parse_args()
    print("| seed | questions | decoding | before | after | right | failed | seconds |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "report.json"
            command = [arguments.hone, "demo", "--seed", str(seed), "--report", str(file)]
            command += ["--rewards", arguments.rewards]
            subprocess.run(command, check=True, capture_output=True)
            report = json.loads(file.read_text())
        for row in report["held_out"]:
            right = f"{row['before']['right']:.0%} → {row['after']['right']:.0%}"
            cells = [seed, row["kind"], row["decoding"], cell(row["before"]), cell(row["after"])]
            cells += [right, report["failed_requests"], f"{report['wall_seconds']:.0f}"]
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
