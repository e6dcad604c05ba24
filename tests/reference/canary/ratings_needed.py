"""How many ratings a canary needs, by simulation of the test in crates/train/src/policy/canary.

Prints the table of docs/safety.md, and writes evidence.json, with which a unit test compares the Rust
code. Needs numpy, and takes about a minute:

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

BETS, LARGEST = 12, 0.9
ALPHA = 0.05
RUNS = 1000
# Pairs that are simulated at a time.
CHUNK = 250
UP = 0.7


def bets(margin, least):
    """Bets on values of at least `least`, as SequentialTest::new."""
    largest = LARGEST / -least
    return margin * (largest / margin) ** (np.arange(BETS) / (BETS - 1))


def evidence(logs):
    """The logarithm of the mean wealth, over the last axis."""
    most = logs.max(axis=-1)
    return most + np.log(np.exp(logs - most[..., None]).mean(axis=-1))


def pairs(difference, share, rng, size):
    """Differences of pairs, and the ratings in each: ratings of one version, and the first one of the
    other, as PairedArms."""
    canary_first = rng.random(size) < share
    run = np.where(canary_first, rng.geometric(1 - share, size), rng.geometric(share, size))
    canaries, controls = np.where(canary_first, run, 1), np.where(canary_first, 1, run)
    canary = rng.binomial(canaries, UP + difference) / canaries
    return canary - rng.binomial(controls, UP) / controls, run + 1


def crossed(values, grid, logs):
    """Index of the first value of each run at which the evidence suffices, or the number of values.
    `logs` (runs, bets) is the wealth of each bet, which advances."""
    mixed = np.full(values.shape, -np.inf)
    for n, bet in enumerate(grid):
        path = logs[:, n, None] + np.log1p(bet * values).cumsum(axis=1)
        logs[:, n] = path[:, -1]
        np.logaddexp(mixed, path, out=mixed)
    hits = mixed - math.log(BETS) >= -math.log(ALPHA)
    return np.where(hits.any(axis=1), hits.argmax(axis=1), values.shape[1])


def simulate(difference, margin, share, rng):
    """(share of runs that promote, median and 90th percentile of the ratings until the decision)."""
    not_worse, worse = bets(margin, margin - 1.0), bets(margin, -1.0)
    logs = np.zeros((2, RUNS, BETS))
    seen = np.zeros(RUNS, dtype=np.int64)
    ended, promoted = [], 0
    while len(seen):
        d, counts = pairs(difference, share, rng, (len(seen), CHUNK))
        counts = seen[:, None] + counts.cumsum(axis=1)
        is_not = crossed(d + margin, not_worse, logs[0])
        is_worse = crossed(-d, worse, logs[1])
        end = np.minimum(is_not, is_worse)
        done = end < CHUNK
        ended.extend(counts[done, end[done]])
        promoted += int((is_not < is_worse)[done].sum())
        logs, seen = logs[:, ~done], counts[~done, -1]
    return promoted / RUNS, np.quantile(ended, 0.5), np.quantile(ended, 0.9)


def shown(count):
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
            first = np.log1p(np.outer(d + margin, bets(margin, margin - 1.0))).sum(axis=0)
            second = np.log1p(np.outer(-d, bets(margin, -1.0))).sum(axis=0)
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
