"""Gradients of a wide model's adapter by PyTorch: tests/reference/learning/wide_cases.json.

The trainer runs one shard at a time on all threads from a hidden size of 512. The model here is a
Qwen2 of transformers with an adapter of PEFT, in float64. Its weights are a hash of their names and
indices, which crates/train/src/testing.rs computes too, so that no weights are stored. Of a tensor's
gradient the file has the norm, its products with four directions, and some entries. Needs torch,
transformers >= 5, peft. Run from the repository root:
    python tests/reference/learning/make_wide_cases.py
"""

import json
import math
import pathlib
import sys

import peft
import torch
import transformers
from make_learning_cases import clipped_loss

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
from provenance import made_by  # noqa: E402

OUT = pathlib.Path(__file__).resolve().parent / "wide_cases.json"
CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 96,
    "hidden_size": 512,
    "intermediate_size": 640,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
RANK, ALPHA = 2, 4.0
LOSS, BETA, LOW, HIGH = "grpo", 0.1, 0.2, 0.28
DIRECTIONS, ENTRIES = 4, 8
MASK = 0xFFFFFFFF


def hashed(name: str, count: int) -> torch.Tensor:
    """Values in [-1, 1): a hash of 32 bits of the name (FNV-1a) and the index (lowbias32)."""
    seed = 0x811C9DC5
    for byte in name.encode():
        seed = (seed ^ byte) * 0x01000193 & MASK
    x = (torch.arange(count, dtype=torch.int64) + seed) & MASK
    for shift, factor in [(16, 0x7FEB352D), (15, 0x846CA68B)]:
        x = ((x ^ (x >> shift)) * factor) & MASK
    return (x ^ (x >> 16)).double() / 2**31 - 1


def initial(name: str, shape: torch.Size) -> torch.Tensor:
    values = hashed(name, math.prod(shape)).reshape(shape)
    if "norm" in name:
        return 1 + 0.2 * values
    if "lora_B" in name or name.endswith("bias"):
        return 0.1 * values
    return values * math.sqrt(3 / shape[-1])


def make_model() -> torch.nn.Module:
    config = transformers.Qwen2Config(**CONFIG, dtype="float64", attn_implementation="eager")
    lora = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear")
    model = peft.get_peft_model(transformers.Qwen2ForCausalLM(config).double(), lora).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            name = name.replace(".default", "").replace(".base_layer", "")
            if "lora_" not in name:
                name = name.removeprefix("base_model.model.")
            parameter.copy_(initial(name, parameter.shape))
    return model


def make_samples() -> list[dict]:
    def ids(name: str, count: int) -> list[int]:
        return [int((x + 1) / 2 * CONFIG["vocab_size"]) for x in hashed(name, count)]

    prompts = [ids("prompt 0", 24), ids("prompt 1", 17)]
    return [
        {
            "prompt_ids": prompts[index % 2],
            "ids": ids(f"completion {index}", length),
            "temperature": [1.0, 0.75, 1.25][index % 3],
            "advantage": [1.5, -0.75, 0.5, -1.25][index % 4],
        }
        for index, length in enumerate([19, 7, 1, 30, 12, 23, 16, 9])
    ]


def logprobs(model: torch.nn.Module, sample: dict) -> torch.Tensor:
    prompt, ids = sample["prompt_ids"], sample["ids"]
    logits = model(input_ids=torch.tensor([prompt + ids])).logits[0]
    logits = logits[len(prompt) - 1 : -1] / sample["temperature"]
    return torch.log_softmax(logits, dim=-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]


def main() -> None:
    model, samples = make_model(), make_samples()
    length = max(len(sample["ids"]) for sample in samples)

    def padded(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([torch.nn.functional.pad(x, (0, length - len(x))) for x in rows])

    own = [logprobs(model, sample) for sample in samples]
    with torch.no_grad(), model.disable_adapter():
        reference = [logprobs(model, sample) for sample in samples]
    for index, (sample, logp) in enumerate(zip(samples, own)):
        # Ratios on both sides of both clip bounds, exact in float32.
        shift = 0.4 * hashed(f"recorded {index}", len(logp))
        sample["logprobs"] = (logp.detach() + shift).float().tolist()
    loss, ratio, _ = clipped_loss(
        LOSS,
        (BETA, LOW, HIGH),
        padded(own),
        padded([torch.tensor(sample["logprobs"]) for sample in samples]),
        padded(reference),
        torch.tensor([sample["advantage"] for sample in samples]),
        padded([torch.ones(len(x)) for x in own]),
        length,
    )
    loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        flat = parameter.grad.flatten()
        step = len(flat) // ENTRIES
        gradients[name.replace(".default", "")] = {
            "norm": flat.norm().item(),
            "products": [
                (flat @ hashed(f"direction {i}", len(flat))).item() for i in range(DIRECTIONS)
            ],
            "entries": flat[::step][:ENTRIES].tolist(),
        }
    cut = [(ratio < 1 - LOW).sum().item(), (ratio > 1 + HIGH).sum().item()]
    assert min(cut) > 5, cut
    case = {
        "made_by": made_by("peft", "torch", "transformers"),
        "config": CONFIG,
        "lora": {"r": RANK, "alpha": ALPHA},
        "settings": {"loss": LOSS, "beta": BETA, "clip_low": LOW, "clip_high": HIGH},
        "samples": samples,
        "loss": loss.item(),
        "gradients": gradients,
    }
    OUT.write_text(json.dumps(case) + "\n")


if __name__ == "__main__":
    main()
