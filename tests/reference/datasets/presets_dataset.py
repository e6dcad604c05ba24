"""Writes datasets/additions-presets.jsonl: additions with the references of the presets.

    python tests/reference/datasets/presets_dataset.py

Needs only Python. The questions are 200 of those of arithmetic_dataset.py. In addition to `answer`
every row has `summary` and `keywords` for the preset `summarization`, and `tests` for
`code_generation`. The embedded model can only add, so its summary of a question is the well-formed
completion; the tests require a program that it cannot write.
"""

import json
import random
import re

from arithmetic_dataset import ROOT, rows

SEED = 2
ROWS = 200


def with_references(row: dict) -> dict:
    a, b = (int(number) for number in re.findall(r"\d+", row["messages"][-1]["content"]))
    total = a + b
    assert row["answer"] == str(total), row
    return {
        "messages": row["messages"],
        "answer": row["answer"],
        "summary": f"<reasoning>{a} + {b} = {total}</reasoning><answer>{total}</answer>",
        "keywords": ["reasoning", "answer", str(total)],
        "tests": f"assert answer == {total}",
    }


def main() -> None:
    chosen = random.Random(SEED).sample(rows(), ROWS)
    lines = (json.dumps(with_references(row), separators=(",", ":")) + "\n" for row in chosen)
    (ROOT / "datasets" / "additions-presets.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main()
