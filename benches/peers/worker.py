"""Runs a script of this folder in a separate process, so that its memory and threads are measured alone."""

import json
import os
import subprocess
import sys

MARK = "RESULT "


def result(value):
    """Prints what `run` in the parent process returns."""
    print(MARK + json.dumps(value), flush=True)


def run(script, threads, *arguments):
    """Starts `script` with this process's arguments and `arguments`; returns its `result`."""
    command = [sys.executable, os.path.abspath(script), *sys.argv[1:], *arguments]
    environment = dict(os.environ, OMP_NUM_THREADS=str(threads), TOKENIZERS_PARALLELISM="false",
                       HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode != 0 or not lines:
        sys.exit(f"TRL failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(lines[-1][len(MARK):])
