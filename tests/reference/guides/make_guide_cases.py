"""Values of the reward functions that the GRPO guides teach: tests/reference/guides/guide_cases.json.

    python tests/reference/guides/make_guide_cases.py

Needs nothing but Python. Each function below is written from the guide's behavior, not from its code.
Where a guide's code and its text disagree, the code counts and a comment says so. `basis` says how
far a guide defines a function:

code     one of the five guides contains its code
library  guide 004.txt names it; its code is in the public reward_functions_library.py or
         basic_grpo_training.py that 004.txt points to, not in the five guides
named    the guides or issue 14 name it without any code; the definition is chosen here
demo     in none of the guides; from the GSM8K demo of GRPO that TRL's users know

A text is a completion's content: the guides take `completion[0]["content"]` of chat completions, 002.txt
takes plain texts. White space is what Python's `str.isspace` accepts, which includes U+001C to U+001F
(Rust's `char::is_whitespace` does not). Lengths are in code points. Sums are in the order of the terms,
since `sum` rounds differently from Python 3.12 on.
"""

import contextlib
import io
import json
import math
import re
import sys
import warnings
from difflib import SequenceMatcher
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
from provenance import made_by  # noqa: E402

OUT = Path(__file__).with_name("guide_cases.json")
FEWEST, MOST_BYTES = 25, 150_000


# Text between tags


def span(text: str, tag: str, start: int = 0) -> tuple[int, int] | None:
    """Where the content of the first `<tag>` begins and ends that has a `</tag>` after it."""
    opened = text.find(f"<{tag}>", start)
    if opened < 0:
        return None
    begin = opened + len(tag) + 2
    end = text.find(f"</{tag}>", begin)
    return None if end < 0 else (begin, end)


def text_between_tags(text: str, tag: str) -> str:
    """Library: the trimmed content of the first pair, or an empty text."""
    found = span(text, tag)
    return text[slice(*found)].strip() if found else ""


def pair_after_pair(text: str, first: str, second: str) -> tuple[str, str] | None:
    """The contents of `<first>…</first>`, white space, `<second>…</second>` anywhere in a text.

    The first `<first>` counts; its content ends at the first `</first>` that only white space
    separates from a `<second>` with a `</second>` after it, so it may contain tags.
    """
    opened = text.find(f"<{first}>")
    if opened < 0:
        return None
    begin, close = opened + len(first) + 2, f"</{first}>"
    end = text.find(close, begin)
    while end >= 0:
        rest = text[end + len(close) :].lstrip()
        inside = span(rest, second)
        if rest.startswith(f"<{second}>") and inside:
            return text[begin:end], rest[slice(*inside)]
        end = text.find(close, end + 1)
    return None


# Format


def soft_format(text: str, value: float) -> float:
    """000.txt and 003.txt `format_reward` with the value 1, the library's soft format with 0.5."""
    return value if pair_after_pair(text, "reasoning", "answer") else 0.0


def strict_lines(text: str) -> float:
    """Library: every tag on a line of its own, a line break at the end, nothing around.

    Its text says exact line breaks; its code also accepts one more line break at the end, tags within
    the contents, and empty lines as contents.
    """
    first, middle, last = "<reasoning>\n", "\n</reasoning>\n<answer>\n", "\n</answer>\n"
    body = text[:-1] if text.endswith(last + "\n") else text
    fits = body.startswith(first) and body.endswith(last)
    return 0.5 if fits and middle in body[len(first) : -len(last)] else 0.0


def strict_think(text: str) -> float:
    """002.txt `reward_format`: `<think>…</think><answer>…</answer>` on one line and nothing else.

    No white space is allowed between the pairs, and no line break (U+000A) but one at the very end;
    other separators (carriage return, U+2028) count as characters. Tags may be repeated or nested.
    """
    body = text.removesuffix("\n")
    first, last = "<think>", "</answer>"
    fits = body.startswith(first) and body.endswith(last) and "\n" not in body
    return 1.0 if fits and "</think><answer>" in body[len(first) : -len(last)] else 0.0


def graded_think_answer(text: str) -> float:
    """002.txt `format_reward`: 1 for more than 20 characters of thought and any answer, both trimmed;
    0.5 for the format without that; 0 without the format."""
    found = pair_after_pair(text, "think", "answer")
    if not found:
        return 0.0
    thought, answer = (inside.strip() for inside in found)
    return 1.0 if len(thought) > 20 and answer else 0.5


def incremental(text: str, tags: list[str], credit: float, single: bool) -> float:
    """`credit` for each opening and closing tag that occurs at all, less 0.001 for each character after
    the last tag's last occurrence, white space at both ends not counted. There is no floor.

    With `single`, as in 000.txt and 003.txt, a last tag that occurs twice costs nothing.
    """
    every = [tag for name in tags for tag in (f"<{name}>", f"</{name}>")]
    score = 0.0
    for tag in every:
        score += credit if tag in text else 0.0
    times = text.count(every[-1])
    if times == 1 or (times > 1 and not single):
        score -= len(text[text.rindex(every[-1]) + len(every[-1]) :].strip()) * 0.001
    return score


def json_format(text: str) -> float:
    """Library: 0.5 for a text that Python's json reads: NaN and Infinity count, fences do not."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return 0.0
    return 0.5


# Correctness


def last_boxed(text: str) -> str | None:
    """The trimmed content of the last `\\boxed{…}` with balanced braces; None if it never ends."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin, depth = start + len("\\boxed{"), 1
    for at in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[begin:at].strip()
    return None


def after_hashes(text: str) -> str | None:
    """Template: the trimmed text between the first and the second `####`, or after the only one."""
    pieces = text.split("####")
    return pieces[1].strip() if len(pieces) > 1 else None


def by_pattern(pattern: str):
    """The trimmed first group of the first match."""
    regex = re.compile(pattern)

    def extract(text: str) -> str | None:
        found = regex.search(text)
        return found.group(1).strip() if found else None

    return extract


def demo_answer(text: str) -> str:
    """Demo: after the last `<answer>`, up to the next `</answer>`; without tags the whole text."""
    return text.rpartition("<answer>")[2].partition("</answer>")[0].strip()


LAST_NUMBER = r"(-?\d[\d,]*(?:\.\d+)?)\D*\Z"
ANNOUNCED = r"(?i:the answer is|answer:)\s*([^\n.]*)"

# 000.txt and 003.txt call `extract_final_answer` without defining it. The first is the library's and the
# template's definition, the second the template's for datasets; the others are chosen here.
EXTRACTIONS = {
    "answer_tag": lambda text: text_between_tags(text, "answer"),
    "hashes": after_hashes,
    "boxed": last_boxed,
    "announced": by_pattern(ANNOUNCED),
    "last_number": by_pattern(LAST_NUMBER),
    "demo": demo_answer,
}


def correctness(row: dict, how: str) -> float:
    """000.txt and 003.txt `correctness_reward`: 2 if the extracted text equals the answer.

    The answer is not trimmed. With "answer_tag" a text without tags equals an empty answer.
    """
    return 2.0 if EXTRACTIONS[how](row["text"]) == row["answer"] else 0.0


def problem(row: dict) -> float:
    """002.txt `problem_reward`: 1 if equal; 0 otherwise and where extraction fails.

    The column is `answers`. The guide's `extract_final_answer` is undefined; here it takes the trimmed
    content of the first answer tags and fails without them.
    """
    if span(row["text"], "answer") is None:
        return 0.0
    return 1.0 if text_between_tags(row["text"], "answer") == row["answers"] else 0.0


def exact_match(row: dict) -> float:
    """Library: 2 if equal, both trimmed. Without tags an empty answer is matched."""
    return 2.0 if text_between_tags(row["text"], "answer") == row["answer"].strip() else 0.0


def fuzzy_match(row: dict) -> float:
    """Library: the ratio of Python's difflib (Ratcliff and Obershelp) in lower case.

    The ratio is 2 M / (|a| + |b|), M the characters in common blocks, longest block first. In answers of
    200 characters or more, difflib ignores characters that make up over 1 %.
    """
    given = text_between_tags(row["text"], "answer")
    return SequenceMatcher(None, given.lower(), row["answer"].lower()).ratio()


def numeric(row: dict) -> float:
    """Library: 2 if |a - b| / max(|b|, 1e-8) <= 0.01. All commas are removed, then Python's `float` reads
    the number; where it cannot, the value is 0."""
    try:
        given = float(text_between_tags(row["text"], "answer").replace(",", ""))
        wanted = float(row["answer"].replace(",", ""))
    except ValueError:
        return 0.0
    # The distance from an infinite answer is not a number or infinite over infinite: never close.
    return 2.0 if abs(given - wanted) / max(abs(wanted), 1e-8) <= 0.01 else 0.0


def integer_check(text: str) -> float:
    """Demo: 0.5 if the answer consists of digits as `str.isdigit` accepts them: no sign, comma or point,
    but digits of every script, and superscript and circled ones."""
    return 0.5 if demo_answer(text).isdigit() else 0.0


# Code


FENCE = "`" * 3
NEWLINE_FENCE = "\n" + FENCE


def code_block(text: str) -> str | None:
    """Library: the content of the first block that opens with a fence, then "python" or nothing, then a
    line break, and that closes with a fence right after a line break. Not a CommonMark fence: it may
    stand within a line, and the closing fence of another block may be taken for an opening one."""
    at = text.find(FENCE)
    while at >= 0:
        begin = at + len(FENCE)
        begin += len("python") if text.startswith("python\n", begin) else 0
        end = text.find(NEWLINE_FENCE, begin + 1)
        if text.startswith("\n", begin) and end >= 0:
            return text[begin + 1 : end]
        at = text.find(FENCE, at + 1)
    return None


def code_execution(row: dict) -> float:
    """Library: 2 if `solution(input) == output` for all cases, else 0.

    The library's text says that every completion has its cases, but its loop passes the whole column to
    each completion; under TRL that column is a list over completions. Here `test_cases` is one
    completion's list, as its helper documents. Without cases, code that runs (none included) earns 2.
    """
    space = {}
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(code_block(row["text"]) or "", space)
            results = [space["solution"](given) == wanted for given, wanted in row["test_cases"]]
    except (Exception, SystemExit):
        return 0.0
    return 2.0 if all(results) else 0.0


def code_block_format(text: str) -> float:
    """Named by the library without code: 0.5 if there is a block as `code_block` finds it."""
    return 0.5 if code_block(text) is not None else 0.0


def no_syntax_error(text: str) -> float:
    """Named by the library without code: 0.2 if the block is not blank and Python compiles it.

    0.2 is what the library's total of 2.7 leaves beside 0.5 for the block and 2 for its execution.
    """
    code = code_block(text)
    if code is None or not code.strip():
        return 0.0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(code, "<completion>", "exec")
    except (SyntaxError, ValueError):
        return 0.0
    return 0.2


def code_generation(row: dict) -> float:
    """Library: the sum of the three."""
    return code_block_format(row["text"]) + code_execution(row) + no_syntax_error(row["text"])


# Length


def length_chars(text: str) -> float:
    """002.txt `reward_func` and `reward_length`."""
    return float(len(text))


def distance_chars(text: str) -> float:
    """002.txt `reward_len` with an ideal of 20. Its text says tokens; its code counts characters."""
    return float(-abs(20 - len(text)))


def ideal_words(text: str, ideal: int) -> float:
    """Library. Its texts say tokens and a Gaussian; its code counts words and is a triangle."""
    return 0.3 * max(0.0, 1 - abs(len(text.split()) - ideal) / ideal)


def min_words(text: str, least: int) -> float:
    """Library; words, not tokens."""
    return 0.2 if len(text.split()) >= least else -0.2


def max_words(text: str, most: int) -> float:
    """Library; words, not tokens."""
    return -0.3 if len(text.split()) > most else 0.0


# Style


CONNECTORS = (
    "therefore thus because since consequently first second next finally however".split()
)


def connectors(text: str) -> float:
    """Library: 0.05 for each different connector within the first reasoning tags, at most 0.3.

    Letter case is ignored, parts of words count ("enthusiasm" contains "thus"). Its comment says that
    the count is normalized by length; its code does not.
    """
    inside = text_between_tags(text, "reasoning").lower()
    return min(0.3, len([word for word in CONNECTORS if word in inside]) * 0.05)


CITATION = re.compile(
    r"\[\d+\] | \([A-Z][a-z]+,?\s+\d{4}\) | according\ to | as\ stated\ in", re.VERBOSE
)


def citation(text: str) -> float:
    """Library: 0.2 if there is a `[1]`, a `(Smith, 2020)` or `(Smith 2020)`, "according to" or "as stated
    in", in this letter case. Digits of every script count."""
    return 0.2 if CITATION.search(text) else 0.0


def trigrams(text: str) -> list[tuple[str, ...]]:
    words = text.lower().split()
    return [tuple(words[at : at + 3]) for at in range(len(words) - 2)]


def repetition_threshold(text: str) -> float:
    """Library: -0.3 if fewer than 70 % of the trigrams are different.

    Its text says that repetition is penalized; its code also penalizes texts below three words.
    """
    grams = trigrams(text)
    return -0.3 if len(set(grams)) / max(len(grams), 1) < 0.7 else 0.0


def repetition_share(text: str) -> float:
    """Named (004.txt "repetition penalty", issue 14 "proportional"): -0.3 times the share of trigrams that
    occurred before, as in Open R1; 0 below three words."""
    grams = trigrams(text)
    repeated = len(grams) - len(set(grams))
    return (1 - len(set(grams)) / len(grams)) * -0.3 if repeated else 0.0


# Groups and combinations


def group_diversity(group: dict) -> list[float]:
    """Named ("add diversity penalty" in 003.txt): minus the mean similarity to the group's other members.

    "exact": 1 if equal after white space is reduced to single spaces. "words": the share of common
    words among the different lower-case words of both, 1 for two texts without words.
    """
    words = [text.split() for text in group["completions"]]

    def similarity(a: list[str], b: list[str]) -> float:
        if group["measure"] == "exact":
            return float(a == b)
        a, b = ({word.lower() for word in side} for side in (a, b))
        return len(a & b) / len(a | b) if a | b else 1.0

    values = []
    for i, own in enumerate(words):
        others = [similarity(own, other) for j, other in enumerate(words) if j != i]
        values.append(-total(others) / len(others) if others else 0.0)
    return [value or 0.0 for value in values]  # -0.0 is written as 0.0


def total(values: list[float]) -> float:
    result = 0.0
    for value in values:
        result += value
    return result


def group_advantages(rewards: list[float]) -> list[float]:
    """001.txt `compute_advantages`: (r - mean) / max(s, 1e-8), s with the divisor n.

    TRL, which the other guides use, divides by s + 1e-4 with the divisor n - 1: see `multi_objective`.
    """
    mean = total(rewards) / len(rewards)
    squares = total([(reward - mean) ** 2 for reward in rewards])
    divisor = max(math.sqrt(squares / len(rewards)), 1e-8)
    return [(reward - mean) / divisor for reward in rewards]


def guide_rewards(row: dict) -> list[float]:
    """The three functions that 003.txt gives its trainer, in its order."""
    text = row["text"]
    tags = ["reasoning", "answer"]
    return [incremental(text, tags, 0.25, True), soft_format(text, 1.0), correctness(row, "answer_tag")]


def multi_objective(group: dict) -> dict:
    """003.txt: TRL's weighted sum of the three functions, and TRL's default advantages of the sums."""
    sums = []
    for text, answer in zip(group["completions"], group["answer"], strict=True):
        values = guide_rewards({"text": text, "answer": answer})
        sums.append(total([w * v for w, v in zip(group["weights"], values, strict=True)]))
    if len(sums) < 2 or len(set(sums)) == 1:
        return {"sums": sums, "advantages": [0.0] * len(sums)}
    mean = total(sums) / len(sums)
    deviation = math.sqrt(total([(value - mean) ** 2 for value in sums]) / (len(sums) - 1))
    return {"sums": sums, "advantages": [(value - mean) / (deviation + 1e-4) for value in sums]}


def multi_stage(row: dict) -> float:
    """003.txt: stage 1 sums the incremental and the soft format, stage 2 the soft format and correctness."""
    partly, whole, correct = guide_rewards(row)
    return partly + whole if row["stage"] == 1 else whole + correct


def math_problem(row: dict) -> float:
    """Library: the soft format at 0.5, and the exact match at 2."""
    return soft_format(row["text"], 0.5) + exact_match(row)


def adaptive(case: dict) -> dict:
    """003.txt `AdaptiveReward`: times 1.2 below a success rate of 0.3, times 0.9 above 0.8, without bounds.

    The guide does not say what a success is or how often the weight changes: a case has the successes
    among every `every` values. The weight multiplies the rewards.
    """
    weight, weights = case["weight"], []
    for successes in case["successes"]:
        rate = successes / case["every"]
        weight *= 1.2 if rate < 0.3 else 0.9 if rate > 0.8 else 1.0
        weights.append(weight)
    return {"weights": weights, "rewards": [reward * weight for reward in case["rewards"]]}


def ensemble(values: list[float | None]) -> dict | None:
    """Named (001.txt "reward model ensembles"): mean, least, median and greatest of those not missing."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    middle = len(known) // 2
    median = known[middle] if len(known) % 2 else (known[middle - 1] + known[middle]) / 2
    return {"mean": total(known) / len(known), "min": known[0], "median": median, "max": known[-1]}


# Inputs

WORDS = "one two three four five six seven eight nine ten eleven twelve thirteen".split()
GOOD = "<reasoning>a</reasoning><answer>42</answer>"
LINES = "<reasoning>\na\n</reasoning>\n<answer>\n42\n</answer>\n"

TAGGED = [
    "",
    " \n\t",
    "42",
    GOOD,
    LINES,
    LINES[:-1],
    LINES + "\n",
    LINES + "\n\n",
    LINES + " \n",
    "\n" + LINES,
    LINES.replace("\n", "\r\n"),
    "<reasoning>a</reasoning> \n\t<answer> 42 </answer>  ",
    "<reasoning>a</reasoning>so<answer>42</answer>",
    "<reasoning>a</reasoning>\u00a0\u2003<answer>\u00a042</answer>\u3000",
    "<reasoning>a</reasoning>\u001c<answer>\u001f42</answer>\u001d",
    "<reasoning>a</reasoning>\u200b<answer>42</answer>\ufeff",
    "Sure! " + GOOD + " Done. ",
    "<answer>42</answer><reasoning>a</reasoning>",
    "<answer>42</answer>",
    "<reasoning>a</reasoning>",
    "<reasoning>a",
    "<reasoning>a</reasoning><answer>42",
    "<reasoning>a<answer>42</answer>",
    "a</reasoning></answer>",
    "</answer>tail",
    GOOD + "<answer>43</answer>x",
    GOOD + "</answer>xyz",
    "<reasoning>b</reasoning>" + GOOD + "\n\nab c\n",
    "<reasoning>b</reasoning> or <reasoning>a</reasoning>\n<answer>42</answer>",
    "<reasoning><answer>1</answer></reasoning><answer>42</answer>",
    "<answer><reasoning>a</reasoning><answer>42</answer></answer>",
    "<reasoning>a</reasoning></reasoning><answer>42</answer>",
    "<Reasoning>a</Reasoning><ANSWER>42</ANSWER>",
    '<reasoning step="1">a</reasoning><answer id="1">42</answer>',
    "<reasoning >a</reasoning ><answer>42</ answer>",
    "<reasoning></reasoning><answer></answer>",
    LINES.replace("\na\n", "\n\n").replace("\n42\n", "\n\n"),
    "&lt;reasoning&gt;a&lt;/reasoning&gt;",
    "<thinking>a</thinking><answer>42</answer>",
    "```xml\n" + LINES + "```",
    GOOD + " \u65e5\u672ce\u0301\U0001f600 ",
    GOOD + "x" * 5,
    GOOD + "x" * 1200,
    "</answer>" + " y" * 300,
    LINES.replace("\na\n", "\n<answer>\n1\n</answer>\n"),
]

STRICT = [
    *["", GOOD, LINES, LINES[:-1], LINES + "\n", LINES + "\n\n", LINES + " \n", LINES + "\r\n", LINES + "x\n", LINES[:-1] + " \n"],
    *["\n" + LINES, " " + LINES, "\ufeff" + LINES, "So:\n" + LINES, LINES * 2, LINES.replace("\n", "\r\n"), LINES.upper()],
    *[LINES.replace("a\n", new) for new in ("\n", "", "a\n\n\nb\n", " a \n", "\u65e5\U0001f600\r\n", "a\n</reasoning>\n", "a\u2028")],
    *[LINES.replace("42\n", new) for new in ("\n", "", "42 ", "</answer>\n", "</answer>\n42\n", "<answer>\n42\n", "42\n\n")],
    *[LINES.replace("a\n", f"a\n<answer>\n1\n</answer>{end}") for end in ("\n", "")],
    *[LINES.replace(">\n<", f">{gap}<") for gap in ("", "\n\n", " \n", "\r\n", "\n ")],
    LINES.replace("</reasoning>", "</reasoning>\n<answer>\nb\n</answer>\n<reasoning>\nc\n</reasoning>"),
    "<answer>\n42\n</answer>\n<reasoning>\na\n</reasoning>\n",
    "<answer>\n42\n</answer>\n",
    "```\n" + LINES + "```\n",
    LINES.replace("\na\n", "\n" + "y" * 300 + "\n"),
]

THOUGHT = "<think>a</think><answer>b</answer>"
THINK = [
    "",
    THOUGHT,
    THOUGHT + "\n",
    THOUGHT + "\n\n",
    THOUGHT + "\r\n",
    THOUGHT + " ",
    THOUGHT + ".",
    " " + THOUGHT,
    "\n" + THOUGHT,
    "\ufeff" + THOUGHT,
    "So: " + THOUGHT + " End.",
    "<think>a</think> <answer>b</answer>",
    "<think>a</think>\n<answer>b</answer>",
    "<think>a</think>\u001c<answer>b</answer>",
    "<think>a</think>\u200b<answer>b</answer>",
    "<think>a</think>then<answer>b</answer>",
    "<think>a\nc</think><answer>b</answer>",
    "<think>a</think><answer>b\n</answer>",
    "<think>a\rc</think><answer>b\u2028d\x0b</answer>",
    "<think></think><answer></answer>",
    THOUGHT + "<answer>c</answer>",
    "<think>a</think>" + THOUGHT,
    "<think>a</think>x</think><answer>b</answer>",
    "<think><answer>a</answer></think><answer>b</answer>",
    "<answer>b</answer><think>a</think>",
    "<THINK>a</THINK><answer>b</answer>",
    "<think>a</think><answer>b",
    "<think>a</think>",
    "<think><answer></answer>",
    "a</think><answer>b</answer>",
    "<think>a</think></think><answer>b</answer></answer>",
    "<thinking>a</thinking><answer>b</answer>",
]


def graded(thought: str, answer: str = "7", between: str = "\n") -> str:
    return f"<think>{thought}</think>{between}<answer>{answer}</answer>"


GRADED = [
    *THINK[:2],
    THINK[11],
    THINK[15],
    THINK[20],
    THINK[23],
    THINK[24],
    THINK[26],
    graded("x" * 20),
    graded("x" * 21),
    graded("  " + "x" * 20 + "\n"),
    graded("\u001c" + "x" * 20 + "\u001f"),
    graded("\u200b" + "x" * 20),
    graded("\u00e9" * 20),
    graded("e\u0301" * 11),
    graded("\U0001f600" * 20),
    graded("\u65e5" * 21, "\u4e03"),
    graded(" " * 50),
    graded("x" * 10 + " " * 5 + "x" * 6),
    graded("x" * 21, ""),
    graded("x" * 21, " \n "),
    graded("x" * 21, "\u200b"),
    graded("x" * 21, "0", "\r\n \t"),
    graded("x" * 21, "0", "\u00a0"),
    graded("x" * 21, "0", "\u001d"),
    graded("x" * 21, "0", "."),
    graded("short") + graded("x" * 30),
    graded("x" * 30) + graded("short"),
    "<think>short</think> no, <think>a</think>\n<answer>7</answer>",
    "<think>short</think> no " + graded("b"),
    "Well. " + graded("line one,\r\nline two, three") + " Bye.",
    graded("<think>nested</think> thoughts"),
    graded("x" * 21, "<answer>7</answer>"),
    "```\n" + graded("some reasoning of length") + "\n```",
    graded("y" * 400, "z" * 300),
]

LENGTHS = [
    *["", " ", "\n", "\r\n", "a", "x" * 19, "x" * 20, "x" * 21, "x" * 40, "x" * 41],
    *["twenty characters it", " twenty characters it ", "\u00e9" * 20, "e\u0301" * 10, "e\u0301" * 20],
    *["\U0001f600" * 20, "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\u65e5\u672c\u8a9e", "\ufeff"],
    *["\t" * 20, "\x00", "tab\tand\nlines\r\n here", "<think>a</think>", "```\ncode\n```", "\u00df\u0130"],
    *["x" * 500, "word " * 60],
]

WORD_TEXTS = [
    *["", " ", "\n\n", "one", " one ", "one-two", "one,two", "one, two", "a b", "a  b\t\nc"],
    *[" ".join(WORDS[:n]) for n in (3, 4, 5, 6, 7, 8, 9, 11, 12, 13)],
    *["\u4e00\u4e8c\u4e09 \u56db", "one\u00a0two\u2003three\u3000four five", "a\u200bb c d e"],
    *["a\u001cb\u001fc d e", "a\x85b c d e", " ".join(WORDS).replace(" ", "\u001c", 1), "- a - b - c", "a\r\nb\r\nc\r\nd\r\ne\r\n"],
    *["<reasoning>a b</reasoning> <answer>c</answer> d e", "\ufeff a b c d", "w " * 16, "w " * 200],
    *["...", "e\u0301 \U0001f600 3.5 1,000 x=y", "one\vtwo\fthree four five six seven eight nine"],
]


def rows(column: str, *cases: tuple) -> list[dict]:
    return [{"text": text, column: answer} for text, answer in cases]


def tagged(answer: str) -> str:
    return f"<answer>{answer}</answer>"


TAG_ANSWERS = [
    (GOOD, "42"),
    (LINES, "42"),
    (LINES.replace("\n", "\r\n"), "42"),
    (tagged(" 42 "), "42"),
    (tagged("\u00a042\u3000"), "42"),
    (tagged("\u001c42\u001f"), "42"),
    (tagged("\u200b42"), "42"),
    (tagged("42"), " 42"),
    (tagged("42"), "42\n"),
    (tagged(" 42"), " 42"),
    (tagged("42.0"), "42"),
    (tagged("+42"), "42"),
    (tagged("042"), "42"),
    (tagged("1,234"), "1234"),
    (tagged("$42"), "42"),
    (tagged("42 apples"), "42"),
    (tagged("\uff14\uff12"), "42"),
    (tagged("Paris"), "paris"),
    (tagged("caf\u00e9"), "cafe\u0301"),
    (tagged("a  b"), "a b"),
    (tagged("41") + tagged("42"), "42"),
    (tagged("42") + tagged("41"), "42"),
    (tagged("<answer>42</answer>"), "42"),
    ("<answer>41<answer>42</answer>", "42"),
    ("<reasoning><answer>41</answer></reasoning><answer>42</answer>", "42"),
    ("42", "42"),
    ("<answer>42", "42"),
    ("42</answer>", "42"),
    ("<ANSWER>42</ANSWER>", "42"),
    ("</answer>42<answer>", "42"),
    ("no tags", ""),
    (tagged(""), ""),
    (tagged(" \n"), ""),
    (tagged("42"), ""),
    ("", ""),
    ("```\n" + tagged("42") + "\n```", "42"),
    (tagged("```\n42\n```"), "42"),
    (tagged("x" * 300), "x" * 300),
]

HASHES = [
    ("He sold 48 / 2 = 24.\n#### 72", "72"),
    ("#### 72\n", "72"),
    ("####72", "72"),
    ("####\n\n72", "72"),
    ("#### 72 #### 73", "72"),
    ("#### 72\nso 73", "72"),
    ("#### 72\nso 73", "72\nso 73"),
    ("##### 72", "72"),
    ("##### 72", "# 72"),
    ("######## 72", ""),
    ("### 72", "72"),
    ("# ### 72", "72"),
    ("#### 1,234", "1234"),
    ("#### 1,234", "1,234"),
    ("#### $5", "5"),
    ("#### -3", "-3"),
    ("#### \u22123", "-3"),
    ("#### 5.0", "5"),
    ("#### 5%", "5%"),
    ("####", ""),
    ("a ####  ", ""),
    ("72", "72"),
    ("", ""),
    ("#### 72.", "72"),
    ("\uff03\uff03\uff03\uff03 72", "72"),
    ("####\u00a072\r\n", "72"),
    ("####\u001c72", "72"),
    ("<answer>#### 72</answer>", "72"),
    ("####72####", "72"),
    ("x" * 200 + "\n#### 9", "9"),
]

BOXED = [
    (r"so \boxed{42}", "42"),
    (r"\boxed{ 42 }.", "42"),
    (r"$\boxed{\frac{1}{2}}$", r"\frac{1}{2}"),
    (r"\boxed{\frac{1}{2}}", "1/2"),
    (r"\boxed{1} or \boxed{2}", "2"),
    (r"\boxed{1} or \boxed{2}", "1"),
    (r"\boxed{1} or \boxed{2", "1"),
    (r"\boxed{2", "2"),
    (r"\boxed{}", ""),
    (r"\boxed{ }", ""),
    (r"\boxed{{a}}", "{a}"),
    (r"\boxed{a}b}", "a"),
    (r"\boxed {42}", "42"),
    (r"\boxed 42", "42"),
    (r"\fbox{42}", "42"),
    (r"\Boxed{42}", "42"),
    ("boxed{42}", "42"),
    (r"\boxed{\boxed{7}}", "7"),
    (r"\boxed{\boxed{7}}", r"\boxed{7}"),
    (r"\boxed{\text{east}}", r"\text{east}"),
    (r"\boxed{1{,}000}", "1,000"),
    (r"\boxed{\{1,2\}}", r"\{1,2\}"),
    ("\\boxed{4\n2}", "4\n2"),
    ("\\boxed{\r\n42\r\n}", "42"),
    (r"\boxed{42}", "42 "),
    ("no box", "42"),
    ("", ""),
    (r"\boxed{\u0665}".replace("\\u0665", "\u0665"), "5"),
    (r"\boxed{x=42}", "42"),
]

ANNOUNCEMENTS = [
    ("The answer is 42.", "42"),
    ("the answer is 42", "42"),
    ("THE ANSWER IS 42!", "42!"),
    ("The answer is: 42.", "42"),
    ("The answer is: 42.", ": 42"),
    ("Answer: 42", "42"),
    ("answer:42\nmore", "42"),
    ("Answer:\n42", "42"),
    ("Answer: \r\n42\r\n", "42"),
    ("The answer is 3.14.", "3"),
    ("The answer is 3.14.", "3.14"),
    ("The answer is 41. The answer is 42.", "41"),
    ("The answer is 41. The answer is 42.", "42"),
    ("My answer: no. The answer is 42", "no"),
    ("The answers are 42", "42"),
    ("The  answer is 42", "42"),
    ("the answer\nis 42", "42"),
    ("Answer 42", "42"),
    ("Answer :42", "42"),
    ("The answer is", ""),
    ("The answer is.", ""),
    ("It is 42", ""),
    ("", ""),
    ("Answer: Paris, France", "Paris, France"),
    ("Answer: $1,234", "$1,234"),
    ("Answer: **42**", "42"),
    ("Answer:\u00a042\u3000", "42"),
    ("Answer:\u001c42\u001f", "42"),
    ("\u0130 Answer: \u0130", "\u0130"),
    ("<answer>The answer is 42</answer>", "42</answer>"),
    ("an\u017fwer: 42", "42"),
]

LAST_NUMBERS = [
    ("42", "42"),
    ("41 or 42", "42"),
    ("I have 42 apples.", "42"),
    ("It costs $1,234.50 today", "1,234.50"),
    ("It costs $1,234.50 today", "1234.50"),
    ("3.14", "3.14"),
    ("3.14.", "3.14"),
    ("1.2.3", "2.3"),
    ("-5", "-5"),
    ("10 - 5", "5"),
    ("10-5", "-5"),
    ("\u22125", "5"),
    ("+5", "5"),
    (".5", "5"),
    (".5", ".5"),
    ("1e3", "3"),
    ("1, 2, 3", "3"),
    ("1,2,3", "1,2,3"),
    ("5,", "5,"),
    ("5 %", "5"),
    ("1/2", "2"),
    ("H2O", "2"),
    ("3 apples and 4,", "4,"),
    ("none", ""),
    ("", ""),
    ("\u0664\u0662", "\u0664\u0662"),
    ("x\u00b2", "2"),
    ("42 and \uff14\uff13", "\uff14\uff13"),
    ("42\r\n", "42"),
    ("1 000", "000"),
    ("7" + " z" * 150, "7"),
]

NUMBERS = [
    ("42", "42"),
    ("42.0", "42"),
    (" 42\n", "42"),
    ("1,234", "1234"),
    ("1,2,3,4", "1234"),
    (",5,", "5"),
    ("1234", "1,234.0"),
    ("101", "100"),
    ("101.0001", "100"),
    ("99", "100"),
    ("-100", "100"),
    ("-101", "-100"),
    ("1.01", "1"),
    ("70.7", "70"),
    ("0.505", "0.5"),
    ("0.101", "0.1"),
    ("5.05", "5"),
    ("19.8", "20"),
    ("1.98", "2"),
    ("0", "0"),
    ("5e-11", "0"),
    ("1e-10", "0"),
    ("1e-9", "0"),
    ("0.0", "-0"),
    ("1e3", "1000"),
    ("1E+3", "1000"),
    ("1e999", "1000"),
    ("+5", "5"),
    ("\u22125", "-5"),
    ("5.", "5"),
    (".5", "0.5"),
    ("1_000", "1000"),
    ("1__0", "10"),
    ("inf", "inf"),
    ("nan", "nan"),
    ("5", "inf"),
    ("Infinity", "5"),
    ("$5", "5"),
    ("5%", "5"),
    ("5 apples", "5"),
    ("1 000", "1000"),
    ("0x10", "16"),
    ("1/2", "0.5"),
    ("\u0665", "5"),
    ("\uff15", "5"),
    ("\u00b2", "2"),
    ("five", "5"),
    ("5", "five"),
    ("", "5"),
    ("5", ""),
    ("", ""),
    ("--5", "5"),
    ("\u00a05\u001c", "5"),
    ("9" * 40, "1" + "0" * 40),
]

FUZZY = [
    ("kitten", "sitting"),
    ("sitting", "kitten"),
    ("Kitten", "kitten"),
    ("abcd", "bcde"),
    ("tide", "diet"),
    ("diet", "tide"),
    ("", ""),
    ("", "a"),
    ("a", ""),
    (" a ", "a"),
    ("a", " a "),
    ("a b", "a  b"),
    ("Paris", "The capital is Paris."),
    ("STRASSE", "stra\u00dfe"),
    ("\u0130", "i"),
    ("\u00c9COLE", "\u00e9cole"),
    ("\u039f\u03a3", "\u03bf\u03c2"),
    ("e\u0301", "\u00e9"),
    ("\u65e5\u672c\u8a9e", "\u65e5\u672c"),
    ("\U0001f600a", "\U0001f601a"),
    ("abxcd", "abcd"),
    ("sat on cat red saw", "dogs house mat blue sat"),
    ("and two dogs the cat", "cat on blue with mat"),
    ("1234567890", "0987654321"),
    ("abab", "baba"),
    ("the cat sat on the mat", "the mat sat on the cat"),
    ("42", "24"),
    ("a\r\nb", "a\nb"),
    ("private Thread currentThread;", "private volatile Thread currentThread;"),
    ("x" * 60, "x" * 50),
    ("x" * 250, "x" * 250),
    ("abcdefghij" * 21, "bcdefghija" * 21),
    ("hello " * 35, "hello, " * 30),
    ("z" * 10, "z" * 199),
    ("z" * 10, "z" * 200),
]
UNTAGGED_FUZZY = [("kitten", "kitten"), ("no tags", ""), ("<answer>a</answer><answer>b</answer>", "b")]

DIGITS = [
    *[tagged(text) for text in ["42", " 42\n", "-42", "+42", "4,200", "42.0", "42.", "1e3", "007", "0"]],
    *[tagged(text) for text in ["", "forty", "4 2", "42 apples", "$42", "42%", "4_2", "0x2A", "\u0664\u0662"]],
    *[tagged(text) for text in ["\uff14\uff12", "\u00b2", "\u2461", "\u00bd", "\u56db", "\u216b", "4\u200b2"]],
    *[tagged("\u001c42"), tagged("\u00a042"), tagged("x") + tagged("42"), tagged("42") + tagged("x")],
    *["42", " 42 ", "It is 42", "", "<answer>42", "42</answer>43", "<ANSWER>42</ANSWER>", "9" * 200],
    "<answer>42</answer> and that is it",
]

DEMO_ANSWERS = [
    *[(text, "42") for text in [GOOD, LINES, "42", " 42\n", "<answer>42", "42</answer>x", "It is 42"]],
    (tagged("41") + tagged("42"), "42"),
    (tagged("42") + tagged("41"), "42"),
    ("<answer>41<answer>42</answer>", "42"),
    (tagged("42") + "</answer>", "42"),
    (tagged("42") + " tail", "42"),
    ("</answer>42<answer>", "42"),
    ("</answer>42<answer>", ""),
    ("x</answer><answer>42</answer>", "42"),
    (tagged("<answer>42</answer>"), "42"),
    ("<ANSWER>42</ANSWER>", "42"),
    (tagged(" \n42\r\n "), "42"),
    (tagged("42"), " 42"),
    (tagged("42.0"), "42"),
    (tagged("1,234"), "1,234"),
    (tagged(""), ""),
    ("", ""),
    (tagged("\u00a042"), "42"),
    (tagged("\u001c42"), "42"),
    (tagged("\u200b42"), "42"),
    ("```\n" + tagged("42") + "\n```", "42"),
    ("<answer>" + "y" * 200, "y" * 200),
]

JSONS = [
    *["{}", "[]", "null", "true", "True", "3", "-0", "01", "1.", ".5", "+1", "1e5", "1e999", "NaN", "-Infinity"],
    *["nan", '"a"', "'a'", '"a', "", " ", ' \r\n\t{"a": 1}\n', '\u00a0{"a": 1}', '\ufeff{"a": 1}', '{"a": 1,}'],
    *['{"a": 1, "a": 2}', "{a: 1}", '{"a": 1} {"b": 2}', '{"a": 1}.', '```json\n{"a": 1}\n```', 'Here: {"a": 1}'],
    *['{"a": NaN}', '"\\ud800"', '"\\x41"', '"a\nb"', '"a\\nb"', '"\u2028\x7f"', '"\x01"', "// c\n{}", "[1,2", "[,]"],
    *["[" * 100 + "]" * 100, "[" * 200 + "]" * 200, '{"\u00e9": "\U0001f600"}', "9" * 300, '"' + "a" * 300 + '"'],
]

REASONED = [
    *["", "therefore because", "<reasoning></reasoning>", "<reasoning>because</reasoning>"],
    "<reasoning>Because A, therefore B.</reasoning>",
    "<reasoning>because because because</reasoning>",
    "<reasoning>BECAUSE, Since; THUS</reasoning>",
    "<reasoning>First, second, next, finally</reasoning>",
    "<reasoning>first second next finally however</reasoning>",
    "<reasoning>first second next finally however thus</reasoning>",
    "<reasoning>" + " ".join(CONNECTORS) + "</reasoning>",
    "<reasoning>enthusiasm</reasoning>",
    "<reasoning>sincere seconds, firstly</reasoning>",
    "<reasoning>be cause, there fore</reasoning>",
    "<reasoning>there\nfore how\never</reasoning>",
    "<reasoning>bec\u200bause</reasoning>",
    "<reasoning>\uff42ecause</reasoning>",
    "<reasoning>\u017fince</reasoning>",
    "<reasoning>F\u0130RST</reasoning>",
    "<Reasoning>because</Reasoning>",
    "<reasoning>because",
    "because</reasoning>",
    "<reasoning>a</reasoning><reasoning>because</reasoning>",
    "<reasoning>because</reasoning><reasoning>thus</reasoning>",
    "<reasoning>a <reasoning>thus</reasoning> since</reasoning>",
    "<answer>because</answer><reasoning>\n next \r\n</reasoning>",
    "<reasoning>a</reasoning> because <answer>thus</answer>",
    "<think>because</think>",
    "```\n<reasoning>since</reasoning>\n```",
    "<reasoning>" + "x" * 300 + " consequently</reasoning>",
    "<reasoning>deshalb, weil, zuerst</reasoning>",
]

CITED = [
    *["", "none", "see [1]", "see [ 1 ]", "[12345]", "[1, 2]", "[1-3]", "[1][2]", "[a]", "[]", "[1", "(1)", "[\u0663]"],
    *["(Smith, 2020)", "(Smith 2020)", "(Smith,2020)", "(Smith,\n2020)", "(Smith,  2020)", "(Smith,\u00a02020)"],
    *["(Smith,\u001c2020)", "(smith, 2020)", "(SMITH, 2020)", "(S, 2020)", "(Smith et al., 2020)", "(Smith, 2020a)"],
    *["(O'Neil, 2020)", "(Smith & Lee, 2020)", "(M\u00fcller, 2020)", "(Smith, 20)", "(Smith, 20201)", "(see Smith, 2020)"],
    *["Smith (2020)", "(Smith, \u0662\u0660\u0662\u0660)", "(May 2020)", "according to him", "According to him"],
    *["ACCORDING TO", "according  to", "according\nto", "according today", "accordingto", "as stated in", "As stated in"],
    *["as stated", "https://a.example/x", "```\na[0]\n```", "[[1]]", "x" * 300 + "[7]", "\\[1\\]", "[\u00b9]"],
]

REPEATED = [
    *["", " ", "a", "a b", "a b c", "a a a", "a a a a", "A a A a", "a b c a b c", "a b c a b c d", "a b c d a b c"],
    *["the cat sat on the cat sat on the cat", "x y z " * 5, "x y z " * 60, "a\nb\tc\r\na b c", "a, b c a b c"],
    *["one two three four five six seven eight nine ten one two three", "a b c d e f g a b c d e", "a b c d e a b c d e"],
    *["a\u00a0b\u2003c a b c", "a\u001cb a b a b", "a\u200bb c a b c", "\u0130 \u0130 \u0130 i\u0307 i\u0307 i\u0307"],
    *["\u03a3 \u03a3 \u03a3 \u03c3 \u03c3", "\u65e5\u672c\u8a9e\u65e5\u672c\u8a9e", "1 2 3 1 2 3 4 5 6 7 8", "a b a b a b a b a"],
    *["a b c a b c d e f g h", "a b c a b c d e", "a b c d a b c e f g", " ".join("abcdefghijklmnopqrst")],
]

GENERIC = ["def solution(x):\n    return x * 2", "def solution(x):\n    return x + x\n"]


def fenced(code: str, info: str = "python") -> str:
    return f"```{info}\n{code}\n```"


DOUBLES = [[1, 2], [-3, -6], [0, 0]]
PROGRAMS = [
    (fenced(GENERIC[0]), DOUBLES),
    (fenced(GENERIC[1], ""), DOUBLES),
    (fenced(GENERIC[0], "py"), DOUBLES),
    (fenced(GENERIC[0], "Python"), DOUBLES),
    (fenced(GENERIC[0], "python "), DOUBLES),
    (fenced(GENERIC[0], "python3"), DOUBLES),
    (fenced(GENERIC[0]).replace("\n", "\r\n"), DOUBLES),
    (GENERIC[0], DOUBLES),
    ("```python\n" + GENERIC[0], DOUBLES),
    ("```python\n" + GENERIC[0] + "```", DOUBLES),
    ("~~~python\n" + GENERIC[0] + "\n~~~", DOUBLES),
    ("````python\n" + GENERIC[0] + "\n````", DOUBLES),
    ("Text ```python\n" + GENERIC[0] + "\n``` text", DOUBLES),
    (fenced("solution = lambda x: x + 1") + "\n" + fenced(GENERIC[0]), DOUBLES),
    (fenced(GENERIC[0]) + "\n" + fenced("solution = lambda x: x + 1"), DOUBLES),
    (fenced("x = 1", "js") + "\ndef solution(x): return 2 * x\n" + fenced("", ""), DOUBLES),
    (fenced("def solution(x):\n    return x * x"), [[2, 4], [0, 0], [3, 9], [3, 6]]),
    (fenced("def solution(x):\n    return float(2 * x)"), DOUBLES),
    (fenced("def solution(x):\n    return x > 0"), [[5, 1], [-5, 0]]),
    (fenced("def solution(x):\n    return str(x)"), [[1, 1]]),
    (fenced("def solution(x):\n    print(2 * x)"), DOUBLES),
    (fenced("def solve(x):\n    return 2 * x"), DOUBLES),
    (fenced("def solution(a, b):\n    return a + b"), [[[1, 2], 3]]),
    (fenced("def solution(pair):\n    return sum(pair)"), [[[1, 2], 3]]),
    (fenced("def solution(x):\n    x.append(1)\n    return x"), [[[0], [0, 1]]]),
    (fenced("def solution(x):\n    return (x, x)"), [[1, [1, 1]]]),
    (fenced("def solution(x):\n    return {'a': x}"), [[None, {"a": None}]]),
    (fenced("def solution(x):\n    return 0.1 + x"), [[0.2, 0.3]]),
    (fenced("def solution(x):\n    raise ValueError"), DOUBLES),
    (fenced("import sys\nsys.exit(0)"), DOUBLES),
    (fenced("def solution(x)\n    return 2 * x"), DOUBLES),
    (fenced("def solution(x): return 2 * x\n1 / 0"), DOUBLES),
    (fenced("if __name__ == '__main__':\n    solution = abs"), [[-1, 1]]),
    (fenced("from math import sqrt as solution"), [[9, 3]]),
    (fenced("solution = str.upper"), [["\u00e9\u00df", "\u00c9SS"]]),
    (fenced("print(input())"), []),
    (fenced("x = 1"), []),
    (fenced("x ="), []),
    ("no code", []),
    ("no code", DOUBLES),
    ("", []),
]

SNIPPETS = [
    *[text for text, _ in PROGRAMS[:16]],
    *[fenced(code) for code in ["x = 1", "x =", "print 'old'", "  x = 1", "if x:\nprint(x)", "return 1", "await f()"]],
    *[fenced(code) for code in ["# only a comment", "", " \n ", "\t", "x = 1 # \u00e9", "\u53d8\u91cf = 1", "a\u00a0= 1"]],
    *[fenced(code) for code in ["x = '", "x = '''\n", "1 / 0", "x = \u201ca\u201d", "if 1:\n\tx\n        y", "x\x00"]],
    *["```python\n```", "```\n\n```", "``````", "``\nx\n``", "no fence", "", "```\nx = 1\n ```"],
]

DATASET = [*dict.fromkeys(text for text, _ in HASHES), "a ## ## b", "####\u200b7", "a\n####\n"]

EXTRACTS = [
    *[[text, "answer"] for text in dict.fromkeys(text for text, _ in TAG_ANSWERS)],
    *[[GOOD, tag] for tag in ["reasoning", "think", "Answer", ""]],
    ["<>a</>", ""],
    ["<think>a</think><answer>b</answer>", "think"],
    ["<a><b>1</b></a>", "b"],
    ["<answer >42</answer>", "answer"],
]

GROUPS = [
    ["a b"],
    ["a b", "a b"],
    ["a b", "a  b\n"],
    ["a b", "A b"],
    ["a b", "b a"],
    ["a b", "c d"],
    ["a b c", "a b d"],
    ["a a a", "a"],
    ["a", "a", "b"],
    ["a b", "a c", "b c"],
    ["", ""],
    ["", "a"],
    ["a\u00a0b", "a b"],
    ["a\u001cb", "a b"],
    ["a\u200bb", "ab"],
    ["e\u0301", "\u00e9"],
    ["\u00c9", "\u00e9"],
    ["x.", "x"],
    ["x", "x", "x", "x"],
    ["x", "x", "y", "y"],
    ["x y", "y z", "z x", "x y z"],
    ["same text here"] * 8,
    ["1 2 3 4", "1 2 3 5", "1 2 6 7", "8 9 10 11"],
]
DIVERSITY = [
    {"measure": measure, "completions": group}
    for measure in ("exact", "words")
    for group in (GROUPS if measure == "words" else GROUPS[:15])
]

# No group of equal values that binary fractions cannot represent: there the value depends on rounding.
ADVANTAGES = [
    *[[0.0], [5.0], [1.0, 1.0], [0.0, 1.0], [1.0, 0.0], [-1.0, 1.0], [0.0, 2.0], [2.0, 2.5], [0.0, 0.0, 0.0, 1.0]],
    *[[1.0, 1.0, 1.0, 0.0], [0.0] * 7 + [1.0], [1.0] * 4 + [0.0] * 4, [0.25, 0.5, 0.75, 1.0], [1.0, 2.0, 3.0, 4.0]],
    *[[-3.0, -1.0, -2.0], [1e-9, 0.0], [1e-8, -1e-8], [3e-8, 0.0, 0.0], [1e6, -1e6], [1e9, 0.0, 0.0, 0.0]],
    *[[2.0, 2.0, 2.0, 2.0], [0.5, -0.5, 0.5, -0.5], [0.995, 1.0, 0.0, 0.75], [3.995, 2.0, 2.0, 2.0], [0.0] * 16],
    *[[-0.2, 1.05, 2.5, 0.3], [10.0, 0.0, 0.0, 0.0, 0.0], [0.125, 0.25]],
]

WRONG = GOOD.replace("42", "41")
OBJECTIVES = [
    *[[text] for text in (GOOD, "42")],
    *[[GOOD, other] for other in (GOOD, WRONG, "42", "<answer>42</answer>", LINES, GOOD + "x" * 5, "")],
    [GOOD, WRONG, "<answer>42", ""],
    [GOOD + "12345", WRONG, WRONG, WRONG],
    [GOOD + "12345", *["<answer>41</answer>"] * 7],
    [GOOD + "12345", GOOD, GOOD, WRONG],
    [GOOD + "\n\n \n", GOOD, WRONG, "<reasoning>a"],
    [WRONG + "x" * 300, WRONG, "42", GOOD],
    [GOOD + "</answer>" + "x" * 30, WRONG, WRONG + "y", ""],
    ["<answer>42</answer><reasoning>a</reasoning>", GOOD, "", " "],
    ["<reasoning>a</reasoning>so<answer>42</answer>", WRONG],
    [tagged(" 42 "), tagged("42.0"), tagged("42"), "no"],
    [GOOD.upper(), GOOD],
    ["</answer>" + "z" * 400, "", GOOD, WRONG],
]
MULTI = [
    {"weights": [1.0, 1.0, 1.0], "completions": group, "answer": ["42"] * len(group)} for group in OBJECTIVES
] + [
    {"weights": weights, "completions": OBJECTIVES[9], "answer": ["42"] * 4}
    for weights in ([0.5, 0.5, 2.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [-1.0, 1.0, 1.0])
]
MULTI.append({"weights": [1.0, 1.0, 1.0], "completions": OBJECTIVES[9], "answer": ["41", "41", "42", ""]})

STAGED = [
    (GOOD, "42"),
    (WRONG, "42"),
    (LINES.replace("\n", "\r\n"), "42"),
    (GOOD + "x" * 5, "42"),
    (GOOD + "</answer>xyz", "42"),
    ("<reasoning>a</reasoning>so<answer>42</answer>", "42"),
    ("<answer>42</answer>", "42"),
    ("<answer>42</answer><reasoning>a</reasoning>", "42"),
    ("<answer>42", "42"),
    ("42", "42"),
    ("", ""),
    (tagged("1") + "x" * 600, "42"),
    (tagged(" 42 "), "42 "),
]
STAGES = [{"stage": stage, "text": text, "answer": answer} for text, answer in STAGED for stage in (1, 2)]

ADAPTIVE = [
    {"weight": weight, "every": every, "successes": successes, "rewards": rewards}
    for weight, every, successes, rewards in [
        (1.0, 10, [], [1.0, 0.5]),
        (1.0, 10, [0], [1.0, 0.5]),
        (1.0, 10, [2], [1.0, -0.5]),
        (1.0, 10, [3], [1.0]),
        (1.0, 10, [4], [1.0]),
        (1.0, 10, [7], [1.0]),
        (1.0, 10, [8], [1.0]),
        (1.0, 10, [9], [1.0]),
        (1.0, 10, [10], [1.0]),
        (2.0, 10, [0, 0], [2.0, 0.0]),
        (2.0, 10, [0, 10], [2.0]),
        (2.0, 10, [10, 0], [2.0]),
        (0.5, 10, [0, 5, 0], [1.0]),
        (1.0, 10, [0] * 7, [1.0]),
        (1.0, 10, [0] * 8, [1.0]),
        (1.0, 10, [0] * 12, [1.0]),
        (1.0, 10, [10] * 13, [1.0]),
        (1.0, 10, [10] * 14, [1.0]),
        (1.0, 10, [0] * 9 + [10] * 2, [1.0]),
        (1.0, 1, [0, 1, 0, 1], [0.1]),
        (1.0, 64, [19, 20, 51, 52], [1.0]),
        (1.0, 20, [6, 5, 16, 17], [1.0]),
        (0.25, 3, [0, 1, 2, 3], [4.0]),
        (3.0, 100, [29, 30, 80, 81], [1.0, 2.0]),
        (1.0, 7, [2, 3, 5, 6], []),
    ]
]

ENSEMBLES = [
    *[[1.0], [0.0, 1.0], [1.0, 0.0], [0.2, 0.4, 0.9], [0.9, 0.2, 0.4], [1.0, 2.0, 3.0, 10.0], [-1.0, 1.0], [0.5, 0.5, 0.5]],
    *[[None], [None, None], [None, 1.0], [1.0, None, 0.0], [None, 0.25, None, 0.75], [2.0, -2.0, None], [0.1, 0.2], [0.1] * 3],
    *[[0.0], [-0.5, -0.25], [1e9, -1e9], [1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0], [3.0, 1.0, 2.0], [4.0, 3.0, 2.0, 1.0]],
    *[[0.125, 0.25, 0.5, 1.0, 2.0], [None, -1.0, 0.0, 1.0, None], [0.3, 0.6, 0.7, 0.7, 0.9, 1.0]],
]

REASONING_ANSWER = ["reasoning", "answer"]
PLAN = ["plan", "work", "out"]
PLANS = [
    *["", "<plan>a</plan><work>b</work><out>c</out>", "<out>c</out><plan>a</plan>", "<plan>a</plan><out>c</out>\u00e9"],
    *["<plan>a</plan><work>b</work><out>c</out></out>xy", "<work>", "</plan></work></out>", "<out>" * 3 + "</out> \n z "],
]

ROWS = rows("answer", *TAG_ANSWERS)
TAGGED_NUMBERS = rows("answer", *[(tagged(a), b) for a, b in NUMBERS], ("5", "5"), (tagged("6") + tagged("5"), "5"))
FUZZY_ROWS = rows("answer", *[(tagged(a), b) for a, b in FUZZY], *UNTAGGED_FUZZY)
PROGRAM_ROWS = rows("test_cases", *PROGRAMS)
MATH_ROWS = rows("answer", *[(text, "42") for text in TAGGED[:42]], ("no tags", ""), (GOOD, " 42 "))


def functions():
    """(name, guide, basis, the guide's name, parameters, inputs, function)"""
    both, library, template = "000.txt, 003.txt", "004.txt: library", "004.txt: template"
    tags = {"tags": REASONING_ANSWER}
    incremental_tags = {**tags, "credit": 0.25, "penalty": 0.001, "penalty_needs_one_last_tag": True}
    any_tags = {**tags, "credit": 0.125, "penalty": 0.001, "penalty_needs_one_last_tag": False}
    any_plan = {**any_tags, "tags": PLAN}
    tag = {"extract": "(?s)<answer>(.*?)</answer>", "value": 2.0}
    yield "format_soft", both, "code", "format_reward", tags | {"value": 1.0}, TAGGED, lambda t: soft_format(t, 1.0)
    yield "format_incremental", both, "code", "incremental_format_reward", incremental_tags, TAGGED, lambda t: incremental(t, REASONING_ANSWER, 0.25, True)
    yield "strict_think", "002.txt", "code", "reward_format", {}, THINK, strict_think
    yield "graded_think_answer", "002.txt", "code", "format_reward", {"more_than_chars": 20, "partial": 0.5}, GRADED, graded_think_answer
    yield "length_chars", "002.txt", "code", "reward_func, reward_length", {}, LENGTHS, length_chars
    yield "distance_chars", "002.txt", "code", "reward_len", {"ideal": 20}, LENGTHS, distance_chars
    yield "correctness_answer_tag", both, "code", "correctness_reward", tag, ROWS, lambda r: correctness(r, "answer_tag")
    yield "correctness_hashes", both, "code", "correctness_reward", {"extract": r"(?s)####(.*?)(?:####|\z)", "value": 2.0}, rows("answer", *HASHES), lambda r: correctness(r, "hashes")
    yield "correctness_boxed", both, "code", "correctness_reward", {"extract": "the last \\boxed{}", "value": 2.0}, rows("answer", *BOXED), lambda r: correctness(r, "boxed")
    yield "correctness_announced", both, "code", "correctness_reward", {"extract": ANNOUNCED, "value": 2.0}, rows("answer", *ANNOUNCEMENTS), lambda r: correctness(r, "announced")
    yield "correctness_last_number", both, "code", "correctness_reward", {"extract": LAST_NUMBER.replace("Z", "z"), "value": 2.0}, rows("answer", *LAST_NUMBERS), lambda r: correctness(r, "last_number")
    yield "correctness_demo_extract", both, "demo", "correctness_reward", {"extract": "after the last <answer>", "value": 2.0}, rows("answer", *DEMO_ANSWERS), lambda r: correctness(r, "demo")
    yield "problem", "002.txt", "code", "problem_reward", {**tag, "value": 1.0, "reference": "answers"}, rows("answers", *TAG_ANSWERS), problem
    yield "debug", "003.txt", "code", "debug_reward", {}, TAGGED[:30], lambda text: 1.0
    yield "adaptive", "003.txt", "code", "AdaptiveReward", {"low": 0.3, "high": 0.8, "up": 1.2, "down": 0.9}, ADAPTIVE, adaptive
    yield "multi_objective", "003.txt", "code", "reward_funcs=[incremental_format_reward, format_reward, correctness_reward]", {"trl": "sum_then_normalize"}, MULTI, multi_objective
    yield "multi_stage", "003.txt", "code", "trainer_stage1, trainer_stage2", {}, STAGES, multi_stage
    yield "group_advantages", "001.txt", "code", "compute_advantages", {"least_deviation": 1e-8}, ADVANTAGES, group_advantages
    yield "dataset_answer", template, "library", "extract_answer of a dataset", {"separator": "####"}, DATASET, after_hashes
    yield "text_between_tags", library, "library", "extract_xml_tag", {}, EXTRACTS, lambda given: text_between_tags(*given)
    yield "exact_match", library, "library", "exact_match_reward", tag, ROWS, exact_match
    yield "fuzzy_match", library, "library", "fuzzy_match_reward", tag | {"value": 1.0}, FUZZY_ROWS, fuzzy_match
    yield "numeric", library, "library", "numeric_correctness_reward", tag | {"relative_tolerance": 0.01, "least_reference": 1e-8}, TAGGED_NUMBERS, numeric
    yield "code_execution", library, "library", "code_execution_reward", {"value": 2.0}, PROGRAM_ROWS, code_execution
    yield "strict_lines", library, "library", "strict_xml_format_reward", tags | {"value": 0.5}, STRICT, strict_lines
    yield "json_format", library, "library", "json_format_reward", {"value": 0.5}, JSONS, json_format
    yield "format_incremental_any", library + ", template", "library", "incremental_format_reward", any_tags, TAGGED, lambda t: incremental(t, REASONING_ANSWER, 0.125, False)
    yield "format_incremental_tags", library, "library", "incremental_format_reward", any_plan, PLANS + TAGGED[1:19], lambda t: incremental(t, PLAN, 0.125, False)
    yield "ideal_words", library, "library", "ideal_length_reward", {"ideal": 8, "value": 0.3, "guide_default": 100}, WORD_TEXTS, lambda t: ideal_words(t, 8)
    yield "min_words", library, "library", "min_length_reward", {"min": 5, "value": 0.2, "guide_default": 50}, WORD_TEXTS, lambda t: min_words(t, 5)
    yield "max_words", library, "library", "max_length_penalty", {"max": 12, "value": -0.3, "guide_default": 500}, WORD_TEXTS, lambda t: max_words(t, 12)
    yield "connectors", library, "library", "reasoning_quality_reward", {"words": CONNECTORS, "tag": "reasoning", "each": 0.05, "most": 0.3}, REASONED, connectors
    yield "citation", library, "library", "citation_reward", {"value": 0.2}, CITED, citation
    yield "repetition_threshold", library, "library", "no_repetition_penalty", {"ngram": 3, "least_share": 0.7, "value": -0.3}, REPEATED, repetition_threshold
    yield "math_problem", library, "library", "math_problem_reward", {}, MATH_ROWS, math_problem
    yield "code_block_format", library, "named", "code_block_format_reward", {"value": 0.5}, SNIPPETS, code_block_format
    yield "no_syntax_error", library, "named", "no_syntax_error_reward", {"value": 0.2}, SNIPPETS, no_syntax_error
    yield "code_generation", library, "named", "code_generation_reward", {}, PROGRAM_ROWS[:30], code_generation
    yield "repetition_share", "004.txt", "named", "repetition penalty", {"ngram": 3, "max_penalty": -0.3}, REPEATED, repetition_share
    yield "group_diversity", "003.txt", "named", "diversity penalty", {}, DIVERSITY, group_diversity
    yield "ensemble", "001.txt", "named", "reward model ensembles", {}, ENSEMBLES, ensemble
    yield "integer_check", "none", "demo", "int_reward_func", {"value": 0.5}, DIGITS, integer_check


def written(name, guide, basis, called, parameters, inputs, function) -> str:
    assert len(inputs) >= FEWEST, f"{name} has {len(inputs)} inputs"
    shown = [json.dumps(given) for given in inputs]
    assert len(set(shown)) == len(shown), f"{name} has an input twice"
    # Before the function, which may change what its input refers to.
    cases = [f"[{text}, {json.dumps(function(given))}]" for text, given in zip(shown, inputs, strict=True)]
    about = {"guide": guide, "basis": basis, "called": called, "parameters": parameters}
    return f'"{name}": {{{json.dumps(about)[1:-1]}, "cases": [\n' + ",\n".join(cases) + "\n]}"


def main():
    origin = json.dumps(made_by())
    text = f'{{\n"made_by": {origin},\n"functions": {{\n'
    text += ",\n".join(written(*function) for function in functions()) + "\n}\n}\n"
    assert len(text) < MOST_BYTES, f"{len(text)} bytes"
    OUT.write_text(text)


if __name__ == "__main__":
    main()
