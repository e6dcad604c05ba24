"""The modules that PEFT adapts, with their ranks and scales: tests/reference/peft/peft_rules.json.

Each case has LoraConfig's arguments as JSON and the result of `get_peft_model` with them on
tests/fixtures/qwen2-tiny. Run from the repository root, with torch, transformers and peft:
    python tests/reference/peft/make_peft_rules.py
"""

import json
import pathlib
import sys

from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
from provenance import made_by  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent
BASE = HERE.parents[1] / "fixtures" / "qwen2-tiny"
ALL = {"target_modules": "all-linear"}
CASES = [
    {"r": 4, "lora_alpha": 8, **ALL},
    {"r": 4, "lora_alpha": 8, "use_rslora": True, **ALL},
    {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "mlp.down_proj"]},
    {"r": 4, "lora_alpha": 8, "target_modules": ["layers.1.self_attn.o_proj", "up_proj"]},
    {"r": 4, "lora_alpha": 8, "target_modules": "model\\.layers\\.[01]\\.self_attn\\.(q|v)_proj"},
    {"r": 4, "lora_alpha": 8, "target_modules": ".*(gate|o)_proj"},
    {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "layers_to_transform": 1},
    {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["model.layers.0.mlp.up_proj", "k_proj"],
        "layers_to_transform": [1],
    },
    {"r": 4, "lora_alpha": 8, "exclude_modules": ["o_proj", "layers.0.mlp.up_proj"], **ALL},
    {"r": 4, "lora_alpha": 8, "exclude_modules": ".*\\.1\\.mlp.*", **ALL},
    {
        "r": 4,
        "lora_alpha": 8,
        "rank_pattern": {"q_proj": 2, "layers\\.1\\..*": 6, "self_attn.k_proj": 3},
        "alpha_pattern": {"layers.0.mlp.down_proj": 1.5, "proj": 99, ".*_proj": 12},
        **ALL,
    },
    {
        "r": 4,
        "lora_alpha": 8,
        "use_rslora": True,
        "rank_pattern": {"^model.layers.0.self_attn.q_proj": 9, "z": 1, "layers\\.\\d+\\.mlp\\.\\w+": 16},
        "alpha_pattern": {"^q_proj": 3, "down_proj|up_proj": 5},
        **ALL,
    },
    # Of two patterns that match, the first in the object applies, not the first in the alphabet.
    {"r": 4, "lora_alpha": 8, "rank_pattern": {"q_proj": 2, "layers.1.self_attn.q_proj": 5}, **ALL},
]


def main() -> None:
    origin = made_by("peft", "torch", "transformers", files=[BASE / "config.json"])
    rows = []
    for case in CASES:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(BASE))
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **case)).base_model.model
        modules = {}
        for name, module in model.named_modules():
            if hasattr(module, "lora_A"):
                modules[name] = [module.r["default"], module.scaling["default"]]
        rows.append({"config": {"peft_type": "LORA", **case}, "modules": modules})
    text = ",\n".join(json.dumps(row) for row in rows)
    text = f'{{"made_by": {json.dumps(origin)},\n"cases": [\n{text}\n]}}\n'
    (HERE / "peft_rules.json").write_text(text)


if __name__ == "__main__":
    main()
