"""Values of the reward functions that the GRPO guides teach: tests/reference/guides/guide_cases.json.

    python tests/reference/guides/make_guide_cases.py

Needs nothing but Python. Each function below is written from the guide's behavior, not from its code.
Where a guide's code and its text disagree, the code counts and a comment says so. `basis` says how
far a guide defines a function:

code     one of the five guides contains its code
library  guide 004.txt names it; its code is in the public reward_functions_library.py or
         basic_grpo_training.py that 004.txt points to, not in the five guides
named    the guides name it without any code; the definition is chosen here
demo     in no guide; from the GSM8K demo of GRPO that TRL's users know

The tests compare them with Hone's parameter sets of docs/from-trl.md. Each function has `guide`, `basis`,
`called` (the guide's name), `parameters` and `cases: [[input, expected], ...]`. An input is the
completion's text, an object with the text and the row's columns, or the group or state that the function
gets; `expected` is the value or values.

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
from inputs import (  # noqa: E402
    ADAPTIVE,
    ADVANTAGES,
    ANNOUNCEMENTS,
    BOXED,
    CITED,
    CONNECTORS,
    DATASET,
    DEMO_ANSWERS,
    DIGITS,
    FUZZY_ROWS,
    GRADED,
    GROUPS,
    HASHES,
    JSONS,
    LAST_NUMBERS,
    LENGTHS,
    MATH_ROWS,
    MULTI,
    PLAN,
    PLANS,
    PROGRAM_ROWS,
    REASONED,
    REASONING_ANSWER,
    REPEATED,
    ROWS,
    SNIPPETS,
    STAGES,
    STRICT,
    TAGGED,
    TAGGED_NUMBERS,
    TAG_ANSWERS,
    THINK,
    WORD_TEXTS,
    rows,
)
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
    """Named (004.txt "repetition penalty"): -0.3 times the share of trigrams that
    occurred before, as in Open R1; 0 below three words."""
    grams = trigrams(text)
    repeated = len(grams) - len(set(grams))
    return (1 - len(set(grams)) / len(grams)) * -0.3 if repeated else 0.0


# Groups and combinations


def group_diversity(completions: list[str]) -> list[float]:
    """Named ("add diversity penalty" in 003.txt): minus the mean similarity to the group's other members.

    The similarity is the share of common words among the different lower-case words of both, 1 for two
    texts without words.
    """
    words = [set(text.lower().split()) for text in completions]
    values = []
    for i, own in enumerate(words):
        others = [other for j, other in enumerate(words) if j != i]
        shares = [len(own & other) / len(own | other) if own | other else 1.0 for other in others]
        values.append(-total(shares) / len(shares) if shares else 0.0)
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


# Cases


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
    yield "exact_match", library, "library", "exact_match_reward", tag, ROWS, exact_match
    yield "fuzzy_match", library, "library", "fuzzy_match_reward", tag | {"value": 1.0}, FUZZY_ROWS, fuzzy_match
    yield "numeric", library, "library", "numeric_correctness_reward", tag | {"relative_tolerance": 0.01, "least_reference": 1e-8}, TAGGED_NUMBERS, numeric
    yield "code_execution", library, "library", "code_execution_reward", {"value": 2.0}, PROGRAM_ROWS, code_execution
    yield "strict_lines", library, "library", "strict_xml_format_reward", tags | {"value": 0.5}, STRICT, strict_lines
    yield "json_format", library, "library", "json_format_reward", {"value": 0.5}, JSONS, json_format
    yield "format_incremental_any", library + ", template", "library", "incremental_format_reward", any_tags, TAGGED, lambda t: incremental(t, REASONING_ANSWER, 0.125, False)
    yield "format_incremental_tags", library, "library", "incremental_format_reward", any_plan, PLANS + TAGGED[1:19], lambda t: incremental(t, PLAN, 0.125, False)
    yield "ideal_words", library, "library", "ideal_length_reward", {"ideal": 100, "value": 0.3}, WORD_TEXTS, lambda t: ideal_words(t, 100)
    yield "min_words", library, "library", "min_length_reward", {"min": 50, "value": 0.2}, WORD_TEXTS, lambda t: min_words(t, 50)
    yield "max_words", library, "library", "max_length_penalty", {"max": 500, "value": -0.3}, WORD_TEXTS, lambda t: max_words(t, 500)
    yield "connectors", library, "library", "reasoning_quality_reward", {"words": CONNECTORS, "tag": "reasoning", "each": 0.05, "most": 0.3}, REASONED, connectors
    yield "citation", library, "library", "citation_reward", {"value": 0.2}, CITED, citation
    yield "repetition_threshold", library, "library", "no_repetition_penalty", {"ngram": 3, "least_share": 0.7, "value": -0.3}, REPEATED, repetition_threshold
    yield "math_problem", library, "library", "math_problem_reward", {}, MATH_ROWS, math_problem
    yield "code_block_format", library, "named", "code_block_format_reward", {"value": 0.5}, SNIPPETS, code_block_format
    yield "no_syntax_error", library, "named", "no_syntax_error_reward", {"value": 0.2}, SNIPPETS, no_syntax_error
    yield "code_generation", library, "named", "code_generation_reward", {}, PROGRAM_ROWS[:30], code_generation
    yield "repetition_share", "004.txt", "named", "repetition penalty", {"ngram": 3, "max_penalty": -0.3}, REPEATED, repetition_share
    yield "group_diversity", "003.txt", "named", "diversity penalty", {}, GROUPS, group_diversity
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
