"""Reference values of reward functions: tests/reference/rewards/rewards.json.

math: random expressions in plain and LaTeX notation with their values by SymPy, and texts of equal
value, each with its SymPy expression. fuzzy: rapidfuzz's fuzz.ratio / 100. cosine, repetition,
overlong: the published formulas, written over fractions and sets as in the papers.
Needs sympy and rapidfuzz. Run from the repository root:
    python tests/reference/rewards/rewards.py
"""

import json
import math
import pathlib
import random
import sys

import sympy
from rapidfuzz import fuzz

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
from provenance import made_by  # noqa: E402

OUT = pathlib.Path(__file__).resolve().parent / "rewards.json"
RANDOM = random.Random(7)

SAME = [
    ("1/2", [r"\frac{1}{2}", r"\dfrac12", "0.5", ".50", r"$\frac 1 2$", "50%", r"50\%", "2/4", "½", r"\boxed{\tfrac{1}{2}}"]),
    ("-3/4", [r"-\frac{3}{4}", r"\frac{-3}{4}", r"\frac{3}{-4}", "-0.75", "−3/4", "-75%", "(-3)/4"]),
    ("1234567", ["1,234,567", "1234567", "1{,}234{,}567", r"1\,234\,567", "1.234567e6", "$1,234,567", "1234567.0"]),
    ("Rational(7, 2)", [r"3\frac{1}{2}", "3 1/2", "3.5", r"\frac{7}{2}", "7/2"]),
    ("sqrt(12)", [r"\sqrt{12}", r"2\sqrt{3}", r"2\cdot\sqrt3", "3.4641016151377544", "2√3", r"\sqrt{3}\times 2"]),
    ("2*pi", [r"2\pi", "2pi", "2π", r"2 \cdot \pi", "6.283185307179586", r"\frac{4\pi}{2}"]),
    ("2**10", ["2^10", "2^{10}", "1024", "4^5", "2**10", r"\left(2^{5}\right)^{2}"]),
    ("Integer(8)**Rational(2, 3)", ["8^{2/3}", "4", r"\sqrt[3]{64}", "2²"]),
    ("2**(3**2)", ["2^3^2", "512"]),
    ("-(2**2)", ["-2^2", "-4", "-(2)^2"]),
    ("Rational(1, 3) + Rational(1, 6)", ["1/3 + 1/6", r"\frac{1}{3}+\frac{1}{6}", "0.5"]),
    ("10**20 + 1", ["100000000000000000001", "10^20 + 1"]),
    ("45", ["45", r"45^\circ", r"45^{\circ}", "45°", r"45\text{ cm}", "x = 45", "+45", "45."]),
]


def tree(depth):
    if depth == 0 or RANDOM.random() < 0.2:
        return RANDOM.choice([RANDOM.randint(0, 20), RANDOM.randint(1, 9999), ("decimal", RANDOM.randint(0, 9999), RANDOM.randint(1, 3))])
    operation = RANDOM.choice(["+", "-", "*", "/", "^", "neg", "frac"])
    if operation == "^":
        return ("^", tree(depth - 1), RANDOM.randint(0, 3))
    if operation == "neg":
        return ("neg", tree(depth - 1))
    return (operation, tree(depth - 1), tree(depth - 1))


def value(node):
    if isinstance(node, int):
        return sympy.Integer(node)
    if node[0] == "decimal":
        return sympy.Rational(node[1], 10 ** node[2])
    if node[0] == "neg":
        return -value(node[1])
    a, b = value(node[1]), value(node[2]) if not isinstance(node[2], int) else sympy.Integer(node[2])
    return {"+": lambda: a + b, "-": lambda: a - b, "*": lambda: a * b, "/": lambda: a / b, "frac": lambda: a / b, "^": lambda: a**b}[node[0]]()


def text(node, latex):
    if isinstance(node, int):
        return f"{node:,}" if RANDOM.random() < 0.3 else str(node)
    if node[0] == "decimal":
        return f"{node[1] // 10 ** node[2]}.{node[1] % 10 ** node[2]:0{node[2]}d}"
    inside = [text(child, latex) for child in node[1:]]
    bracket = (lambda t: rf"\left({t}\right)") if latex else (lambda t: f"({t})")
    if node[0] == "neg":
        return "-" + bracket(inside[0])
    if node[0] == "frac" and latex:
        return rf"\frac{{{inside[0]}}}{{{inside[1]}}}"
    if node[0] == "^":
        return bracket(inside[0]) + (f"^{{{inside[1]}}}" if latex else f"^{inside[1]}")
    sign = {"*": r" \cdot " if latex else "*", "/": r" \div " if latex else "/", "frac": "/"}.get(node[0], f" {node[0]} ")
    return bracket(inside[0]) + sign + bracket(inside[1])


def expressions():
    cases = []
    while len(cases) < 60:
        node = tree(3)
        exact = value(node)
        if not exact.is_Rational or exact.is_infinite or max(abs(exact.p), exact.q) >= 10**24:
            continue
        cases.append({"plain": text(node, False), "latex": text(node, True), "value": f"{exact.p}/{exact.q}"})
    return cases


def same_values():
    groups = []
    for expression, texts in SAME:
        exact = sympy.sympify(expression, rational=True)
        groups.append({"value": float(exact.evalf(20)), "texts": texts})
    return groups


def fuzzy():
    alphabet = "abc de é日\n"
    words = ["", "a", "kitten", "sitting", "The cat sat on the mat.", "the cat sat on a mat", "日本語", "日本", "naïve", "naive"]
    pairs = [(a, b) for a in words for b in words[:5]]
    pairs += [tuple("".join(RANDOM.choices(alphabet, k=RANDOM.randint(0, 150))) for _ in range(2)) for _ in range(30)]
    return [{"a": a, "b": b, "ratio": fuzz.ratio(a, b) / 100} for a, b in pairs]


def cosine():
    cases = []
    for tokens in [0, 1, 25, 50, 99, 100, 101, 500]:
        for correct in [True, False]:
            low, high = (0.5, 1.0) if correct else (-0.5, -1.0)
            progress = min(tokens / 100, 1)
            cases.append({"tokens": tokens, "correct": correct, "value": low + 0.5 * (high - low) * (1 + math.cos(progress * math.pi))})
    return cases


def repetition():
    texts = ["", "a b", "a b c", "a a a a a", "the cat sat on the cat sat on the cat", "A b a B a b", "x y z " * 30]
    texts += [" ".join(RANDOM.choices("abc", k=RANDOM.randint(3, 60))) for _ in range(10)]
    cases = []
    for words in texts:
        for n in [1, 2, 3]:
            items = words.lower().split()
            grams = [tuple(items[i : i + n]) for i in range(len(items) - n + 1)]
            value = (1 - len(set(grams)) / len(grams)) * -0.5 if grams else 0.0
            cases.append({"text": words, "n": n, "value": value})
    return cases


def overlong():
    cases = []
    for limit, cache in [(100, 20), (100, 100), (100, 0), (16384, 4096)]:
        for tokens in [0, 1, limit - cache - 1, limit - cache, limit - cache + 1, limit - 1, limit, limit + 1, 2 * limit]:
            if tokens < 0:
                continue
            if tokens <= limit - cache:
                value = 0.0
            elif tokens <= limit:
                value = (limit - cache - tokens) / cache
            else:
                value = -1.0
            cases.append({"max_tokens": limit, "cache": cache, "tokens": tokens, "value": value})
    return cases


def lines(cases):
    return "[\n" + ",\n".join(json.dumps(case, ensure_ascii=True) for case in cases) + "\n]"


def main():
    made = {"same": same_values(), "expressions": expressions(), "fuzzy": fuzzy(), "cosine": cosine(), "repetition": repetition(), "overlong": overlong()}
    origin = json.dumps(made_by("rapidfuzz", "sympy"))
    OUT.write_text(f'{{\n"made_by": {origin},\n' + ",\n".join(f'"{name}": {lines(cases)}' for name, cases in made.items()) + "\n}\n")


if __name__ == "__main__":
    main()
