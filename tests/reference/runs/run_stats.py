"""Cases for crates/report/src/stats: tests/reference/runs/run_stats.json.

pass@k by exact fractions of binomials; Wilson's interval as the two roots of the score test's
equation; quantiles and bootstraps by numpy. Run from the repository root, with numpy installed:
    python tests/reference/runs/run_stats.py
"""

import json
import math
import pathlib
import sys
from fractions import Fraction
from statistics import NormalDist

import numpy

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
from provenance import made_by  # noqa: E402

OUT = pathlib.Path(__file__).resolve().parent / "run_stats.json"


def pass_at_k(n: int, right: int, k: int) -> float:
    return float(1 - Fraction(math.comb(n - right, k), math.comb(n, k)))


def wilson(successes: int, trials: int) -> tuple[float, float]:
    # The shares q with (p - q)^2 = z^2 q (1 - q) / n.
    z2 = NormalDist().inv_cdf(0.975) ** 2
    p = successes / trials
    roots = numpy.roots([1 + z2 / trials, -2 * p - z2 / trials, p * p])
    return tuple(sorted(float(root) for root in roots.real))


def bootstrap(values: numpy.ndarray) -> dict:
    random = numpy.random.default_rng(1)
    means = [values[random.integers(0, len(values), (2000, len(values)))].mean(1) for _ in range(100)]
    low, high = numpy.percentile(numpy.concatenate(means), [2.5, 97.5])
    return {
        "values": values.tolist(),
        "mean": values.mean(),
        "std": values.std(ddof=1),
        "low": low,
        "high": high,
    }


def main() -> None:
    random = numpy.random.default_rng(0)
    passes = [
        (n, right, k, pass_at_k(n, right, k))
        for n, rights in [(1, (0, 1)), (8, (0, 1, 4, 8)), (200, (0, 1, 13, 199, 200))]
        for right in rights
        for k in (1, 2, 8, 100)
        if k <= n
    ]
    wilsons = [
        (s, n, *wilson(s, n))
        for s, n in [(0, 1), (1, 1), (0, 10), (1, 10), (5, 10), (10, 10), (3, 7), (81, 263), (500, 1000), (999, 1000)]
    ]
    sorted_values = [numpy.sort(random.normal(size=size).round(3)) for size in (1, 2, 7, 40)]
    quantiles = [
        {"values": values.tolist(), "q": q, "expected": float(numpy.quantile(values, q))}
        for values in sorted_values
        for q in (0.0, 0.025, 0.5, 0.975, 1.0)
    ]
    bootstraps = [
        bootstrap(random.normal(1.0, 2.0, 40).round(3)),
        bootstrap(random.exponential(1.0, 60).round(3)),
        bootstrap((random.integers(0, 4, 50) / 2).round(3)),
    ]
    cases = {"pass_at_k": passes, "wilson": wilsons, "quantiles": quantiles, "bootstrap": bootstraps}
    cases = {"made_by": made_by("numpy")} | cases
    OUT.write_text(json.dumps(cases, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
