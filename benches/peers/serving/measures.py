"""Prompts, and what the answers to them say about speed: functions without side effects."""

import random
import statistics

# Each is one token of most vocabularies when a space is before it.
WORDS = ("time year people way day man thing woman life child world school state family student group "
         "country problem hand part place case week company system program question work government "
         "number night point home water room mother area money story fact month lot right study book "
         "eye job word business issue side kind head house service friend father power hour game line "
         "end member law car city community name president team minute idea body information").split()

# Tokens of the chat template around a user's message, of SmolLM2's with its system message.
TEMPLATE_TOKENS = 30
# Words at the end of prompts with a shared prefix, which differ.
ENDING_WORDS = 17


def words(count, seed):
    generator = random.Random(seed)
    return " ".join(generator.choice(WORDS) for _ in range(count))


def prompt(tokens, seed):
    """A conversation of about `tokens` tokens that begins differently for every seed."""
    return [{"role": "user", "content": words(tokens - TEMPLATE_TOKENS, seed)}]


def prompts_with_prefix(tokens, seed):
    """Two conversations of about `tokens` tokens that differ in their last `ENDING_WORDS` words only."""
    shared = words(tokens - TEMPLATE_TOKENS - ENDING_WORDS, seed)
    # Random endings may begin with the same word.
    endings = [words(ENDING_WORDS - 1, f"{seed}, ending {i}") for i in range(2)]
    return [[{"role": "user", "content": f"{shared} {mark} {ending}"}]
            for mark, ending in zip(("first", "second"), endings)]


def total_rate(answers):
    """Tokens per second of all answers together, from the first request to the last token, prompts included."""
    span = max(a.last for a in answers) - min(a.sent for a in answers)
    return sum(a.tokens for a in answers) / span


def decode_rate(answers):
    """Tokens per second while every request decodes: from the last one's first token to the first one's last.

    If less than a third of the tokens come in that time, because the engine answers one request after the
    other, the rate while any request decodes.
    """
    begin, end = max(a.first for a in answers), min(a.last for a in answers)
    # A piece of text can have several tokens.
    weights = [a.tokens / len(a.times) for a in answers]
    within = sum(weight * sum(begin < t <= end for t in a.times) for a, weight in zip(answers, weights))
    if end > begin and 3 * within >= sum(a.tokens for a in answers):
        return within / (end - begin)
    span = covered([(a.first, a.last) for a in answers])
    tokens = sum(weight * (len(a.times) - 1) for a, weight in zip(answers, weights))
    return tokens / span if span else None


def covered(intervals):
    """The length of the union of intervals."""
    length, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        length += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return length


def bytes_per_token(tensors):
    """Bytes of weights that one decoded token reads, of pairs of a GGUF tensor's name and its bytes.

    One row of the input embedding is read. If it is also the output matrix, all of it is.
    """
    names = {name for name, _ in tensors}
    embedding = "token_embd.weight" if "output.weight" in names else None
    return sum(size for name, size in tensors if name != embedding)


def bound_share(rate, size, bandwidth):
    """The share of the memory bound that `rate` tokens per second of one sequence are.

    The bound is `bandwidth`, in bytes per second, over `size`, the bytes that a token reads.
    """
    return rate * size / bandwidth


def ratios(above, below):
    """Ratio in each turn."""
    return [a / b for a, b in zip(above, below)]


def middle(values):
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None
