"""Writes math_equal.json: whether Math-Verify finds pairs of answers equal.

    python tests/reference/rewards/math_equal.py

Needs math-verify. The pairs are this script's own. Each answer is given as in a completion, within `$…$`.
"""

import json
import pathlib
import sys

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
from provenance import made_by  # noqa: E402

OUT = pathlib.Path(__file__).with_name("math_equal.json")
EQUAL = [
    ("0.5", r"\frac{1}{2}"), (r"\dfrac{3}{4}", "0.75"), (r"\tfrac12", r"\frac{1}{2}"), ("1/3", r"\frac13"),
    (r"\sqrt{8}", r"2\sqrt{2}"), (r"\sqrt2", r"\sqrt{2}"), (r"\sqrt[3]{27}", "3"), ("2^{10}", "1024"),
    ("x=5", "5"), ("1,000", "1000"), (r"2\pi", r"\pi \cdot 2"), (r"\frac{\pi}{2}", r"0.5\pi"),
    ("(1,2)", "(1, 2)"), (r"(1,\frac{1}{2})", "(1,0.5)"), (r"\{1,2,3\}", r"\{3,2,1\}"), ("1,2", "2,1"),
    ("[0,1)", r"\left[0,1\right)"), ("2x", r"x \cdot 2"), ("x+1", "1+x"), ("(x+1)^2", "x^2+2x+1"),
    (r"x \le 5", r"x \leq 5"), (r"12\text{ cm}", "12"), (r"50\%", "50"), (r"50\%", "0.5"), (r"\$5", "5"),
    ("90^\\circ", "90"), (r"1.5 \times 10^3", "1500"), ("-5", "-5.0"), (r"\text{(B)}", "B"),
    (r"10^{-8}\pi", r"\pi/10^8"), (r"2\text{ or }3", "3, 2"), (r"\boxed{7}", "7"), ("2(3)", "6"),
    (r"\frac{x}{2}", "0.5x"), ("a+b", "b+a"), (r"2^{\frac{1}{2}}", r"\sqrt{2}"), ("5.", "5"), ("007", "7"),
]
DIFFERENT = [
    ("0.51", r"\frac{1}{2}"), (r"\sqrt{8}", "3"), ("5", "-5"), ("(1,2)", "(2,1)"), ("[0,1)", "[0,1]"),
    (r"\{1,2\}", r"\{1,3\}"), ("1,2", "1,3"), ("2x", "3x"), ("x+1", "x-1"), ("x", "y"),
    (r"10^{-8}\pi", r"2\cdot10^{-8}\pi"), (r"\sqrt{2}/10^{12}", "0"), (r"2\text{ or }3", "23"),
    (r"1\text{ and }2", "12"), ("0.33", r"\frac{1}{3}"), (r"5\text{ m}", r"5\text{ km}"), ("(1,000)", "(1,0)"),
    (r"\text{(A)}", "B"), ("1000001", "1000000"), ("3", r"\pi"), (r"40\%", "0.5"), ("(1,2)", "(1,2,3)"),
    ("2^{10}", "1023"), (r"\frac{1}{3}", r"\frac{1}{4}"), ("0.3", "0.30001"), ("12", "21"),
]


def answer(text):
    return parse(f"${text}$", extraction_config=[LatexExtractionConfig(), ExprExtractionConfig()])


def main():
    pairs = [(*pair, expected) for expected, listed in ((True, EQUAL), (False, DIFFERENT)) for pair in listed]
    rows = [[first, second, expected, bool(verify(answer(second), answer(first)))] for first, second, expected in pairs]
    differing = [row for row in rows if row[2] != row[3]]
    content = {"made_by": made_by("math-verify"), "pairs": rows}
    OUT.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n")
    print(f"{len(rows)} pairs in {OUT.name}; Math-Verify differs in {differing}")


if __name__ == "__main__":
    main()
