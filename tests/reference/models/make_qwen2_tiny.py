"""Makes tests/fixtures/qwen2-tiny and transformers' results for it.

The directory is the unchanged output of transformers 5 (`save_pretrained`), so that tests read the
files that users have. Weights are random, from a fixed seed. Biases and norms are random too, so that
a test finds a forward pass without one of them.

Needs torch, transformers >= 5, tokenizers, safetensors. Run from the repository root:
    python tests/reference/models/make_qwen2_tiny.py
"""

import json
import pathlib
import sys

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
from provenance import made_by, model_files  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
OUT = ROOT / "fixtures" / "qwen2-tiny"
HERE = pathlib.Path(__file__).resolve().parent

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
CORPUS = [f"What is {a} plus {b}? The answer is {a + b}." for a in range(20) for b in range(20)]


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=280,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[AddedToken("<|im_start|>", special=True)],
        chat_template=CHAT_TEMPLATE,
        model_max_length=256,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    torch.manual_seed(20)
    config = Qwen2Config(
        vocab_size=288,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        dtype="float32",
    )
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            elif "norm" in name:
                parameter.normal_(1.0, 0.2)
    model.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=[
            tokenizer.convert_tokens_to_ids("<|im_end|>"),
            tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        ],
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
    )
    return model


def main() -> None:
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    OUT.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(OUT)
    tokenizer.save_pretrained(OUT)

    torch.manual_seed(21)
    ids = torch.randint(0, model.config.vocab_size, (3, 17))
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    save_file(
        {"ids": ids.to(torch.int64), "logits": logits.contiguous()},
        HERE / "qwen2_tiny_logits.safetensors",
    )

    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 3 plus 4?"}],
        add_generation_prompt=True,
        return_dict=False,
    )
    greedy = model.generate(
        torch.tensor([chat]), attention_mask=torch.ones(1, len(chat)), max_new_tokens=16
    )[0, len(chat) :].tolist()
    packages = ("safetensors", "tokenizers", "torch", "transformers")
    files = [*model_files(OUT), HERE / "qwen2_tiny_logits.safetensors"]
    origin = made_by(*packages, files=files)
    case = {"user": "What is 3 plus 4?", "prompt_ids": chat, "greedy_ids": greedy}
    (HERE / "qwen2_tiny_greedy.json").write_text(json.dumps({"made_by": origin, **case}) + "\n")


if __name__ == "__main__":
    main()
