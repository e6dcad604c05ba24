"""Writes embedded_greedy.json: the embedded model's greedy completions by transformers.

    python tests/reference/models/embedded_greedy.py

Needs torch, transformers and tokenizers. Prompt ids come directly from tokenizer.json, as in Hone, and
the script checks that transformers' tokenizer returns the same ids. Each case has the smallest margin
between the best and the second-best logit, which shows that no choice was a tie.
"""

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.append(str(Path(__file__).resolve().parents[1]))
from provenance import made_by, model_files  # noqa: E402

MODEL = Path(__file__).resolve().parents[3] / "models" / "embedded"
OUT = Path(__file__).with_name("embedded_greedy.json")
MAX_NEW_TOKENS = 40
LEAST_MARGIN = 1e-3


def user(text):
    return [{"role": "user", "content": text}]


CONVERSATIONS = [
    user("What is 12 + 7?"),
    user("What is 0 + 0?"),
    user("What is 29 + 29?"),
    user("9 + 1 = ?"),
    user("25 + 17 = ?"),
    user("How much is 8 plus 15?"),
    user("How much is 21 plus 6?"),
    user("Add 3 and 28."),
    user("Add 14 and 14."),
    user("Please calculate 19 + 5."),
    user("Please calculate 7 + 11."),
    user("Can you tell me 16 + 26?"),
    user("Can you tell me 2 + 2?"),
    [{"role": "system", "content": "You are a helpful assistant."}] + user("What is 22 + 13?"),
    [{"role": "system", "content": "Be brief."}] + user("Add 10 and 9."),
    user("What is 12 + 7?")
    + [{"role": "assistant", "content": "<reasoning>12 + 7 = 19</reasoning><answer>19</answer>"}]
    + user("What is 4 + 4?"),
    # Not part of its training: every byte must be accepted.
    user("Hello!"),
    user("Wie viel ist 3 + 4? Grüße, 漢字 🎉"),
    user("two\nlines\t<answer>5</answer> and don't panic  "),
    user("1234567890"),
]


def greedy(model, prompt, stop):
    """Greedy ids, stop token included, and the smallest margin of a chosen logit over the next one."""
    ids, margin = list(prompt), float("inf")
    while len(ids) < len(prompt) + MAX_NEW_TOKENS:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
        best = torch.topk(logits, 2)
        margin = min(margin, (best.values[0] - best.values[1]).item())
        ids.append(best.indices[0].item())
        if ids[-1] in stop:
            break
    return ids[len(prompt) :], margin


def main():
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    auto = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    stop = set(model.generation_config.eos_token_id)
    cases = []
    for messages in CONVERSATIONS:
        text = auto.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompt = tokenizer.encode(text, add_special_tokens=False).ids
        own = auto.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        assert prompt == list(own["input_ids"]), text
        ids, margin = greedy(model, prompt, stop)
        assert margin > LEAST_MARGIN, (margin, text)
        cases.append(
            {
                "messages": messages,
                "prompt_ids": prompt,
                "greedy_ids": ids,
                "text": tokenizer.decode(ids, skip_special_tokens=True),
                "margin": round(margin, 4),
            }
        )
    reference = {
        "made_by": made_by("tokenizers", "torch", "transformers", files=model_files(MODEL)),
        "max_tokens": MAX_NEW_TOKENS,
        "cases": cases,
    }
    OUT.write_text(json.dumps(reference, ensure_ascii=False, indent=1) + "\n")
    for case in cases:
        print(f"{case['margin']:8.3f}  {case['messages'][-1]['content']!r} -> {case['text']!r}")


if __name__ == "__main__":
    main()
