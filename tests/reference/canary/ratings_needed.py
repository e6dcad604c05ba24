"""How many ratings a canary needs, by simulation of the test in crates/train/src/policy/canary.

Prints the table of docs/safety.md, and writes evidence.json, with which a unit test compares the Rust
code. Needs numpy, and takes some minutes:

    python tests/reference/canary/ratings_needed.py
"""

import json
import math
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from provenance import made_by  # noqa: E402

BETS, SMALLEST, LARGEST = 12, 0.02, 0.9
ALPHA = 0.05
RUNS = 200
MOST = 100_000
UP = 0.7


def bets(least):
    """Bets on values of at least `least`, as BettingWealth::new."""
    largest = LARGEST / -least
    return SMALLEST * (largest / SMALLEST) ** (np.arange(BETS) / (BETS - 1))


def evidence(logs):
    """The logarithm of the mean wealth, over the last axis."""
    most = logs.max(axis=-1)
    return most + np.log(np.exp(logs - most[..., None]).mean(axis=-1))


def simulate(difference, margin, share, rng):
    """(share of runs that promote, median and 90th percentile of the ratings until the decision)."""
    not_worse, worse = bets(margin - 1.0), bets(-1.0)
    logs = np.zeros((2, RUNS, BETS))
    sums, counts = np.zeros((2, RUNS)), np.zeros((2, RUNS))
    ended = np.zeros(RUNS, dtype=np.int64)
    promoted = np.zeros(RUNS, dtype=bool)
    needed = -math.log(ALPHA)
    for rating in range(1, MOST + 1):
        arm = (rng.random(RUNS) >= share).astype(np.int64)
        up = np.where(arm == 0, UP + difference, UP)
        value = (rng.random(RUNS) < up).astype(float)
        runs = np.arange(RUNS)
        sums[arm, runs] += value
        counts[arm, runs] += 1
        pairs = (counts[0] > 0) & (counts[1] > 0)
        if not pairs.any():
            continue
        d = sums[0, pairs] / counts[0, pairs] - sums[1, pairs] / counts[1, pairs]
        sums[:, pairs] = 0
        counts[:, pairs] = 0
        logs[0, pairs] += np.log1p(np.outer(d + margin, not_worse))
        logs[1, pairs] += np.log1p(np.outer(-d, worse))
        open_ = ended == 0
        is_worse = open_ & (evidence(logs[1]) >= needed)
        is_not = open_ & ~is_worse & (evidence(logs[0]) >= needed)
        ended[is_worse | is_not] = rating
        promoted[is_not] = True
        if ended.all():
            break
    ended[ended == 0] = MOST + 1
    return promoted.mean(), np.quantile(ended, 0.5), np.quantile(ended, 0.9)


def shown(count):
    if count > MOST:
        return f"over {MOST:,}"
    digits = 10 ** max(0, int(math.log10(max(count, 1))) - 1)
    return f"{round(count / digits) * digits:,.0f}"


def table():
    rng = np.random.default_rng(1)
    print("| true difference | margin | share 5 % | 25 % | 50 % | promoted |")
    print("| --- | --- | --- | --- | --- | --- |")
    for margin in (0.02, 0.05, 0.1):
        for difference in (0.05, 0.0, -0.02, -0.05, -0.1, -0.2, -0.5):
            cells, promotions = [], []
            for share in (0.05, 0.25, 0.5):
                promoted, median, most = simulate(difference, margin, share, rng)
                cells.append(f"{shown(median)} ({shown(most)})")
                promotions.append(promoted)
            rate = f"{100 * np.mean(promotions):.0f} %"
            row = [f"{difference:+.2f}" if difference else "0", f"{margin:.2f}", *cells, rate]
            print("| " + " | ".join(row) + " |", flush=True)


def cases():
    """Evidence after fixed differences, for the unit test."""
    found = []
    for margin in (0.02, 0.1, 0.3):
        for name, values in {
            "alternating": [0.5, -0.25, 0.25, -0.5, 1.0, -1.0] * 4,
            "rising": [n / 20 - 0.5 for n in range(21)],
            "worst": [-1.0] * 15,
            "best": [1.0] * 15,
        }.items():
            d = np.array(values)
            first = np.log1p(np.outer(d + margin, bets(margin - 1.0))).sum(axis=0)
            second = np.log1p(np.outer(-d, bets(-1.0))).sum(axis=0)
            found.append(
                {
                    "name": name,
                    "margin": margin,
                    "differences": values,
                    "not_worse": float(evidence(first)),
                    "worse": float(evidence(second)),
                }
            )
    text = json.dumps({"made_by": made_by("numpy"), "cases": found}, indent=1)
    (HERE / "evidence.json").write_text(text + "\n")


if __name__ == "__main__":
    cases()
    table()
