"""Loads an adapter directory written by Hone with PEFT and compares log-probabilities.

    HONE_TEST_PEFT_DIR=DIR cargo test --release -p hone-train an_adapter_for_python -- --ignored
    python tests/reference/peft/check_peft.py DIR

The test writes the adapter to DIR, an absolute path, and the trainer's results to DIR/expected.json:
{"prompt_ids": [...], "ids": [...], "temperature": T, "logprobs": [...]}. Needs torch, transformers
>= 5, peft. Exits with 1 if the log-probabilities differ by more than 1e-4.
"""

import json
import pathlib
import sys

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

BASE = pathlib.Path(__file__).resolve().parents[2] / "fixtures" / "qwen2-tiny"


def main() -> int:
    directory = pathlib.Path(sys.argv[1])
    base = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, directory).eval()
    case = json.loads((directory / "expected.json").read_text())
    prompt, ids = case["prompt_ids"], case["ids"]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + ids])).logits[0]
        with model.disable_adapter():
            plain = model(input_ids=torch.tensor([prompt + ids])).logits[0]

    def chosen(x: torch.Tensor) -> torch.Tensor:
        x = torch.log_softmax(x[len(prompt) - 1 : -1] / case["temperature"], dim=-1)
        return x.gather(-1, torch.tensor(ids)[:, None])[:, 0]

    expected = torch.tensor(case["logprobs"])
    worst = (chosen(logits) - expected).abs().max().item()
    moved = (chosen(plain) - expected).abs().max().item()
    print(f"largest difference {worst:.2e}; the adapter moves log-probabilities by {moved:.2e}")
    return 0 if worst < 1e-4 < 1e-2 < moved else 1


if __name__ == "__main__":
    sys.exit(main())
