"""A whole GRPO step of TRL and of Hone, on the same model directory and prompts, in one run.

    python benches/peers/trl_step.py --hone target/release/hone --model models/embedded

A step samples groups of completions, scores them, trains on them and activates the new policy. TRL
samples with transformers' `generate` and scores with the two functions below. Hone runs `hone train`
with two rewards of the same kind, and its step ends with the new version written, checked and active in
its sampler. Both start from the same model with a LoRA adapter on all linear layers and learn so slowly
that the lengths of completions do not change. They alternate, each in a separate process, so that other
load on the machine affects both. Compared is the mean time of a step after a warm-up, without
evaluations: TRL's by its callbacks, Hone's from the times in `run/steps.jsonl`.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time

import worker as worker_process

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
FORMAT = re.compile(r"\s*<reasoning>.*?</reasoning>\s*<answer>.*?</answer>\s*", re.DOTALL)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a Hugging Face directory")
    parser.add_argument("--hone", default="target/release/hone", help="the binary")
    parser.add_argument("--dataset", default="datasets/additions.jsonl")
    parser.add_argument("--groups", type=int, default=8, help="prompts per step")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=40, help="maximum number of tokens of a completion")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--beta", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=20, help="timed steps per turn")
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sampler", default="auto", help="Hone's: auto, native or engine")
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def correct(completions, answer, **_):
    found = [ANSWER.search(text(completion)) for completion in completions]
    return [float(bool(f) and f.group(1).strip() == a) for f, a in zip(found, answer)]


def well_formed(completions, **_):
    return [0.5 * bool(FORMAT.fullmatch(text(completion))) for completion in completions]


def text(completion):
    return completion if isinstance(completion, str) else completion[0]["content"]


def worker(args):
    """Runs TRL in this process; prints the seconds of its steps as JSON."""
    import torch

    torch.set_num_threads(args.threads)
    import datasets
    import transformers
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    with open(args.dataset) as file:
        rows = [json.loads(line) for line in file]
    count = args.groups * args.group_size
    lengths = []

    class Clock(transformers.TrainerCallback):
        """Times from the end of each step to the end of the next, including everything between."""

        def __init__(self):
            self.ends = []

        def on_step_end(self, *_, **__):
            self.ends.append(time.perf_counter())

        def on_log(self, _args, _state, _control, logs=None, **__):
            if "completions/mean_length" in (logs or {}):
                lengths.append(logs["completions/mean_length"])

    config = GRPOConfig(
        output_dir=args.worker,
        per_device_train_batch_size=count,
        num_generations=args.group_size,
        max_completion_length=args.max_tokens,
        temperature=1.0,
        beta=args.beta,
        loss_type="dapo",
        learning_rate=1e-7,
        lr_scheduler_type="constant",
        max_steps=args.warm_up + args.steps,
        gradient_checkpointing=False,
        bf16=False,
        fp16=False,
        use_cpu=True,
        logging_steps=args.warm_up + args.steps,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=1,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(args.model)
    clock = Clock()
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=[correct, well_formed],
        args=config,
        train_dataset=datasets.Dataset.from_list(
            [{"prompt": row["messages"], "answer": row["answer"]} for row in rows]),
        peft_config=LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear",
                               task_type="CAUSAL_LM"),
        callbacks=[clock],
    )
    trainer.train()
    ends = clock.ends[args.warm_up - 1:]
    worker_process.result({
        "steps": [b - a for a, b in zip(ends, ends[1:])],
        "length": statistics.mean(lengths) if lengths else None,
    })


def run_trl(args, scratch):
    return worker_process.run(__file__, args.threads, "--worker", scratch)


CONFIG = """
[data]
dir = "{scratch}/data"
[model]
path = "{model}"
[dataset]
path = "{dataset}"
held_out = 8
[rollout]
sampler = "{sampler}"
group_size = {group_size}
temperature = 1.0
max_tokens = {max_tokens}
dataset_route = "default"
max_ready_groups = {groups}
[train]
max_steps = {steps}
samples_per_step = {count}
learning_rate = 1e-7
beta = {beta}
threads = {threads}
[train.lora]
r = {rank}
alpha = {alpha}
[run]
eval_every = 0
samples_every = 0
tensorboard = false
[[route]]
name = "default"
[[route.reward]]
name = "correct"
kind = "exact_match"
[[route.reward]]
name = "format"
kind = "format_strict"
weight = 0.5
"""


def run_hone(args, scratch):
    config = os.path.join(scratch, "hone.toml")
    values = {"scratch": scratch, "model": os.path.abspath(args.model),
              "dataset": os.path.abspath(args.dataset), "sampler": args.sampler,
              "group_size": args.group_size, "groups": args.groups, "max_tokens": args.max_tokens,
              "count": args.groups * args.group_size, "steps": args.warm_up + args.steps,
              "beta": args.beta, "rank": args.rank, "alpha": 2 * args.rank, "threads": args.threads}
    with open(config, "w") as file:
        file.write(CONFIG.format(**values))
    done = subprocess.run([args.hone, "train", "--config", config], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"hone failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    with open(os.path.join(scratch, "data", "run", "steps.jsonl")) as file:
        steps = [json.loads(line) for line in file]
    ends = [step["time_ms"] / 1e3 for step in steps[args.warm_up - 1:]]
    return {
        "steps": [b - a for a, b in zip(ends, ends[1:])],
        "length": statistics.mean(step["completion_length"] for step in steps),
        "staleness": statistics.mean(step.get("staleness_versions", 0.0) for step in steps),
    }


def main():
    args = arguments()
    if args.worker:
        return worker(args)
    runs = {"TRL": [], "Hone": []}
    for _ in range(args.turns):
        for name, run in [("TRL", run_trl), ("Hone", run_hone)]:
            with tempfile.TemporaryDirectory() as scratch:
                runs[name].append(run(args, scratch))
    print(f"{args.groups * args.group_size} completions in groups of {args.group_size}, at most "
          f"{args.max_tokens} tokens, LoRA r {args.rank} on all linears, beta {args.beta}, "
          f"{args.threads} threads, {args.steps} steps in each of {args.turns} turns")
    means = {}
    for name, turns in runs.items():
        means[name] = [statistics.mean(turn["steps"]) for turn in turns]
        length = statistics.mean(turn["length"] for turn in turns if turn["length"])
        print(f"{name:<5} {min(means[name]) * 1e3:7.1f} to {max(means[name]) * 1e3:7.1f} ms per step (mean "
              f"of a turn); completions of {length:.1f} tokens on average")
    stale = statistics.mean(turn["staleness"] for turn in runs["Hone"])
    best = min(means["TRL"]) / min(means["Hone"])
    median = statistics.median(means["TRL"]) / statistics.median(means["Hone"])
    print(f"TRL / Hone: {best:.2f} (best turns), {median:.2f} (median); Hone's samples were "
          f"{stale:.2f} versions old on average, TRL's 0")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"best": best, "median": median, "runs": runs}, file, indent=1)


if __name__ == "__main__":
    main()
