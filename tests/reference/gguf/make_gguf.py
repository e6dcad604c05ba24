"""Makes tests/fixtures/gguf/NAME.gguf from the tiny models of tests/fixtures, and gguf_cases.json.

The files are what llama.cpp's convert_hf_to_gguf.py makes of the same models: names from gguf's own
table, rows of queries and keys permuted for the architectures that rotate pairs of neighbours, 1 added
to Gemma's norms, rotary factors as tensors. `llama-k` is no model of tests/fixtures: gguf cannot
quantize to Q4_K and Q6_K, so its blocks are random.

`llama-spm` has a tokenizer that SentencePiece trains here, and random blocks too.

gguf_cases.json has the SHA-256 of every matrix of the quantized files, dequantized by gguf, in f32 and
with its rows in Hugging Face's order; and the ids that SentencePiece encodes texts to. gguf_logits.safetensors has transformers' logits of the
quantized models with these dequantized weights.

Needs gguf, numpy, safetensors, sentencepiece, torch, transformers. Run from the repository root:
    python tests/reference/gguf/make_gguf.py
"""

import hashlib
import io
import json
import math
import pathlib
import sys

import numpy as np
import sentencepiece
from gguf import (
    GGML_QUANT_SIZES,
    MODEL_ARCH,
    GGMLQuantizationType as Type,
    GGUFWriter,
    get_tensor_name_map,
)
from gguf.quants import dequantize, quantize

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
from provenance import made_by, model_files  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent
FIXTURES = HERE.parents[1] / "fixtures"
OUT = FIXTURES / "gguf"

ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA,
    "mistral": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
    "gemma2": MODEL_ARCH.GEMMA2,
    "phi3": MODEL_ARCH.PHI3,
    "smollm3": MODEL_ARCH.SMOLLM3,
}
PERMUTED = ("llama", "mistral", "smollm3")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

# name: (model directory, type of matrices whose rows are whole blocks)
FILES = {
    "llama2-f32": ("families/llama2", Type.F32),
    "llama3-bf16": ("families/llama3", Type.BF16),
    "mistral-f16": ("families/mistral", Type.F16),
    "qwen3-f32": ("families/qwen3", Type.F32),
    "gemma2-f32": ("families/gemma2", Type.F32),
    "phi3-f32": ("families/phi3", Type.F32),
    "phi3-longrope-bf16": ("families/phi3-longrope", Type.BF16),
    "smollm3-f32": ("families/smollm3", Type.F32),
    "qwen2-f32": ("qwen2-tiny", Type.F32),
    "qwen2-q8_0": ("qwen2-tiny", Type.Q8_0),
    "llama2-q4_0": ("families/llama2", Type.Q4_0),
    "qwen2-q4_1": ("qwen2-tiny", Type.Q4_1),
}
QUANTIZED = ("qwen2-q8_0", "llama2-q4_0", "qwen2-q4_1", "llama-k")


def read_safetensors(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """All tensors in f32, also those in bf16, which numpy lacks."""
    tensors = {}
    for path in sorted(folder.glob("model*.safetensors")):
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8 : 8 + size]).items():
            if name == "__metadata__":
                continue
            start, end = entry["data_offsets"]
            raw = data[8 + size + start : 8 + size + end]
            if entry["dtype"] == "BF16":
                values = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
            else:
                dtype = {"F32": np.float32, "F16": np.float16}[entry["dtype"]]
                values = np.frombuffer(raw, dtype).astype(np.float32)
            tensors[name] = values.reshape(entry["shape"])
    return tensors


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of heads of two halves as heads of pairs."""
    rows = weight.shape[0]
    parts = weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:])
    return parts.swapaxes(1, 2).reshape(weight.shape)


def unpermuted(weight: np.ndarray, heads: int) -> np.ndarray:
    rows = weight.shape[0]
    parts = weight.reshape(heads, rows // heads // 2, 2, *weight.shape[1:])
    return parts.swapaxes(1, 2).reshape(weight.shape)


def heads_of(name: str, config: dict) -> int | None:
    """The heads of a weight whose rows the converter permutes."""
    if config["model_type"] not in PERMUTED:
        return None
    if ".q_proj." in name:
        return config["num_attention_heads"]
    return config["num_key_value_heads"] if ".k_proj." in name else None


def llama3_factors(config: dict, rope: dict) -> np.ndarray:
    dim = config["head_dim"]
    low, high = (rope["original_max_position_embeddings"] / rope[f"{end}_freq_factor"] for end in ("low", "high"))
    factors = []
    for i in range(0, dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / dim)
        if wavelength < high:
            factors.append(1.0)
        elif wavelength > low:
            factors.append(rope["factor"])
        else:
            smooth = rope["original_max_position_embeddings"] / wavelength - rope["low_freq_factor"]
            smooth /= rope["high_freq_factor"] - rope["low_freq_factor"]
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)


def add_settings(writer: GGUFWriter, config: dict) -> None:
    rope = config["rope_parameters"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_vocab_size(config["vocab_size"])
    if config.get("head_dim"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if config["model_type"] == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config["model_type"] in ("gemma2", "phi3") and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(config, rope))
    elif rope["rope_type"] == "longrope":
        original = config["original_max_position_embeddings"]
        scale = config["max_position_embeddings"] / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
        for kind in ("long", "short"):
            factors = np.array(rope[f"{kind}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{kind}.weight", factors)


def add_tokenizer(writer: GGUFWriter, folder: pathlib.Path, vocab_size: int) -> None:
    """The byte-level tokenizer of a model directory."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokens = {id: token for token, id in tokenizer["model"]["vocab"].items()}
    added = {entry["id"]: entry["content"] for entry in tokenizer["added_tokens"]}
    kind = lambda id: CONTROL if id in added else NORMAL if id in tokens else UNUSED  # noqa: E731
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([added.get(i, tokens.get(i, f"[PAD{i}]")) for i in range(vocab_size)])
    writer.add_token_types([kind(i) for i in range(vocab_size)])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template((folder / "chat_template.jinja").read_text())


def train_sentence_piece() -> sentencepiece.SentencePieceProcessor:
    """A tokenizer with the settings of Llama 2's."""
    model, corpus = io.BytesIO(), []
    for name in ("dog", "café", "mouse", "naïve fox"):
        corpus += [f"The  {name} said: what is {n} plus {n + 3}?\nIt's {2 * n + 3}." for n in range(40)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus),
        model_writer=model,
        model_type="bpe",
        vocab_size=352,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        user_defined_symbols=["<|user|>"],
        num_threads=1,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def add_sentence_piece(writer: GGUFWriter, tokens: sentencepiece.SentencePieceProcessor) -> None:
    kinds = []
    for id in range(len(tokens)):
        known = {0: UNKNOWN, 1: CONTROL, 2: CONTROL, tokens.piece_to_id("<|user|>"): USER_DEFINED}
        kinds.append(BYTE if tokens.is_byte(id) else known.get(id, NORMAL))
    writer.add_tokenizer_model("llama")
    writer.add_token_list([tokens.id_to_piece(id) for id in range(len(tokens))])
    writer.add_token_scores([tokens.get_score(id) for id in range(len(tokens))])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(True)
    writer.add_chat_template(
        "{{ bos_token }}{% for m in messages %}{{ '<|user|>' + m['content'] }}{% endfor %}"
    )


def stored(weight: np.ndarray, wanted: Type) -> tuple[np.ndarray, Type]:
    """The data in the wanted type, or in F16 where rows are not whole blocks, or F32 for vectors."""
    if weight.ndim == 1:
        return weight.astype(np.float32), Type.F32
    fits = weight.shape[-1] % GGML_QUANT_SIZES[wanted][0] == 0
    dtype = wanted if fits else Type.F16
    return quantize(weight, dtype), dtype


def write(name: str, config: dict, tokenizer, tensors: dict) -> dict:
    """Writes a file of tensors, each data and type in Hugging Face's order. Returns them as f32."""
    arch = ARCHITECTURES[config["model_type"]]
    names = get_tensor_name_map(arch, config["num_hidden_layers"])
    writer = GGUFWriter(OUT / f"{name}.gguf", {MODEL_ARCH.LLAMA: "llama"}.get(arch, config["model_type"]))
    add_settings(writer, config)
    if isinstance(tokenizer, pathlib.Path):
        add_tokenizer(writer, tokenizer, config["vocab_size"])
    else:
        add_sentence_piece(writer, tokenizer)
    values = {}
    for hf_name, (data, dtype) in tensors.items():
        values[hf_name] = dequantize(data, dtype).astype(np.float32)
        if heads := heads_of(hf_name, config):
            data = permuted(data, heads)
        if config["model_type"] == "gemma2" and hf_name.endswith("norm.weight"):
            data = data + 1
        writer.add_tensor(
            names.get_name(hf_name, try_suffixes=(".weight", ".bias")),
            np.ascontiguousarray(data),
            raw_dtype=dtype,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def random_blocks(rng: np.random.Generator, rows: int, columns: int, dtype: Type) -> np.ndarray:
    """Random blocks whose values are around 0, of the size of a model's weights."""
    values, size = GGML_QUANT_SIZES[dtype]
    blocks = rng.integers(0, 256, (rows, columns // values, size), dtype=np.uint8)
    half = lambda x: np.asarray(x, dtype=np.float16).view(np.uint8)  # noqa: E731
    shape = (rows, columns // values, 1)
    if dtype == Type.Q4_K:
        scale = rng.uniform(1e-4, 4e-4, shape)
        blocks[..., 0:2], blocks[..., 2:4] = half(scale), half(7.5 * scale)
    elif dtype == Type.Q6_K:
        blocks[..., 208:210] = half(rng.uniform(3e-5, 1e-4, shape))
    else:
        blocks[..., 0:2] = half(rng.uniform(2e-4, 1e-3, shape))
    return blocks.reshape(rows, -1)


def make_k() -> tuple[dict, dict]:
    """A llama whose matrices are random blocks."""
    config = json.loads((FIXTURES / "families/llama2/config.json").read_text())
    config |= {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 16}
    config |= {"num_attention_heads": 16, "num_key_value_heads": 2, "tie_word_embeddings": True}
    rng = np.random.default_rng(31)
    layer, k4, k6 = "model.layers.0", Type.Q4_K, Type.Q6_K
    shapes = {
        "model.embed_tokens": (config["vocab_size"], k6),
        f"{layer}.self_attn.q_proj": (256, k4),
        f"{layer}.self_attn.k_proj": (32, k4),
        f"{layer}.self_attn.v_proj": (32, Type.Q8_0),
        f"{layer}.self_attn.o_proj": (256, k4),
        f"{layer}.mlp.gate_proj": (256, k4),
        f"{layer}.mlp.up_proj": (256, k4),
        f"{layer}.mlp.down_proj": (256, k6),
    }
    tensors = {f"{n}.weight": (random_blocks(rng, r, 256, t), t) for n, (r, t) in shapes.items()}
    for norm in ("model.norm", f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"):
        tensors[f"{norm}.weight"] = (rng.normal(1.0, 0.2, 256).astype(np.float32), Type.F32)
    return config, write("llama-k", config, FIXTURES / "families/llama2", tensors)


TEXTS = [
    "The dog said",
    "what is 12 plus 15?",
    " The  café  said:\n\nIt's naïve",
    "mousefox 7",
    "\u6f22 and \U0001f44b",
    "a\tb",
]


def make_sentence_piece() -> list[dict]:
    """A model with a SentencePiece tokenizer. Returns texts and their ids."""
    tokens = train_sentence_piece()
    config = json.loads((FIXTURES / "families/llama2/config.json").read_text())
    config |= {"vocab_size": len(tokens), "num_hidden_layers": 1, "intermediate_size": 32}
    config["tie_word_embeddings"] = True
    rng, layer = np.random.default_rng(33), "model.layers.0"
    rows = {"q_proj": 32, "k_proj": 16, "v_proj": 16, "o_proj": 32}
    rows = {f"{layer}.self_attn.{name}": count for name, count in rows.items()}
    rows |= {f"{layer}.mlp.{name}": 32 for name in ("gate_proj", "up_proj", "down_proj")}
    rows["model.embed_tokens"] = len(tokens)
    kind = Type.Q8_0
    tensors = {f"{n}.weight": (random_blocks(rng, count, 32, kind), kind) for n, count in rows.items()}
    for norm in ("model.norm", f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"):
        tensors[f"{norm}.weight"] = (np.ones(32, dtype=np.float32), Type.F32)
    write("llama-spm", config, tokens, tensors)
    return [{"text": text, "ids": tokens.encode(text), "decoded": tokens.decode(tokens.encode(text))} for text in TEXTS]


def logits(config: dict, values: dict) -> dict:
    """Ids and transformers' logits of a model with these weights."""
    import torch
    import transformers

    prefix = {"llama": "Llama", "qwen2": "Qwen2"}[config["model_type"]]
    options = {key: value for key, value in config.items() if key != "dtype"}
    settings = getattr(transformers, f"{prefix}Config")(**options, dtype="float32")
    settings._attn_implementation = "eager"
    model = getattr(transformers, f"{prefix}ForCausalLM")(settings).eval()
    state = {name: torch.from_numpy(value.copy()) for name, value in values.items()}
    if config["tie_word_embeddings"]:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    torch.manual_seed(32)
    ids = torch.randint(0, config["vocab_size"], (2, 20))
    with torch.no_grad():
        return {"ids": ids, "logits": model(input_ids=ids).logits.contiguous()}


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    models = {"llama-k": make_k()}
    sources = []
    for name, (folder, wanted) in FILES.items():
        folder = FIXTURES / folder
        sources += model_files(folder)
        config = json.loads((folder / "config.json").read_text())
        tensors = {n: stored(t, wanted) for n, t in read_safetensors(folder).items()}
        models[name] = (config, write(name, config, folder, tensors))
    results, cases = {}, {}
    for name in QUANTIZED:
        config, values = models[name]
        digest = lambda value: hashlib.sha256(value.tobytes()).hexdigest()  # noqa: E731
        matrices = {n: digest(v) for n, v in sorted(values.items()) if v.ndim == 2}
        cases[name] = {"config": config, "matrices": matrices}
        results |= {f"{name}.{key}": value for key, value in logits(config, values).items()}
    from safetensors.torch import save_file

    path = HERE / "gguf_logits.safetensors"
    save_file(results, path)
    texts = make_sentence_piece()
    packages = ("gguf", "numpy", "safetensors", "sentencepiece", "torch", "transformers")
    files = [*sorted(set(sources)), *OUT.glob("*.gguf"), path]
    origin = made_by(*packages, files=files)
    text = json.dumps({"made_by": origin, "files": cases, "sentence_piece": texts}, indent=1)
    (HERE / "gguf_cases.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
