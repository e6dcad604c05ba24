"""Loss, gradient and optimizer cases computed by PyTorch: tests/reference/learning/learning_cases.json.

The loss is written on padded [batch, time] tensors with masks and differentiated by autograd, while
Hone uses flat tokens and gradients in closed form. Float64 throughout. Run from the repository root:
    python tests/reference/learning/make_learning_cases.py
"""

import json
import pathlib
import sys

import torch

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
from provenance import made_by  # noqa: E402

OUT = pathlib.Path(__file__).resolve().parent / "learning_cases.json"
VOCAB = 7
K3_BOUND = 2.610868638149876
torch.set_default_dtype(torch.float64)


def clipped_loss(
    kind: str,
    settings: tuple[float, float, float],
    logp: torch.Tensor,
    behavior: torch.Tensor,
    reference: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    max_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss, and each token's importance ratio and KL estimate, of log-probabilities [batch, time].

    `settings` are beta and the two clip bounds.
    """
    beta, low, high = settings
    ratio = torch.exp(logp - behavior)
    bounded = torch.clamp(ratio, 1 - low, 1 + high)
    advantage = advantages[:, None]
    per_token = -torch.min(ratio * advantage, bounded * advantage)
    d = reference - logp
    # Continued by its tangent where it exceeds 10, as Hone does.
    held = d.clamp(max=K3_BOUND).detach()
    k3 = torch.where(
        d > K3_BOUND,
        torch.exp(held) - held - 1 + (torch.exp(held) - 1) * (d - held),
        torch.exp(d) - d - 1,
    )
    per_token = per_token + beta * k3
    if kind == "grpo":
        loss = ((per_token * mask).sum(-1) / mask.sum(-1)).mean()
    elif kind == "dr_grpo":
        loss = (per_token * mask).sum() / (len(mask) * max_tokens)
    else:
        loss = (per_token * mask).sum() / mask.sum()
    return loss, ratio, k3


def loss_case(seed: int, kind: str, beta: float, low: float, high: float) -> dict:
    torch.manual_seed(seed)
    lengths = [3, 1, 5, 4]
    batch, time, max_tokens = len(lengths), max(lengths), 8
    mask = torch.tensor([[1.0 if t < n else 0.0 for t in range(time)] for n in lengths])
    logits = (torch.randn(batch, time, VOCAB) * 1.5).requires_grad_()
    reference_logits = torch.randn(batch, time, VOCAB) * 1.5
    targets = torch.randint(0, VOCAB, (batch, time))
    temperatures = torch.tensor([1.0, 0.625, 1.375, 0.875])  # exact in float32
    advantages = torch.tensor([1.2, -0.7, 0.4, -1.5])

    def chosen(x: torch.Tensor) -> torch.Tensor:
        x = torch.log_softmax(x / temperatures[:, None, None], dim=-1)
        return x.gather(-1, targets[..., None])[..., 0]

    logp = chosen(logits)
    behaviour = (logp + torch.randn(batch, time) * 0.3).detach()
    loss, ratio, k3 = clipped_loss(
        kind,
        (beta, low, high),
        logp,
        behaviour,
        chosen(reference_logits),
        advantages,
        mask,
        max_tokens,
    )
    advantage = advantages[:, None]
    loss.backward()
    full = torch.log_softmax(logits.detach() / temperatures[:, None, None], dim=-1)
    entropy = -(full.exp() * full).sum(-1)

    def rows(x: torch.Tensor) -> list:
        x = x.detach()
        return [x[b, t].tolist() for b in range(batch) for t in range(lengths[b])]

    return {
        "kind": kind,
        "beta": beta,
        "clip_low": low,
        "clip_high": high,
        "max_tokens": max_tokens,
        "lengths": lengths,
        "temperatures": temperatures.tolist(),
        "advantages": advantages.tolist(),
        "logits": rows(logits),
        "reference_logits": rows(reference_logits),
        "targets": rows(targets),
        "behaviour": rows(behaviour),
        "loss": loss.item(),
        "gradient": rows(logits.grad),
        "entropy": rows(entropy),
        "kl": rows(k3),
        "cut": rows(((ratio < 1 - low) & (advantage < 0)) | ((ratio > 1 + high) & (advantage > 0))),
    }


def adamw_case() -> dict:
    torch.manual_seed(9)
    shapes = {"a": (2, 3), "b": (4,)}
    settings = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    limit = 1.5
    params = {name: torch.randn(shape).requires_grad_() for name, shape in shapes.items()}
    start = {name: p.detach().flatten().tolist() for name, p in params.items()}
    optimizer = torch.optim.AdamW(params.values(), **settings)
    steps = []
    for _ in range(6):
        gradients = {name: torch.randn(shape) for name, shape in shapes.items()}
        for name, p in params.items():
            p.grad = gradients[name].clone()
        norm = torch.nn.utils.clip_grad_norm_(params.values(), limit)
        optimizer.step()
        steps.append(
            {
                "gradients": {n: g.flatten().tolist() for n, g in gradients.items()},
                "norm": norm.item(),
                "values": {n: p.detach().flatten().tolist() for n, p in params.items()},
            }
        )
    return {
        "settings": settings,
        "limit": limit,
        "shapes": {n: list(s) for n, s in shapes.items()},
        "start": start,
        "steps": steps,
    }


def main() -> None:
    losses = [
        loss_case(seed, kind, beta, low, high)
        for seed, (kind, beta, low, high) in enumerate(
            [
                ("grpo", 0.0, 0.2, 0.2),
                ("grpo", 0.3, 0.2, 0.28),
                ("dr_grpo", 0.1, 0.1, 0.3),
                ("dapo", 0.05, 0.2, 0.28),
                ("dapo", 1.0, 0.05, 0.05),
            ]
        )
    ]
    cases = {"made_by": made_by("torch"), "losses": losses, "adamw": adamw_case()}
    OUT.write_text(json.dumps(cases) + "\n")


if __name__ == "__main__":
    main()
