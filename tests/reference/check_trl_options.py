"""Checks that docs/trl.md names every option of TRL's GRPOConfig, and no other option.

    pip install -r tests/reference/requirements.txt
    python tests/reference/check_trl_options.py
"""

import dataclasses
import pathlib
import re
import sys

import trl

from provenance import made_by

made_by("trl")
table = (pathlib.Path(__file__).parents[2] / "docs" / "trl.md").read_text()
first_columns = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
named = [name for column in first_columns for name in re.findall(r"`(\w+)`", column)]
options = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
problems = [f"missing: {name}" for name in sorted(options - set(named))]
problems += [f"no option: {name}" for name in sorted(set(named) - options)]
problems += [f"twice: {name}" for name in sorted({n for n in named if named.count(n) > 1})]
if problems:
    sys.exit("failed: " + "; ".join(problems))
print(f"ok: {len(options)} options of TRL {trl.__version__}")
