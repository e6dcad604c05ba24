"""Measures the configurations in configs/examples/guides, and prints the table of docs/from-trl.md.

    python benches/guides.py --hone target/release/hone --model models-local/smollm2 --steps 5

`seconds` and `peak memory` are measured with the given model over some steps of each configuration: the
median time between two steps, and the resident memory of the process. The other columns are what
`hone train --explain-memory` plans for the given model and for models with the shapes of Qwen2.5-0.5B
and Qwen2.5-1.5B in bfloat16, of which only the shapes are written, as files without content.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
from pathlib import Path

FOLDER = Path("configs/examples/guides")

# hidden size, layers, heads, key-value heads, size of the MLP
SHAPES = {"0.5 B": (896, 24, 14, 2, 4864), "1.5 B": (1536, 28, 12, 2, 8960)}
VOCABULARY = 151_936

# Bounds the plan, whose samples are as long as the context otherwise. No completion here is longer.
LONGEST = {"HONE_TRAIN_MAX_TOKENS": "2048"}


def write_shape(folder: Path, tokenizer: Path, shape: tuple[int, ...]) -> None:
    """Writes a Qwen2 directory whose weights are a hole in a file."""
    hidden, layers, heads, key_heads, inner = shape
    head = hidden // heads
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }
    tensors = {"model.embed_tokens.weight": [VOCABULARY, hidden], "model.norm.weight": [hidden]}
    for layer in range(layers):
        name = f"model.layers.{layer}"
        tensors[f"{name}.input_layernorm.weight"] = [hidden]
        tensors[f"{name}.post_attention_layernorm.weight"] = [hidden]
        for part, rows in [("q", heads * head), ("k", key_heads * head), ("v", key_heads * head)]:
            tensors[f"{name}.self_attn.{part}_proj.weight"] = [rows, hidden]
            tensors[f"{name}.self_attn.{part}_proj.bias"] = [rows]
        tensors[f"{name}.self_attn.o_proj.weight"] = [hidden, heads * head]
        for part in ("gate", "up"):
            tensors[f"{name}.mlp.{part}_proj.weight"] = [inner, hidden]
        tensors[f"{name}.mlp.down_proj.weight"] = [hidden, inner]
    header, end = {}, 0
    for name, size in tensors.items():
        start, end = end, end + 2 * size[0] * (size[1] if len(size) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": size, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    folder.mkdir()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / name)


def planned(command: list[str], model: Path, folder: Path) -> str:
    """The peak of `--explain-memory`, in GiB."""
    arguments = [*command, "--model", str(model), "--data", str(folder), "--explain-memory", "--json"]
    environment = {**os.environ, **LONGEST}
    shown = subprocess.run(
        arguments, check=True, capture_output=True, text=True, env=environment
    ).stdout
    return f"{json.loads(shown)['peak'] / 2**30:.1f}"


def measured(command: list[str], model: Path, folder: Path, steps: int) -> tuple[str, str]:
    """Seconds of a step, and the peak memory in GiB."""
    evaluation = {"HONE_RUN_EVAL_PROMPTS": "1", "HONE_RUN_EVAL_SAMPLES": "1"}
    environment = {**os.environ, **LONGEST, **evaluation}
    arguments = [*command, "--model", str(model), "--data", str(folder), "--steps", str(steps)]
    with open(folder / "output.txt", "wb") as output:
        child = subprocess.Popen(arguments, env=environment, stdout=output, stderr=output)
        _, status, usage = os.wait4(child.pid, 0)
    if status != 0:
        raise SystemExit((folder / "output.txt").read_text())
    lines = (folder / "run/steps.jsonl").read_text().splitlines()
    times = [json.loads(line)["time_ms"] / 1000 for line in lines]
    seconds = statistics.median(b - a for a, b in zip(times, times[1:]))
    return f"{seconds:.1f}", f"{usage.ru_maxrss / 2**20:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hone", required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    columns = ["configuration", "seconds per step", "peak memory, GiB", f"planned, {arguments.model.name}"]
    columns += [f"planned, {size}" for size in SHAPES]
    print(f"| {' | '.join(columns)} |")
    print("| --- " * len(columns) + "|")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for size, shape in SHAPES.items():
            write_shape(folder / size, arguments.model, shape)
        for file in sorted(FOLDER.glob("*.toml")):
            command = [arguments.hone, "train", "--config", str(file)]
            data = folder / "data"
            data.mkdir()
            row = [f"[{file.name}](../{file})"]
            row += measured(command, arguments.model, data, arguments.steps)
            for model in [arguments.model, *(folder / size for size in SHAPES)]:
                row.append(planned(command, model, data))
            shutil.rmtree(data)
            print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
