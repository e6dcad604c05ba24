"""Writes datasets/word-problems.jsonl and gsm8k-style.jsonl: additions and subtractions in words.

    python tests/reference/datasets/word_problems_dataset.py

Needs only Python. A row has the problem (`prompt`), the number that answers it (`answer`) and the
operation (`level`: "add" or "subtract"). No two rows have the same text. The second file has the same
problems in the columns of GSM8K: `question`, and an `answer` with a calculation, then "#### " and the
number.
"""

import json
import random
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SEED = 1
ROWS = 400
NAMES = ["Ana", "Ben", "Chloe", "David", "Emma", "Farid", "Grace", "Hugo", "Iris", "Jonas"]
THINGS = ["apples", "books", "coins", "eggs", "marbles", "pencils", "shells", "stamps", "tickets"]
ADD = [
    "{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?",
    "{name} picks {a} {things} on Monday and {b} on Tuesday. How many {things} is that in all?",
    "There are {a} {things} on the table and {b} in the box. How many {things} are there?",
    "{name} had {a} {things} and got {b} from a friend. How many {things} does {name} have?",
]
SUBTRACT = [
    "{name} has {a} {things} and gives away {b}. How many {things} are left?",
    "{name} had {a} {things} and lost {b} of them. How many {things} does {name} have now?",
    "A shop has {a} {things} and sells {b}. How many {things} remain?",
]


def row(rng: random.Random) -> dict:
    level = rng.choice(["add", "subtract"])
    a, b = rng.randint(11, 60), rng.randint(2, 30)
    if level == "subtract" and b > a:
        a, b = b, a
    text = rng.choice(ADD if level == "add" else SUBTRACT)
    text = text.format(name=rng.choice(NAMES), things=rng.choice(THINGS), a=a, b=b)
    sum_ = f"{a}+{b}" if level == "add" else f"{a}-{b}"
    answer = str(a + b if level == "add" else a - b)
    steps = f"{sum_.replace('+', ' + ').replace('-', ' - ')} = <<{sum_}={answer}>>{answer}"
    return {"prompt": text, "answer": answer, "level": level, "steps": steps}


def main() -> None:
    rng = random.Random(SEED)
    made = {}
    while len(made) < ROWS:
        new = row(rng)
        made.setdefault(new["prompt"], new)
    gsm8k = []
    for new in made.values():
        answer = f"{new.pop('steps')}\n#### {new['answer']}"
        gsm8k.append({"question": new["prompt"], "answer": answer})
    write("word-problems.jsonl", made.values())
    write("gsm8k-style.jsonl", gsm8k)


def write(name: str, rows) -> None:
    lines = (json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    (ROOT / "datasets" / name).write_text("".join(lines))


if __name__ == "__main__":
    main()
