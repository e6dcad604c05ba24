"""Loads Hone's exports with peft and transformers, and compares logits.

    HONE_TEST_EXPORT_DIR=DIR cargo test --release -p hone-model an_export_for_python -- --ignored
    python tests/clients/check_export.py --base tests/fixtures/qwen2-tiny --expected DIR/expected.safetensors \
        --adapter DIR/adapter --merged DIR/merged --merged DIR/merged-f32

Compares, all in float32: the base with the adapter in peft, every merged directory in transformers
alone, and, with `--expected`, Hone's own logits (`logits` [batch, time, vocab] of `ids` [batch, time]).
Needs torch, transformers >= 5, peft. Prints the largest differences. Exits with 0 and a last line
`ok: ...` if all are below `--tolerance` while the adapter moves logits by far more, else with 1 and
`failed: ...`. DIR is an absolute path.
"""

import argparse
import json
import pathlib
import sys

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def logits(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits.float()


def load(path: pathlib.Path) -> torch.nn.Module:
    model, info = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, output_loading_info=True
    )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[problem]:
            raise SystemExit(f"failed: {path}: {problem} {sorted(info[problem])}")
    return model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=pathlib.Path, required=True)
    parser.add_argument("--adapter", type=pathlib.Path, required=True)
    parser.add_argument("--merged", type=pathlib.Path, action="append", required=True)
    parser.add_argument("--expected", type=pathlib.Path)
    parser.add_argument("--tolerance", type=float, default=1e-4)
    arguments = parser.parse_args()

    base = load(arguments.base)
    if arguments.expected:
        case = load_file(arguments.expected)
        ids = case["ids"].long()
    else:
        case = {}
        vocabulary = base.config.vocab_size
        ids = (torch.arange(3 * 16).reshape(3, 16) * 7919 + 11) % vocabulary
    plain = logits(base, ids)
    adapted = PeftModel.from_pretrained(base, arguments.adapter)
    config = json.loads((arguments.adapter / "adapter_config.json").read_text())
    ranks = sorted({module.r["default"] for module in adapted.modules() if hasattr(module, "lora_A")})
    reference = logits(adapted, ids)
    found = {"peft": reference}
    for path in arguments.merged:
        found[str(path.name)] = logits(load(path), ids)
        AutoTokenizer.from_pretrained(path)
    if case:
        found["hone"] = case["logits"].float()

    moved = (reference - plain).abs().max().item()
    print(f"ranks {ranks}, rslora {config.get('use_rslora')}: the adapter moves logits by {moved:.2e}")
    worst = 0.0
    names = list(found)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            difference = (found[one] - found[other]).abs().max().item()
            worst = max(worst, difference)
            print(f"{one} against {other}: {difference:.2e}")
    if worst < arguments.tolerance < moved / 100:
        print(f"ok: largest difference {worst:.2e}")
        return 0
    print(f"failed: largest difference {worst:.2e}, moved {moved:.2e}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
