"""The optimization part of a GRPO step of TRL and of Hone, on the same tokens, in one run.

    python benches/peers/trl_grpo.py --hone target/release/hone --model models/embedded
    target/release/hone bench train --model 100m --write-model DIR
    python benches/peers/trl_grpo.py --hone target/release/hone --model DIR \\
        --groups 1 --prompt 64 --completion 448 --spread 0 --gradient-checkpointing

Timed is TRL's whole optimizer step (padding, the reference's log-probabilities, forward, backward,
clipping, AdamW, scheduler) without generation and rewards, which are replaced by completions and
advantages from a file that Hone's bench reads too. Each side runs in a separate process, so that its
peak memory (VmHWM) is measured alone, and the two alternate, so that other load on the machine affects
both. TRL runs several forms of the same step (micro-batches, accumulation): the fastest counts for the
ratio of times, the leanest for the ratio of memory. Both are printed.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time

import worker as worker_process

SEED = 2


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a Hugging Face directory")
    parser.add_argument("--hone", nargs="+", default=["target/release/hone", "bench", "train"],
                        help="the binary, or a command that takes the options of `hone bench train`")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=20, help="tokens of a prompt")
    parser.add_argument("--completion", type=int, default=24, help="mean number of tokens of a completion")
    parser.add_argument("--spread", type=float, default=0.5,
                        help="lengths are uniform within this share of the mean")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--beta", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=10, help="timed steps per turn")
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--recompute", default="auto", help="Hone's: auto, always or never")
    parser.add_argument("--bf16", action="store_true", help="TRL's autocast; Hone stays in f32")
    parser.add_argument("--micro-batch", type=int, nargs="*",
                        help="TRL's per_device_train_batch_size; each is tried in the first turn")
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def make_data(args, path):
    """Random tokens in groups that share a prompt; evenly spread advantages of mean 0, deviation 1."""
    with open(os.path.join(args.model, "config.json")) as file:
        vocab = json.load(file)["vocab_size"]
    rng = random.Random(SEED)
    ids = lambda count: [rng.randrange(vocab) for _ in range(count)]
    n = args.group_size
    deviation = max(((n * n - 1) / 12) ** 0.5, 1e-9)
    samples = []
    for _ in range(args.groups):
        prompt = ids(args.prompt)
        for member in range(n):
            length = max(1, round(args.completion * (1 + args.spread * rng.uniform(-1, 1))))
            advantage = (member - (n - 1) / 2) / deviation
            samples.append({"prompt": prompt, "completion": ids(length), "advantage": advantage})
    with open(path, "w") as file:
        json.dump({"samples": samples}, file)


def peak_memory():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))


def worker(args):
    """Runs TRL in this process; prints its results as JSON."""
    import torch

    torch.set_num_threads(args.threads)
    import datasets
    import transformers
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    with open(args.worker) as file:
        samples = json.load(file)["samples"]
    count = len(samples)
    imported = peak_memory()

    class FixedTrainer(GRPOTrainer):
        """Takes completions and rewards from the file; the time for that does not count."""

        outside = 0.0

        def _generate(self, prompts):
            begun = time.perf_counter()
            prompt_ids = [list(s["prompt"]) for s in samples]
            completion_ids = [list(s["completion"]) for s in samples]
            FixedTrainer.outside += time.perf_counter() - begun
            completions = [""] * count
            return prompt_ids, completion_ids, None, completions, None, {}, None, []

        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            # TRL standardizes rewards within the group, which leaves these advantages unchanged.
            return torch.tensor([[s["advantage"]] for s in samples])

    class Clock(transformers.TrainerCallback):
        def __init__(self):
            self.steps, self.processor, self.begun, self.used, self.outside = [], [], 0.0, 0.0, 0.0

        def on_step_begin(self, *_, **__):
            self.begun, self.outside = time.perf_counter(), FixedTrainer.outside
            self.used = time.process_time()

        def on_step_end(self, *_, **__):
            outside = FixedTrainer.outside - self.outside
            self.steps.append(time.perf_counter() - self.begun - outside)
            self.processor.append(time.process_time() - self.used)

    size = args.size
    config = GRPOConfig(
        output_dir=os.path.join(os.path.dirname(args.worker), "trl"),
        per_device_train_batch_size=size,
        gradient_accumulation_steps=count // size,
        num_generations=args.group_size,
        max_completion_length=max(len(s["completion"]) for s in samples),
        beta=args.beta,
        loss_type="grpo",
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        max_steps=args.warm_up + args.steps,
        gradient_checkpointing=args.gradient_checkpointing,
        bf16=args.bf16,
        fp16=False,
        use_cpu=True,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=1,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(args.model)
    clock = Clock()
    trainer = FixedTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=datasets.Dataset.from_dict({"prompt": ["p"] * max(args.groups, 1)}),
        peft_config=LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear",
                               task_type="CAUSAL_LM"),
        callbacks=[clock],
    )
    trainer.train()
    x = torch.rand(1536, 1536)
    rate = 0.0
    for _ in range(5):
        begun = time.perf_counter()
        for _ in range(8):
            x @ x
        rate = max(rate, 2 * 1536**3 * 8 / 1e9 / (time.perf_counter() - begun))
    worker_process.result({
        "steps": clock.steps[args.warm_up:], "processor": clock.processor[args.warm_up:],
        "peak_bytes": peak_memory(), "imported_bytes": imported,
        "product_gflops": rate, "attention": model.config._attn_implementation,
        "trainable": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        "loss": trainer.state.log_history[-1].get("train_loss") if trainer.state.log_history else None,
    })


def run_trl(args, data, size):
    return worker_process.run(__file__, args.threads, "--worker", data, "--size", str(size))


def run_hone(args, data):
    hone = args.hone if len(args.hone) > 1 or "bench_train" in args.hone[0] else [*args.hone, "bench", "train"]
    command = [*hone, "--model", args.model, "--data", data, "--rank", str(args.rank), "--beta",
               str(args.beta), "--steps", str(args.steps), "--threads", str(args.threads),
               "--recompute", args.recompute, "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"hone failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout)


def spread(values):
    return f"{min(values) * 1e3:.1f} to {max(values) * 1e3:.1f}, median {statistics.median(values) * 1e3:.1f} ms"


def main():
    args = arguments()
    if args.worker:
        return worker(args)
    count = args.groups * args.group_size
    sizes = args.micro_batch or sorted({count, max(args.group_size, count // 4), args.group_size}, reverse=True)
    with tempfile.TemporaryDirectory() as scratch:
        data = os.path.join(scratch, "data.json")
        make_data(args, data)
        trl, hone = {size: [] for size in sizes}, []
        for turn in range(args.turns):
            for size in list(trl):
                trl[size].append(run_trl(args, data, size))
            hone.append(run_hone(args, data))
            if turn == 0 and len(trl) > 1:
                # Later turns repeat the fastest and the leanest only.
                fastest = min(trl, key=lambda size: min(trl[size][0]["steps"]))
                leanest = min(trl, key=lambda size: trl[size][0]["peak_bytes"])
                first = {size: runs[0] for size, runs in trl.items()}
                trl = {size: trl[size] for size in {fastest, leanest}}
            elif turn == 0:
                first = {size: runs[0] for size, runs in trl.items()}
    mib = 1 << 20
    print(f"{count} completions in groups of {args.group_size}, prompts of {args.prompt} and completions of "
          f"{args.completion} tokens within {100 * args.spread:.0f} %, LoRA r {args.rank} on all linears, beta "
          f"{args.beta}, {args.threads} threads, f32{' (TRL: bf16 autocast)' if args.bf16 else ''}, gradient "
          f"checkpointing {'on' if args.gradient_checkpointing else 'off'} (TRL), recompute {args.recompute} (Hone)")
    for size, run in sorted(first.items()):
        print(f"TRL, micro-batches of {size:>3}: first turn {spread(run['steps'])}; peak "
              f"{run['peak_bytes'] / mib:.0f} MiB, {run['imported_bytes'] / mib:.0f} after imports alone")
    trl_steps = {size: [s for run in runs for s in run["steps"]] for size, runs in trl.items()}
    fastest = min(trl_steps, key=lambda size: min(trl_steps[size]))
    trl_best, trl_median = min(trl_steps[fastest]), statistics.median(trl_steps[fastest])
    trl_bytes = min(max(run["peak_bytes"] for run in runs) for runs in trl.values())
    fast_bytes = max(run["peak_bytes"] for run in trl[fastest])
    hone_steps = [step["wall"] for run in hone for step in run["steps"]]
    hone_bytes = max(run["peak_bytes"] for run in hone)
    print(f"TRL   {spread(trl_steps[fastest])} (micro-batches of {fastest}, attention "
          f"{trl[fastest][0]['attention']}); peak {fast_bytes / mib:.0f} MiB; its leanest {trl_bytes / mib:.0f} MiB")
    print(f"Hone  {spread(hone_steps)}; peak {hone_bytes / mib:.0f} MiB, planned "
          f"{hone[0]['planned_bytes'] / mib:.0f}")
    figures = {
        "time_ratio_best": trl_best / min(hone_steps),
        "time_ratio_median": trl_median / statistics.median(hone_steps),
        # More reliable on a busy machine and with one thread, because waiting threads of torch use processor time.
        "time_ratio_processor": min(s for run in trl[fastest] for s in run["processor"])
        / max(min(step["processor"] for run in hone for step in run["steps"]), 1e-9),
        "memory_ratio": trl_bytes / hone_bytes,
        "memory_ratio_fastest": fast_bytes / hone_bytes,
        "peak_share": max(run["peak_share"] for run in hone),
        "peak_share_processor": max(run["peak_share_processor"] for run in hone),
        "product_gflops_hone": max(run["peak"]["wall"] for run in hone),
        "product_gflops_torch": max(run["product_gflops"] for runs in trl.values() for run in runs),
        "load": [run["load"] for run in hone],
    }
    print(f"TRL / Hone: time {figures['time_ratio_best']:.2f} (best), {figures['time_ratio_median']:.2f} (median), "
          f"{figures['time_ratio_processor']:.2f} (processor time); "
          f"memory {figures['memory_ratio']:.2f} (TRL's leanest), {figures['memory_ratio_fastest']:.2f} (its fastest)")
    print(f"Hone's forward and backward at {100 * figures['peak_share']:.0f} % of the product peak (by processor "
          f"time, the whole step {100 * figures['peak_share_processor']:.0f} %); products of 1536 squared: Hone "
          f"{figures['product_gflops_hone']:.0f}, torch {figures['product_gflops_torch']:.0f} GFLOP/s; load "
          f"{', '.join(f'{a:.1f} to {b:.1f}' for a, b in figures['load'])}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"figures": figures, "trl": trl, "hone": hone}, file)


if __name__ == "__main__":
    main()
