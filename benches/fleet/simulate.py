#!/usr/bin/env python3
"""What a fleet of 3 to 10,000 servers asks of its object store and its trainer, from the costs in results.json.

    python3 benches/fleet/simulate.py
    python3 benches/fleet/simulate.py --completions 10 --get-ms 10

Prices and limits are those of Amazon S3 Standard in us-east-1: requests, storage, and requests a second to one
partition of keys. Transfers within a region cost nothing. The table is printed as Markdown.
"""

import argparse
import json
import math
import pathlib

PUT, GET, GB_MONTH = 0.005 / 1000, 0.0004 / 1000, 0.023
PUTS_OF_A_PARTITION, GETS_OF_A_PARTITION = 3500, 5500
MONTH = 30 * 24 * 3600
# Of src/fleet and crates/fleet: seconds between looks at the store, between segments, reports and renewals of the
# lease, and the reads at the same time.
POLL, SHIP, HEALTH, RENEWAL, DISCOVERY, READS = 0.5, 0.5, 5.0, 4.0, 5.0, 64
SIZES = [3, 10, 30, 100, 300, 1000, 3000, 10000]


def segments(batches):
    """Segments a second of a log with so many batches a second: intervals that have at least one."""
    return (1 - math.exp(-batches * SHIP)) / SHIP


def simulate(servers, measured, options):
    """Requests a second, bytes, loads from 0 to 1 and the price of one fleet."""
    shipped = segments(2 * options.completions)
    own = segments(servers * 2 * options.completions)
    # Each half second the trainer asks for the next segment of every log until there is none.
    read_seconds = options.get_ms / 1000 / READS
    taken = servers * shipped * read_seconds
    round_seconds = servers * read_seconds / (1 - taken) if taken < 1 else math.inf
    puts = servers * (shipped + 1 / HEALTH) + own + 1 / HEALTH + 1 / RENEWAL + 1 / DISCOVERY
    # Manifests of servers, of the active trainer and of one that stands by.
    manifests = (servers + 2) / POLL + 1 / RENEWAL
    files = servers * options.versions / 3600 * (1 + math.ceil(options.adapter_mb / 8))
    logs = min(servers * (1 / max(POLL, round_seconds) + shipped), 1 / read_seconds)
    completions = servers * options.completions
    stored = completions * measured["bytes"] * 3600 * options.hours / 1e9
    loads = {
        "intake": completions / measured["intake"],
        "puts": puts / PUTS_OF_A_PARTITION,
        "manifest": manifests / GETS_OF_A_PARTITION,
        "reads": taken,
    }
    requests = MONTH * (puts * PUT + (manifests + files + logs) * GET)
    return {
        "servers": servers, "completions": completions, "puts": puts, "gets": manifests + files + logs,
        "gb_day": completions * measured["bytes"] * 86400 / 1e9, "round": round_seconds, "loads": loads,
        "price": requests + stored * GB_MONTH, "first": max(loads, key=loads.get),
    }


def rounded(value):
    """With two significant digits, or the whole number."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--completions", type=float, default=2.0, help="a second and server, each rated")
    parser.add_argument("--get-ms", type=float, default=20.0, help="until a get of the store is answered")
    parser.add_argument("--versions", type=float, default=10.0, help="published an hour")
    parser.add_argument("--adapter-mb", type=float, default=40.0)
    parser.add_argument("--hours", type=float, default=24.0, help="hours between two snapshots")
    options = parser.parse_args()
    results = json.loads((pathlib.Path(__file__).parent / "results.json").read_text())
    measured = {
        "bytes": results["costs"]["busy"]["for_each_completion"]["sent"],
        "intake": results["throughput"]["intake"]["completions_per_second"],
    }
    print("| servers | completions/s | puts/s | gets/s | GB a day | logs read each | most loaded | dollars a month |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for size in SIZES:
        found = simulate(size, measured, options)
        first = f"{found['first']}, {100 * found['loads'][found['first']]:,.0f} %"
        values = [found[key] for key in ["completions", "puts", "gets", "gb_day"]]
        each = "lags" if math.isinf(found["round"]) else f"{rounded(max(found['round'], POLL))} s"
        cells = [f"{size:,}", *map(rounded, values), each, first, rounded(found["price"])]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
