"""Writes truncation.json: distributions that transformers' logits warpers leave of random logits.

    python tests/reference/sampling/truncation.py

Needs torch, transformers and numpy. The warpers run in the order of `generate`: temperature, top-k,
top-p, min-p. Logits and parameters are rounded to f32, as in Hone, and the warpers compute in f64.
In no case is a probability, or a sum of probabilities, so close to a cut that rounding could decide.
"""

import json
import sys
from pathlib import Path

import numpy
import torch
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

sys.path.append(str(Path(__file__).resolve().parents[1]))
from provenance import made_by  # noqa: E402

OUT = Path(__file__).with_name("truncation.json")
LEAST_MARGIN = 1e-7

# vocabulary, spread of the logits, temperature, top_k, top_p, min_p
CASES = [
    (8, 2.0, 1.0, 3, 1.0, 0.0),
    (8, 2.0, 0.7, 0, 0.6, 0.0),
    (8, 2.0, 1.5, 0, 1.0, 0.3),
    (40, 3.0, 1.0, 1, 1.0, 0.0),
    (40, 3.0, 1.3, 7, 0.9, 0.0),
    (40, 3.0, 1.3, 0, 0.95, 0.1),
    (40, 3.0, 0.8, 20, 0.8, 0.05),
    (40, 1.0, 2.0, 39, 0.999, 0.2),
    # As many candidates as the search for the nucleus sorts at a time (64, then 512), and one more.
    (200, 0.01, 1.0, 64, 0.9999, 0.0),
    (200, 0.01, 1.0, 65, 0.9999, 0.0),
    (300, 4.0, 1.0, 0, 0.01, 0.0),
    (300, 4.0, 3.0, 0, 0.9, 0.01),
    (300, 0.5, 1.0, 150, 0.5, 0.4),
    (600, 0.01, 1.0, 512, 0.9999, 0.0),
    (600, 0.01, 1.0, 513, 0.9999, 0.0),
]


def f32(x):
    return float(numpy.float32(x))


def margin(scores, top_p, min_p):
    """The least distance from a cut by top_p or min_p of scores that top_k left."""
    probabilities = torch.softmax(scores, -1)
    probabilities = probabilities[probabilities > 0].sort(descending=True).values
    distances = [1.0]
    if top_p < 1:
        distances.append((probabilities.cumsum(-1) - top_p).abs().min().item())
    if min_p > 0:
        distances.append((probabilities - min_p * probabilities[0]).abs().min().item())
    return min(distances)


def case(seed, vocab, spread, temperature, top_k, top_p, min_p):
    random = numpy.random.default_rng(seed)
    logits = random.normal(0, spread, vocab).astype(numpy.float32)
    assert len(set(logits.tolist())) == vocab, "transformers keeps all of several equal logits"
    temperature, top_p, min_p = f32(temperature), f32(top_p), f32(min_p)
    scores = torch.tensor(logits.astype(numpy.float64))[None]
    scores = scores / temperature
    whole = torch.softmax(scores, -1)[0]
    if temperature != 1:
        raw = torch.tensor(logits.astype(numpy.float64))[None]
        assert torch.equal(TemperatureLogitsWarper(temperature)(None, raw), scores)
    if top_k > 0:
        scores = TopKLogitsWarper(top_k)(None, scores)
    distance = margin(scores[0], top_p, min_p)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    if min_p > 0:
        scores = MinPLogitsWarper(min_p)(None, scores)
    assert distance > LEAST_MARGIN, (seed, distance)
    kept = torch.softmax(scores, -1)[0]
    order = kept.argsort(descending=True)
    order = order[kept[order] > 0]
    return {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        # The shortest text that is the same f32.
        "logits": [float(str(logit)) for logit in logits],
        "ids": order.tolist(),
        "greatest_probabilities": kept[order][:5].tolist(),
        "kept_mass": whole[order].sum().item(),
    }


def main():
    cases = [case(seed, *parameters) for seed, parameters in enumerate(CASES)]
    origin = made_by("numpy", "torch", "transformers")
    OUT.write_text(json.dumps({"made_by": origin, "cases": cases}) + "\n")
    for written in cases:
        print(len(written["logits"]), "->", len(written["ids"]), written["kept_mass"])


if __name__ == "__main__":
    main()
