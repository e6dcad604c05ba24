"""Makes tests/fixtures/families/NAME: one tiny random model per decoder family and variant.

Each directory is the output of transformers 5 (`save_pretrained` of model and tokenizer), with

* `logits.safetensors`: `ids` [2, 40], `logits` [2, 40, vocab] of eager attention in f32, and the
  rotary embedding's `inv_freq`;
* `greedy.json`: a prompt's ids, the 16 ids that greedy decoding adds, the smallest margin between the
  best and the second-best logit of these steps, and the entry `made_by` of `provenance.py`.

Weights are random from a fixed seed. Biases and norms are random too, so that a test finds a forward
pass without one of them. Sliding windows (24) are shorter than the 40 tokens of the logits, but not
shorter than prompt and greedy completion together. The factors of rotary scaling have an effect at
this length.

Needs torch, transformers >= 5, tokenizers, safetensors. Run from the repository root:
    python tests/reference/models/make_families.py
"""

import json
import pathlib
import shutil
import sys

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import GenerationConfig, PreTrainedTokenizerFast

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
from provenance import made_by, model_files  # noqa: E402

OUT = pathlib.Path(__file__).resolve().parents[2] / "fixtures" / "families"
WINDOW = 24
VOCAB = 112

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 7.0],
}

# name: (class prefix, options, dtype of the files, size of a shard)
MODELS = {
    "qwen2": (
        "Qwen2",
        {
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 2,
            "tie_word_embeddings": True,
        },
        torch.float32,
        None,
    ),
    "qwen3": ("Qwen3", {"head_dim": 12, "tie_word_embeddings": False}, torch.float32, None),
    "llama2": ("Llama", {"tie_word_embeddings": False}, torch.float32, "40KB"),
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}, torch.bfloat16, None),
    "llama-biases": (
        "Llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
            "tie_word_embeddings": False,
        },
        torch.float32,
        None,
    ),
    "mistral": (
        "Mistral",
        {"head_dim": 16, "sliding_window": WINDOW, "tie_word_embeddings": False},
        torch.float16,
        None,
    ),
    "smollm3": (
        "SmolLM3",
        {"num_hidden_layers": 4, "no_rope_layer_interval": 2, "tie_word_embeddings": True},
        torch.float32,
        None,
    ),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 20,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
        torch.float32,
        None,
    ),
    "phi3": ("Phi3", {"sliding_window": WINDOW, "tie_word_embeddings": False}, torch.float32, None),
    "phi3-longrope": (
        "Phi3",
        {
            "rope_parameters": LONGROPE,
            # mistral.rs derives the attention factor from this, and needs multiples of 512.
            "max_position_embeddings": 512,
            "original_max_position_embeddings": 64,
            "tie_word_embeddings": True,
        },
        torch.bfloat16,
        None,
    ),
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes of printable ASCII and the line feed, and a few merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    printable = [chr(code) for code in range(33, 127)]
    trainer = BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=[*printable, "\u0120", "\u010a"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["user", "assistant", "What is the answer?"] * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[AddedToken("<|im_start|>", special=True)],
        chat_template=CHAT_TEMPLATE,
        model_max_length=256,
    )


def make_model(prefix: str, options: dict, dtype: torch.dtype, seed: int):
    """The model in f32 with weights that `dtype` holds exactly."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{prefix}Config")(**{**COMMON, **options})
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    # Gemma's norms multiply by 1 + weight.
    centre = 0.0 if prefix == "Gemma2" else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            elif "norm" in name:
                parameter.normal_(centre, 0.2)
            elif "embed" in name and prefix == "Gemma2":
                # Scaled by sqrt(hidden) and tied, it would dominate the output of the blocks.
                parameter.mul_(0.3)
            parameter.copy_(parameter.to(dtype).float())
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=[2, 0], pad_token_id=0)
    return model


def greedy(model, prompt: list[int]) -> dict:
    ids, margin = list(prompt), float("inf")
    with torch.no_grad():
        for _ in range(16):
            best = model(input_ids=torch.tensor([ids])).logits[0, -1].topk(2)
            margin = min(margin, (best.values[0] - best.values[1]).item())
            ids.append(best.indices[0].item())
    return {"prompt_ids": prompt, "greedy_ids": ids[len(prompt) :], "margin": margin}


def make(name: str, seed: int, tokenizer: PreTrainedTokenizerFast) -> None:
    prefix, options, dtype, shard = MODELS[name]
    model = make_model(prefix, options, dtype, seed)
    torch.manual_seed(seed)
    ids = torch.randint(3, VOCAB, (2, 40))
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    inv_freq = model.model.rotary_emb.inv_freq.clone()
    answer = greedy(model, ids[1, :8].tolist())

    directory = OUT / name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    model.to(dtype).save_pretrained(directory, **({"max_shard_size": shard} if shard else {}))
    tokenizer.save_pretrained(directory)
    save_file(
        {"ids": ids, "logits": logits.contiguous(), "inv_freq": inv_freq},
        directory / "logits.safetensors",
    )
    files = [*model_files(directory), directory / "logits.safetensors"]
    packages = ("safetensors", "tokenizers", "torch", "transformers")
    answer["made_by"] = made_by(*packages, files=files)
    (directory / "greedy.json").write_text(json.dumps(answer) + "\n")
    print(name, answer["margin"], logits.abs().max().item())


def main() -> None:
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    for seed, name in enumerate(MODELS, start=40):
        make(name, seed, tokenizer)


if __name__ == "__main__":
    main()
