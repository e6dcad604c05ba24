"""Sampled tokens per second: transformers' `generate` and Hone's native sampler, in one run.

    python benches/peers/transformers_generate.py --hone target/release/hone bench sample \\
        --model models/embedded --batch 8 64

Both read the same directory in f32 and sample from the plain softmax (temperature 1, no truncation) the
same number of sequences at once, in groups on one prompt (`bench::sample::prompt` makes the same ids),
each of exactly the same number of tokens: a stop token cannot be drawn. They alternate, so that other
load on the machine affects both. The best of several runs counts in each turn, and the ratio is the
median over the turns. Hone also records every token's log-probability and decodes its text; `generate`
does neither.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a Hugging Face directory")
    parser.add_argument("--hone", nargs="+", default=["target/release/hone", "bench", "sample"],
                        help="a command that takes the options of `hone bench sample`")
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--group", type=int, default=8, help="sequences on one prompt")
    parser.add_argument("--prompt", type=int, default=20, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a completion")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--runs", type=int, default=3, help="runs of each in a turn")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", help="write the results to this file")
    return parser.parse_args()


def prompt(number, length, run):
    ids = [3 + (number * 31 + i * 7) % 370 for i in range(length)]
    ids[0] = 3 + run % 300
    return ids


def generate(model, args, batch, run):
    import torch

    ids = torch.tensor([prompt(i // args.group, args.prompt, run) for i in range(batch)])
    began = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0,
            top_p=1.0, min_new_tokens=args.tokens, max_new_tokens=args.tokens, use_cache=True,
        )
    seconds = time.perf_counter() - began
    drawn = out.shape[0] * (out.shape[1] - args.prompt)
    assert drawn == batch * args.tokens, f"{drawn} tokens were drawn"
    return drawn / seconds


def hone(args, batch):
    options = {"model": args.model, "batch": batch, "group": args.group, "prompt": args.prompt,
               "tokens": args.tokens, "runs": args.runs, "threads": args.threads}
    command = args.hone + ["--json"]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def main():
    args = arguments()
    import torch
    import transformers

    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    report = []
    for batch in args.batch:
        generate(model, args, batch, 0)
        turns = []
        for turn in range(args.turns):
            runs = range(1 + turn * args.runs, 1 + (turn + 1) * args.runs)
            peer = max(generate(model, args, batch, run) for run in runs)
            own = hone(args, batch)
            ratio = own["best_tokens_per_second"] / peer
            turns.append({"transformers": peer, "hone": own, "ratio": ratio})
            print(f"batch {batch}: transformers {peer:,.0f} tokens/s, hone "
                  f"{own['best_tokens_per_second']:,.0f} tokens/s ({own['share_of_bound']:.0%} of the "
                  f"{own['bound']} bound a step), ratio {ratio:.2f}", flush=True)
        median = statistics.median(turn["ratio"] for turn in turns)
        print(f"batch {batch}: ratio {median:.2f}, the median of {len(turns)} turns")
        report.append({"batch": batch, "ratio": median, "turns": turns})
    if args.json:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        with open(args.json, "w") as file:
            json.dump({"versions": versions, "options": vars(args), "results": report}, file, indent=1)


if __name__ == "__main__":
    sys.exit(main())
