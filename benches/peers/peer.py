"""Measures TRL and transformers for `all.py`, which starts it with the threads and CPUs that Hone gets.

Each line of standard input is a job as JSON: `kind` names a function in `KINDS`, the other keys are its
inputs. For each job a line with `MARK` and the result as JSON is printed.
"""

import ctypes
import gc
import json
import re
import sys
import time
import traceback

MARK = "RESULT "
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
FORMAT = re.compile(r"\s*<reasoning>.*?</reasoning>\s*<answer>.*?</answer>\s*", re.DOTALL)


class Slow(Exception):
    """A step that takes far longer than the best one so far."""


def memory(field):
    """`VmHWM`, the peak of resident memory, or `VmRSS`, its present size, in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{field}:"))


def reset_peak_memory():
    """Returns freed memory to the system and restarts VmHWM from the present size."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def correct(completions, answer, **_):
    found = [ANSWER.search(completion[0]["content"]) for completion in completions]
    return [float(bool(f) and f.group(1).strip() == a) for f, a in zip(found, answer)]


def well_formed(completions, **_):
    return [0.5 * bool(FORMAT.fullmatch(completion[0]["content"])) for completion in completions]


def load(job, setting, dtype="float32"):
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=getattr(torch, dtype), attn_implementation=setting["attention"])


def grpo(job, setting, steps, limit=None):
    """Runs `steps` optimizer steps of TRL's GRPOTrainer.

    With `samples`, completions and advantages come from the job; a step is then timed from its begin to
    its end, and the peak of memory excludes loading. Without, TRL samples and scores, a step is timed from
    the end of the step before, and the peak is that of the process.
    A step that would take more than `limit` seconds, judged by its finished micro-batches, is given up.
    """
    import datasets
    import torch
    import transformers
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    samples = job.get("samples")
    count = job["groups"] * job["group_size"]
    micro = setting["micro"]

    class FixedTrainer(GRPOTrainer):
        def _generate(self, prompts):
            prompt_ids = [list(s["prompt"]) for s in samples]
            completion_ids = [list(s["completion"]) for s in samples]
            return prompt_ids, completion_ids, None, [""] * count, None, {}, None, []

        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            # TRL standardizes rewards within the group, which leaves these advantages unchanged.
            return torch.tensor([[s["advantage"]] for s in samples])

    class Clock(transformers.TrainerCallback):
        begins, ends, lengths, parts = [], [], [], 0

        def on_step_begin(self, *_, **__):
            self.begins.append(time.perf_counter())
            self.parts = 0

        def on_substep_end(self, *_, **__):
            self.parts += 1
            estimate = (time.perf_counter() - self.begins[-1]) * (count // micro) / self.parts
            # The first step of several is slower than the others.
            if limit and estimate > limit * (1 if len(self.begins) == steps else 4):
                raise Slow

        def on_step_end(self, *_, **__):
            self.ends.append(time.perf_counter())

        def on_log(self, _args, _state, _control, logs=None, **__):
            self.lengths += [v for k, v in (logs or {}).items() if k == "completions/mean_length"]

    if samples:
        data = datasets.Dataset.from_dict({"prompt": ["p"] * job["groups"]})
        rewards = lambda completions, **_: [0.0] * len(completions)
        longest = max(len(s["completion"]) for s in samples)
    else:
        with open(job["dataset"]) as file:
            rows = [json.loads(line) for line in file]
        data = datasets.Dataset.from_list([{"prompt": r["messages"], "answer": r["answer"]} for r in rows])
        rewards, longest = [correct, well_formed], job["max_tokens"]
    config = GRPOConfig(
        output_dir=job["scratch"], per_device_train_batch_size=micro,
        gradient_accumulation_steps=count // micro, num_generations=job["group_size"],
        max_completion_length=longest, temperature=1.0, cache_implementation=setting.get("cache"),
        beta=job["beta"], loss_type="dapo", learning_rate=1e-7, lr_scheduler_type="constant",
        max_steps=steps, gradient_checkpointing=setting["checkpointing"], bf16=setting["dtype"] == "bf16",
        fp16=False, use_cpu=True, logging_strategy="no" if samples else "steps", logging_steps=1,
        save_strategy="no", report_to=[], disable_tqdm=True, dataloader_pin_memory=False, seed=1)
    clock = Clock()
    trainer = (FixedTrainer if samples else GRPOTrainer)(
        model=load(job, setting),
        processing_class=transformers.PreTrainedTokenizerFast.from_pretrained(job["model"]),
        reward_funcs=rewards, args=config, train_dataset=data, callbacks=[clock],
        peft_config=LoraConfig(r=job["rank"], lora_alpha=2 * job["rank"], target_modules="all-linear",
                               task_type="CAUSAL_LM"))
    if samples:
        reset_peak_memory()
    start, finished = memory("VmRSS"), True
    try:
        trainer.train()
    except Slow:
        finished = False
    begins = clock.begins if samples else clock.ends
    ends = clock.ends if samples else clock.ends[1:]
    return {"steps": [end - begin for begin, end in zip(begins, ends)], "lengths": clock.lengths,
            "finished": finished, "peak_bytes": memory("VmHWM"), "growth_bytes": memory("VmHWM") - start}


def train(job):
    run = grpo(job, job["setting"], job["warm_up"] + job["steps"])
    return {**run, "steps": run["steps"][-job["steps"]:], "lengths": run["lengths"][-job["steps"]:]}


def probe(job):
    """Tries every setting briefly; gives up those far slower than the best with the same checkpointing.

    The first settings have a micro-batch of all completions. A type that is far slower with that is not
    tried with others.
    """
    tried = []
    for setting in job["settings"]:
        rivals = [t for t in tried if t["checkpointing"] == setting["checkpointing"] and "seconds" in t]
        best = min((rival["seconds"] for rival in rivals), default=None)
        same = [rival["seconds"] for rival in rivals if rival["dtype"] == setting["dtype"]]
        tried.append(dict(setting))
        if same and min(same) > 1.6 * best:
            continue
        run = grpo(job, setting, job["steps"], limit=best and 1.4 * best)
        tried[-1]["growth_bytes"] = run["growth_bytes"]
        if run["finished"]:
            tried[-1]["seconds"] = min(run["steps"])
        print(f"    {tried[-1]}", file=sys.stderr, flush=True)
    return tried


def prompt(number, length, run):
    """The prompt of `bench::sample::prompt`."""
    ids = [3 + (number * 31 + i * 7) % 370 for i in range(length)]
    ids[0] = 3 + run % 300
    return ids


# The model of the last setting in `sample`: another one must not inherit its compiled code.
loaded = {}


def generator(job, setting):
    import torch

    key = json.dumps([job["model"], job["batch"], setting])
    if key not in loaded:
        loaded.clear()
        torch._dynamo.reset()
        loaded[key] = load(job, setting, {"f32": "float32", "bf16": "bfloat16"}[setting["dtype"]]).eval()
    return loaded[key]


def sample(job):
    """Sampled tokens per second of `generate` in each of `runs` runs after a warm-up."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    setting, options, rates = job["setting"], {}, []
    model = generator(job, setting)
    if setting["compile"]:
        options["compile_config"] = transformers.CompileConfig()
        # `generate` compiles on a CPU only with this attribute.
        options["compile_config"]._compile_all_devices = True
    for run in range(1 + job["runs"]):
        ids = torch.tensor([prompt(i // job["group"], job["prompt"], run) for i in range(job["batch"])])
        began = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                min_new_tokens=job["tokens"], max_new_tokens=job["tokens"],
                cache_implementation=setting["cache"], **options)
        drawn = out.shape[0] * (out.shape[1] - job["prompt"])
        assert drawn == job["batch"] * job["tokens"], f"{drawn} tokens were drawn"
        rates.append(drawn / (time.perf_counter() - began))
    if setting["compile"]:
        assert torch._dynamo.utils.counters["frames"]["ok"], "nothing was compiled"
    return {"rates": rates[1:]}


KINDS = {"train": train, "probe": probe, "sample": sample}


def main():
    import torch

    for line in sys.stdin:
        job = json.loads(line)
        torch.set_num_threads(job["threads"])
        torch.manual_seed(1)
        try:
            result = KINDS[job["kind"]](job)
        except Exception as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"[:500]}
        print(MARK + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
