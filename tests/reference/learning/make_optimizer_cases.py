"""Schedules, averages and eight-bit moments: tests/reference/learning/optimizer_cases.json.

Schedules by transformers, averages by torch.optim.swa_utils, code books by bitsandbytes, AdamW on
moments rounded to them in PyTorch. Run from the repository root, with torch, transformers and bitsandbytes:
    python tests/reference/learning/make_optimizer_cases.py
"""

import json
import pathlib
import sys

import torch
from bitsandbytes.functional import create_dynamic_map
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import get_scheduler

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
from provenance import made_by  # noqa: E402

OUT = pathlib.Path(__file__).resolve().parent / "optimizer_cases.json"
PEAK = 0.5


def schedule(name: str, theirs: str, warmup: int, total: int, **settings) -> dict:
    """transformers' rates before step 0, 1, ...; `settings` are parameters of Hone's schedule."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    specific = {}
    if theirs == "cosine_with_min_lr":
        specific = {"min_lr": settings["min_learning_rate"]}
    if theirs == "polynomial":
        specific = {"lr_end": settings["min_learning_rate"], "power": settings["power"]}
    scheduler = get_scheduler(
        theirs,
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=total,
        scheduler_specific_kwargs=specific,
    )
    rates = []
    # After the end transformers' cosine rises again.
    for _ in range(total + 1):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    ends = name not in ("constant", "inverse_sqrt")
    schedule = {"kind": name, "steps": total, **settings} if ends else name
    keys = {"schedule": schedule, "learning_rate": PEAK, "warmup_steps": warmup}
    return {"settings": keys if ends else keys | {"max_steps": total}, "rates": rates}


def average(steps: int, first: int, **averaged) -> list:
    """The average of a parameter after each step."""
    model = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
    average = AveragedModel(model, **averaged)
    result = []
    for step in range(1, steps + 1):
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[float(step**2), 1.0 / step]], dtype=torch.float64))
        if step >= first:
            average.update_parameters(model)
            result.append(average.module.weight.detach().flatten().tolist())
    return result


def rounded(values: torch.Tensor, book: torch.Tensor) -> torch.Tensor:
    """Rounds to the nearest code, in blocks of 256 relative to their largest magnitude."""
    blocks = values.view(-1, 256)
    largest = blocks.abs().max(1, keepdim=True).values
    middles = (book[1:] + book[:-1]) / 2
    return (book[torch.searchsorted(middles, blocks / largest)] * largest).flatten()


def eight_bit() -> dict:
    """Every 128th value after each step of AdamW whose moments are rounded after it.

    bitsandbytes' AdamW8bit is not used: on the CPU it looks codes up in a coarser table, which does not
    always contain the nearest code. No second moment is small enough to be rounded to 0, which Hone
    prevents.
    """
    n, steps, every, lr, beta1, beta2, eps = 4096, 12, 128, 0.01, 0.9, 0.99, 1e-8
    signed, unsigned = create_dynamic_map(True), create_dynamic_map(False)
    p = torch.linspace(-1, 1, n)
    m, v = torch.zeros(n), torch.zeros(n)
    i = torch.arange(n, dtype=torch.float64)
    values = []
    for t in range(steps):
        g = ((1.2 + torch.sin(0.37 * i + t)) * 10.0 ** (-(i % 3)) * (-1.0) ** i).float()
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        root = (1 - beta2 ** (t + 1)) ** 0.5
        p = p - lr / (1 - beta1 ** (t + 1)) * m / (v.sqrt() / root + eps)
        assert (v.view(-1, 256) / v.view(-1, 256).max(1, keepdim=True).values).min() > 2e-7
        m, v = rounded(m, signed), rounded(v, unsigned)
        values.append(p[::every].tolist())
    settings = {"lr": lr, "betas": (beta1, beta2), "eps": eps, "weight_decay": 0.0}
    return {"count": n, "every": every, "settings": settings, "values": values}


def main() -> None:
    cases = {
        "made_by": made_by("bitsandbytes", "torch", "transformers"),
        "schedules": [
            schedule("constant", "constant_with_warmup", 3, 8),
            schedule("linear", "linear", 2, 9),
            schedule("cosine", "cosine", 0, 7),
            schedule("cosine", "cosine_with_min_lr", 3, 12, min_learning_rate=0.05),
            schedule("polynomial", "polynomial", 2, 10, min_learning_rate=0.02, power=2.5),
            schedule("inverse_sqrt", "inverse_sqrt", 4, 9),
            schedule("inverse_sqrt", "inverse_sqrt", 0, 5),
        ],
        "ema": {"decay": 0.8, "values": average(5, 1, multi_avg_fn=get_ema_multi_avg_fn(0.8))},
        "swa": {"start": 3, "values": average(6, 3)},
        "signed": create_dynamic_map(True).tolist(),
        "unsigned": create_dynamic_map(False).tolist(),
        "eight_bit": eight_bit(),
    }
    OUT.write_text(json.dumps(cases) + "\n")


if __name__ == "__main__":
    main()
