"""Writes lm_eval.json: a log-likelihood task of lm-evaluation-harness on the built-in model, once by transformers and
once by each engine of Hone over /v1/completions.

    python tests/reference/lm_eval/compare.py target/release/hone

Needs the pinned torch and transformers, and lm-eval 0.4.13 with its extra `api`. The task has 100 sums with four answers each.
"""

import json
import os
import pathlib
import random
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from importlib.metadata import version

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
from lm_eval import simple_evaluate  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
from provenance import made_by, model_files  # noqa: E402

MODEL = HERE.parents[2] / "models" / "embedded"
TASK = """task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{right}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


def write_task(folder):
    rng = random.Random(7)
    rows = []
    for _ in range(100):
        a, b = rng.randrange(50), rng.randrange(50)
        wrong = rng.sample([n for n in range(max(0, a + b - 12), a + b + 12) if n != a + b], 3)
        choices = [f"{n}</reasoning>" for n in [a + b, *wrong]]
        rng.shuffle(choices)
        chat = f"<|im_start|>user\nWhat is {a} + {b}?<|im_end|>\n<|im_start|>assistant\n"
        right = choices.index(f"{a + b}</reasoning>")
        row = {"question": f"{chat}<reasoning>{a} + {b} = ", "choices": choices, "right": right}
        rows.append(json.dumps(row))
    data = folder / "sums.jsonl"
    data.write_text("\n".join(rows))
    (folder / "sums.yaml").write_text(TASK.format(data=data))


def evaluate(model, arguments, folder):
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = simple_evaluate(model=model, model_args=arguments, tasks=["sums"], task_manager=manager, batch_size=8)
    samples = sorted(found["samples"]["sums"], key=lambda sample: sample["doc_id"])
    logprobs = [float(choice[0][0]) for sample in samples for choice in sample["resps"]]
    greedy = [bool(choice[0][1]) for sample in samples for choice in sample["resps"]]
    return found["results"]["sums"]["acc,none"], logprobs, greedy


def serve(hone, backend, data, folder):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [hone, "serve", "--backend", backend, "--bind", f"127.0.0.1:{port}", "--data", str(data)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        try:
            url = f"http://127.0.0.1:{port}"
            for _ in range(600):
                try:
                    urllib.request.urlopen(f"{url}/readyz").close()
                    break
                except OSError:
                    time.sleep(0.1)
            arguments = f"model=default,base_url={url}/v1/completions,tokenizer={MODEL},num_concurrent=4"
            return evaluate("local-completions", arguments, folder)
        finally:
            server.terminate()


def main():
    hone = sys.argv[1]
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        write_task(folder)
        accuracy, wanted, wanted_greedy = evaluate("hf", f"pretrained={MODEL},dtype=float32,device=cpu", folder)
        harness = version("lm_eval")
        content = {"made_by": made_by("transformers", files=model_files(MODEL)), "lm_eval": harness, "transformers": {"accuracy": accuracy}}
        for backend in ("native", "mistralrs"):
            found, logprobs, greedy = serve(hone, backend, folder / backend, folder)
            worst = max(abs(a - b) for a, b in zip(wanted, logprobs, strict=True))
            content[backend] = {"accuracy": found, "worst_difference": float(f"{worst:.2g}")}
            assert found == accuracy and worst < 1e-3 and greedy == wanted_greedy, content
    (HERE / "lm_eval.json").write_text(json.dumps(content, indent=1) + "\n")
    print(content)


if __name__ == "__main__":
    main()
