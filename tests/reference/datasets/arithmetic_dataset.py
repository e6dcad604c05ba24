"""Writes datasets/additions.jsonl: additions that the embedded model was pretrained on.

    python tests/reference/datasets/arithmetic_dataset.py

Needs only Python. The questions are those of crates/demo/src/task.rs (operands below 50, six wordings)
without the pairs that the demo holds out, so that the demo's evaluation stays valid. Each pair occurs
once, in one of its orders. `level` is "easy" if the sum is below 30, else "hard" if the ones carry,
else "medium". The first rows are also written as CSV for tests, under tests/fixtures/dataset.
"""

import csv
import json
import random
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SEED = 1
ROWS = 600
ROWS_CSV = 12
OPERANDS = 50
PHRASINGS = [
    "What is {} + {}?",
    "{} + {} = ?",
    "How much is {} plus {}?",
    "Add {} and {}.",
    "Please calculate {} + {}.",
    "Can you tell me {} + {}?",
]
MASK = (1 << 64) - 1


def held_out(a: int, b: int) -> bool:
    """As `held_out` of crates/demo/src/task.rs: a fifth of the pairs, by SplitMix64's finalizer."""
    z = ((min(a, b) << 32 | max(a, b)) + 0x9E3779B97F4A7C15) & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return (z ^ z >> 31) % 5 == 0


def level(a: int, b: int) -> str:
    if a + b < 30:
        return "easy"
    return "hard" if a % 10 + b % 10 >= 10 else "medium"


def rows() -> list[dict]:
    rng = random.Random(SEED)
    pairs = [(a, b) for a in range(OPERANDS) for b in range(a, OPERANDS) if not held_out(a, b)]
    chosen = rng.sample(pairs, ROWS)
    made = []
    for a, b in chosen:
        if rng.random() < 0.5:
            a, b = b, a
        text = rng.choice(PHRASINGS).format(a, b)
        messages = [{"role": "user", "content": text}]
        made.append({"messages": messages, "answer": str(a + b), "level": level(a, b)})
    return made


def main() -> None:
    made = rows()
    lines = (json.dumps(row, separators=(",", ":")) + "\n" for row in made)
    (ROOT / "datasets" / "additions.jsonl").write_text("".join(lines))
    fixtures = ROOT / "tests" / "fixtures" / "dataset"
    fixtures.mkdir(parents=True, exist_ok=True)
    with (fixtures / "additions.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["prompt", "answer", "level"])
        for row in made[:ROWS_CSV]:
            writer.writerow([row["messages"][0]["content"], row["answer"], row["level"]])


if __name__ == "__main__":
    main()
