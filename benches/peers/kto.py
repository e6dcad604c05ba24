"""Ratings that TRL's KTO trainer needs on the task of `hone-bench ratings`: additions by the built-in model.

    python benches/peers/kto.py --seeds 1 2 3 --batches 16 64 --rates 5e-4 1e-3 2e-3

Each round samples as many answers as a batch has, rates each with a thumb, and makes one optimizer step of
`trl.experimental.kto.KTOTrainer` (or `trl.KTOTrainer`) on them, whose moments are kept. Adapters are those of the
demo: rank 16 on all linear layers. Prints the ratings until the mean reward of the last 200 answers first reaches
nine tenths of the maximum, for each setting, so that the peer can be taken at its best.
"""

import argparse
import json
import logging
import random
import re
import statistics
import tempfile
import warnings

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

try:
    from trl import KTOConfig, KTOTrainer
except ImportError:
    from trl.experimental.kto import KTOConfig, KTOTrainer

# As in crates/demo/src/task.rs.
PHRASINGS = ["What is {} + {}?", "{} + {} = ?", "How much is {} plus {}?", "Add {} and {}.", "Please calculate {} + {}.",
             "Can you tell me {} + {}?"]
REWARD_MAX, RECENT, NEARLY = 1.5, 200, 0.9
WHOLE = re.compile(r"\s*<reasoning>[^<]*</reasoning>\s*<answer>[^<]*</answer>\s*")
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def score(text: str, answer: int) -> tuple[float, float]:
    """Whether the number and the form are right."""
    found = ANSWER.search(text)
    try:
        right = found is not None and abs(float(found.group(1)) - answer) < 1e-6
    except ValueError:
        right = False
    return float(right), float(WHOLE.fullmatch(text) is not None)


def sample(model, tokenizer, draw: random.Random, count: int) -> list[tuple[str, int, str]]:
    """`(prompt, answer, completion)` at temperature 1."""
    pairs = [(draw.randrange(50), draw.randrange(50)) for _ in range(count)]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": draw.choice(PHRASINGS).format(*pair)}], tokenize=False, add_generation_prompt=True
        )
        for pair in pairs
    ]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    inputs.pop("token_type_ids", None)
    model.eval()
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=40, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                             pad_token_id=tokenizer.pad_token_id)
    texts = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return [(prompt, a + b, text) for prompt, (a, b), text in zip(prompts, pairs, texts, strict=True)]


class KeepMoments(TrainerCallback):
    """Gives each round's trainer the optimizer's state of the round before."""

    def __init__(self) -> None:
        self.state = None

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs) -> None:
        if self.state is not None:
            optimizer.load_state_dict(self.state)

    def on_train_end(self, args, state, control, optimizer=None, **kwargs) -> None:
        self.state = optimizer.state_dict()


def run(path: str, seed: int, batch: int, rate: float, most: int, inverted: float) -> int | None:
    torch.manual_seed(seed)
    draw, rewards, ratings = random.Random(seed), [], 0
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
    moments = KeepMoments()
    while ratings < most:
        rows = []
        for prompt, answer, text in sample(model, tokenizer, draw, batch):
            right, formed = score(text, answer)
            rewards.append(right + 0.5 * formed)
            ratings += 1
            recent = rewards[-RECENT:]
            if len(recent) == RECENT and sum(recent) >= NEARLY * REWARD_MAX * RECENT:
                return ratings
            label = (right > 0 and formed > 0) != (draw.random() < inverted)
            rows.append({"prompt": prompt, "completion": text, "label": label})
        with tempfile.TemporaryDirectory() as folder:
            config = KTOConfig(
                output_dir=folder, per_device_train_batch_size=batch, num_train_epochs=1, learning_rate=rate, seed=seed,
                lr_scheduler_type="constant", report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
                gradient_checkpointing=False, bf16=False, use_cpu=True,
            )
            trainer = KTOTrainer(model=model, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
                                 callbacks=[moments])
            # The reference is the base: TRL takes a copy of the adapter as it is at the begin of each round.
            with torch.no_grad():
                for name, weights in model.named_parameters():
                    if "lora_B.ref" in name:
                        weights.zero_()
            trainer.train()
            if "ref" in model.peft_config:
                model.delete_adapter("ref")
                model.set_adapter("default")
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="models/embedded")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--rates", type=float, nargs="+", default=[5e-4, 1e-3, 2e-3])
    parser.add_argument("--inverted", type=float, default=0.0, help="share of the thumbs that are wrong")
    parser.add_argument("--ratings", type=int, default=6000, help="most ratings of a run")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    for batch in arguments.batches:
        for rate in arguments.rates:
            found = [run(arguments.model, seed, batch, rate, arguments.ratings, arguments.inverted) for seed in arguments.seeds]
            median = statistics.median(arguments.ratings if one is None else one for one in found)
            print(json.dumps({"method": "TRL KTO", "batch": batch, "rate": rate, "ratings": found, "median": median}), flush=True)


if __name__ == "__main__":
    main()
