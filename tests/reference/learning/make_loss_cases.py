"""Every loss as TRL computes it, or written out for autograd: tests/reference/learning/loss_cases.json.

Settings are Hone's configuration keys (`train.*`). Where TRL has the option, its own
`GRPOTrainer._compute_loss` runs on prescribed log-probabilities and entropies of a tiny vocabulary,
with a substitute for the trainer. `written` implements the others (k1, k2, dual clip, reinforce); where
TRL has a case too, the script first checks that both agree. Sampler weights and advantages, which TRL
computes in the method that also generates, run from that method's source lines. Gradients are with
respect to the logits, so they cover log-probability and entropy. Float64 throughout. Needs torch and
trl. Run from the repository root:
    python tests/reference/learning/make_loss_cases.py
"""

import inspect
import json
import math
import pathlib
import sys
import textwrap
from collections import defaultdict
from types import SimpleNamespace

import torch
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
from provenance import made_by  # noqa: E402

OUT = pathlib.Path(__file__).resolve().parent / "loss_cases.json"
VOCAB, MAX_TOKENS = 5, 8
LEAST = math.log(1e-8)
torch.set_default_dtype(torch.float64)

DEFAULTS = {
    "loss": "dapo",
    "importance_sampling_level": "token",
    "beta": 0.0,
    "clip_low": 0.2,
    "clip_high": 0.2,
    "delta": 0.0,
    "dual_clip": 0.0,
    "sapo_tau_pos": 1.0,
    "sapo_tau_neg": 1.05,
    "vespo": {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0},
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": 0.0,
    "kl": {"estimator": "k3"},
    "entropy": {"coef": 0.0},
    "sampler_correction": {"mode": "none", "clip_min": 0.0, "clip_max": 3.0},
}


def hone_keys(s: dict) -> dict:
    """The settings as keys of Hone, which have the parameters of a loss or a correction in its table."""
    s = dict(s)
    correction = dict(s["sampler_correction"])
    mode = correction.pop("mode")
    s["sampler_correction"] = mode if mode == "none" else {"kind": mode, **correction}
    taus = {"tau_pos": s.pop("sapo_tau_pos"), "tau_neg": s.pop("sapo_tau_neg")}
    own = {"sapo": taus, "vespo": s.pop("vespo")}.get(s["loss"])
    return s | {"loss": {"kind": s["loss"], **own}} if own else s


def round_all(x):
    if isinstance(x, torch.Tensor):
        x = x.detach().tolist()
    if isinstance(x, list):
        return [round_all(y) for y in x]
    return x if isinstance(x, int) else float(f"{x:.10g}")


class Data:
    """One batch: logits, targets and every kind of log-probability."""

    def __init__(self, seed: int, lengths: list[int], spread: float):
        torch.manual_seed(seed)
        self.lengths = lengths
        batch, time = len(lengths), max(lengths)
        self.mask = torch.tensor([[1.0 if t < n else 0.0 for t in range(time)] for n in lengths])
        self.logits = self.rounded(torch.randn(batch, time, VOCAB) * 1.2)
        self.targets = torch.randint(0, VOCAB, (batch, time))
        self.advantages = self.rounded(torch.randn(batch))
        logp, _ = self.stats(self.logits)
        self.recorded = self.rounded(logp + torch.randn(batch, time) * spread)
        self.old = self.rounded(logp + torch.randn(batch, time) * spread * 0.7)
        self.reference = self.rounded(logp + torch.randn(batch, time) * 0.5)

    @staticmethod
    def rounded(x: torch.Tensor) -> torch.Tensor:
        """Rounds to values that the file and float32 represent exactly."""
        return torch.round(x * 2**14) / 2**14

    def stats(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        full = torch.log_softmax(logits, dim=-1)
        chosen = full.gather(-1, self.targets[..., None])[..., 0]
        return chosen, -(full.exp() * full).sum(-1)

    def rows(self, x: torch.Tensor) -> list:
        return [round_all(x[i, t]) for i, n in enumerate(self.lengths) for t in range(n)]

    def describe(self) -> dict:
        names = ("logits", "targets", "recorded", "old", "reference")
        out = {name: self.rows(getattr(self, name)) for name in names}
        return out | {"lengths": self.lengths, "advantages": round_all(self.advantages)}


def settings(**changes) -> dict:
    out = json.loads(json.dumps(DEFAULTS))
    for key, value in changes.items():
        out[key] = out[key] | value if isinstance(value, dict) else value
    return out


def behaviour(data: Data, s: dict) -> torch.Tensor:
    """The ratio's denominator: recorded, or recomputed if there is a sampler correction."""
    return data.recorded if s["sampler_correction"]["mode"] == "none" else data.old


def run_lines(first: str, last: str, names: dict) -> dict:
    """Runs TRL's lines from the one that begins with `first` up to, excluding, the one with `last`."""
    text = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.strip().startswith(first))
    stop = next(i for i, line in enumerate(lines) if i > start and line.strip().startswith(last))
    scope = vars(grpo_trainer) | names
    exec(textwrap.dedent("\n".join(lines[start:stop])), scope)  # noqa: S102
    return scope


def sampler_weights(data: Data, s: dict) -> torch.Tensor | None:
    """Shape [batch, time] or [batch, 1]."""
    mode = s["sampler_correction"]["mode"]
    if mode == "none":
        return None
    own = SimpleNamespace(
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=s["sampler_correction"]["clip_min"],
        vllm_importance_sampling_clip_max=s["sampler_correction"]["clip_max"] or None,
    )
    names = {"old_per_token_logps": data.old, "sampling_per_token_logps": data.recorded}
    names |= {"self": own, "mask": data.mask}
    end = "# Compute the per-token log probabilities for the reference model"
    return run_lines("per_token_logps_diff = ", end, names)["vllm_importance_sampling_ratio"]


def advantage_case(seed: int, groups: int, size: int, aggregation: str, scale: str) -> dict:
    torch.manual_seed(seed)
    rewards = torch.randint(0, 4, (groups * size, 3)).double() / 4
    rewards[:, 2] = torch.round(torch.randn(groups * size) * 256) / 256
    rewards[:size] = rewards[0]  # a group with equal rewards
    weights = torch.tensor([1.0, -0.5, 2.0])
    own = SimpleNamespace(
        multi_objective_aggregation=aggregation,
        scale_rewards=scale,
        reward_weights=weights,
        reward_funcs=[None] * 3,
        reward_func_names=["a", "b", "c"],
        _metrics={"train": defaultdict(list)},
    )
    names = {"self": own, "device": "cpu", "rewards_per_func": rewards, "mode": "train"}
    names |= {"num_generations": size, "prompts": [None] * len(rewards)}
    names |= {"unscorable_mask": torch.isnan(rewards).all(dim=1)}
    own.accelerator = SimpleNamespace(process_index=0)
    scope = run_lines("if self.multi_objective_aggregation ==", "# Log prompts and completions", names)
    figures = {name: round_all(values[-1]) for name, values in own._metrics["train"].items()}
    return {
        "aggregation": {"normalize_then_sum": "gdpo"}.get(aggregation, aggregation),
        "scale": scale,
        "size": size,
        "weights": weights.tolist(),
        "rewards": rewards.T.tolist(),
        "advantages": round_all(scope["advantages"]),
        "figures": figures,
    }


def by_trl(data: Data, s: dict, leaf: torch.Tensor) -> tuple[torch.Tensor, dict]:
    """TRL's own loss, with the attributes of a trainer that it reads."""
    logp, entropy = data.stats(leaf)
    rho = sampler_weights(data, s)
    high = s["clip_high"] + (1.0 if s["loss"] == "cispo" else 0.0)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, entropy, None),
        aux_loss_enabled=False,
        top_entropy_quantile=s["top_entropy_quantile"],
        off_policy_mask_threshold=s["off_policy_mask_threshold"] or None,
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=lambda **names: GRPOTrainer.get_gamma_weights(
            **names | {"advantages": names["advantages"].reshape(-1, 1)}
        ),
        importance_sampling_level="sequence" if s["loss"] == "gspo" else s["importance_sampling_level"],
        loss_type="grpo" if s["loss"] == "gspo" else s["loss"],
        beta=s["beta"],
        epsilon_low=s["clip_low"],
        epsilon_high=high,
        use_vllm=rho is not None,
        vllm_importance_sampling_correction=rho is not None,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_TOKENS,
        _entropy_bonus_enabled=s["entropy"]["coef"] != 0.0,
        use_adaptive_entropy=False,
        entropy_coef=s["entropy"]["coef"],
        _metrics={"train": defaultdict(list)},
        args=SimpleNamespace(
            use_bias_correction_kl=s["kl"]["estimator"] == "corrected",
            delta=s["delta"] or None,
            sapo_temperature_pos=s["sapo_tau_pos"],
            sapo_temperature_neg=s["sapo_tau_neg"],
            **{f"vespo_{name}": value for name, value in s["vespo"].items()},
            steps_per_generation=1,
        ),
        accelerator=SimpleNamespace(
            num_processes=1,
            sync_gradients=True,
            gather=lambda x: x,
            reduce=lambda x, reduction: x,
            pad_across_processes=lambda x, **_: x,
        ),
    )
    trainer.get_high_entropy_mask = lambda *a: GRPOTrainer.get_high_entropy_mask(trainer, *a)
    mask = data.mask
    inputs = {
        "prompt_ids": torch.zeros(len(data.lengths), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(data.lengths), 1),
        "completion_ids": data.targets,
        "completion_mask": mask,
        "advantages": data.advantages,
        "old_per_token_logps": behaviour(data, s),
        "sampling_per_token_logps": data.recorded,
        "ref_per_token_logps": data.reference,
        "num_items_in_batch": mask.sum(),
    }
    if rho is not None:
        inputs["importance_sampling_ratio"] = rho
    loss = GRPOTrainer._compute_loss(trainer, trainer.model, inputs)
    return loss, {name: values[-1] for name, values in trainer._metrics["train"].items()}


def log_of_mask(rho: torch.Tensor) -> torch.Tensor:
    return torch.log(rho).clamp(min=LEAST)


def written(data: Data, s: dict, leaf: torch.Tensor) -> torch.Tensor:
    """The documented formulas, token by token and sequence by sequence, for autograd."""
    logp, entropy = data.stats(leaf)
    base, kind = behaviour(data, s), s["loss"]
    rho = sampler_weights(data, s)
    flat = torch.cat([entropy[i, :n] for i, n in enumerate(data.lengths)]).detach()
    least = torch.quantile(flat, 1 - s["top_entropy_quantile"])
    # TRL computes the quantile in float32: exactly on a token's entropy, rounding would decide.
    assert s["top_entropy_quantile"] == 1.0 or (flat - least).abs().min() > 1e-6
    open_tokens = (flat >= least).sum()
    tokens, sequences = sum(data.lengths), len(data.lengths)
    total = torch.zeros(())
    for i, n in enumerate(data.lengths):
        advantage = data.advantages[i]
        log_ratio = logp[i, :n] - base[i, :n]
        sequence_level = kind == "gspo" or s["importance_sampling_level"] == "sequence"
        weight = {"grpo": 1 / (sequences * n), "dr_grpo": 1 / (sequences * MAX_TOKENS)}
        weight |= {"sapo": weight["grpo"], "gspo": weight["grpo"], "luspo": 1 / sequences}
        drift = (data.recorded[i, :n] - logp[i, :n].detach()).mean()
        threshold = s["off_policy_mask_threshold"]
        kept = threshold == 0 or advantage >= 0 or drift <= threshold
        log_w = log_ratio.detach().sum() + (0 if rho is None else log_of_mask(rho[i, :n]).sum())
        sign = "pos" if advantage >= 0 else "neg"
        k, decay = s["vespo"][f"k_{sign}"], s["vespo"][f"lambda_{sign}"]
        phi = torch.exp(k * log_w.clamp(min=LEAST) + decay * (1 - torch.exp(log_w.clamp(min=LEAST))))
        for t in range(n):
            ratio = torch.exp(log_ratio.mean() if sequence_level else log_ratio[t])
            if kind == "reinforce":
                loss = -advantage * logp[i, t]
            elif kind == "vespo":
                loss = -phi * advantage * logp[i, t]
            elif kind == "cispo":
                loss = -ratio.clamp(max=1 + s["clip_high"]).detach() * advantage * logp[i, t]
            elif kind == "sapo":
                tau = s["sapo_tau_pos"] if advantage > 0 else s["sapo_tau_neg"]
                loss = -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantage
            else:
                held = ratio.clamp(1 - s["clip_low"], 1 + s["clip_high"])
                free = ratio.clamp(max=s["delta"]) if s["delta"] else ratio
                gain = torch.min(free * advantage, held * advantage)
                if s["dual_clip"] and advantage < 0:
                    gain = torch.max(gain, s["dual_clip"] * advantage)
                loss = -gain
            if rho is not None and kind != "vespo":
                loss = loss * (rho[i, 0] if rho.size(1) == 1 else rho[i, t])
            is_open = bool(entropy[i, t].detach() >= least)
            if not (kept and is_open):
                loss = loss * 0
            d = data.reference[i, t] - logp[i, t]
            k3 = torch.exp(d) - d - 1
            kl = {"k1": -d, "k2": d * d / 2, "k3": k3, "corrected": ratio * k3}
            loss = loss + s["beta"] * kl[s["kl"]["estimator"]]
            total = total + weight.get(kind, 1 / tokens) * loss
            if is_open:
                total = total - s["entropy"]["coef"] * entropy[i, t] / open_tokens
    return total


def in_trl(s: dict) -> bool:
    return (
        s["loss"] != "reinforce"
        and s["kl"]["estimator"] in ("k3", "corrected")
        and s["dual_clip"] == 0.0
    )


def case(index: int, data: Data, s: dict) -> dict:
    leaf = data.logits.clone().requires_grad_()
    loss = written(data, s, leaf)
    loss.backward()
    gradient, figures = leaf.grad, {}
    if in_trl(s):
        other = data.logits.clone().requires_grad_()
        own, loss = loss, None
        loss, figures = by_trl(data, s, other)
        loss.backward()
        torch.testing.assert_close(own, loss, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(gradient, other.grad, rtol=1e-9, atol=1e-12)
        gradient = other.grad
    out = {"data": index, "train": hone_keys(s), "trl": in_trl(s), "loss": round_all(loss)}
    rho = sampler_weights(data, s)
    if rho is not None:
        flat = rho.flatten() if rho.size(1) == 1 else rho[data.mask.bool()]
        figures["importance_sampling_ratio/min"] = flat.min().item()
        figures["importance_sampling_ratio/mean"] = flat.mean().item()
        figures["importance_sampling_ratio/max"] = flat.max().item()
    names = ("policy_loss", "entropy_coef")
    out["figures"] = {n: round_all(v) for n, v in figures.items() if n not in names}
    return out | {"gradient": data.rows(gradient)}


def all_settings() -> list[dict]:
    kinds = ["grpo", "dr_grpo", "bnpo", "dapo", "cispo", "sapo", "luspo", "gspo", "reinforce"]
    cases = [settings(loss=kind) for kind in kinds]
    cases += [settings(loss=kind, beta=0.3, clip_low=0.1, clip_high=0.28) for kind in kinds]
    for kind in kinds[:-2]:
        cases.append(settings(loss=kind, importance_sampling_level="sequence", beta=0.1))
    for estimator in ("k1", "k2", "corrected"):
        kl = {"estimator": estimator}
        for kind in ("dapo", "gspo", "cispo", "sapo", "luspo"):
            cases.append(settings(loss=kind, beta=0.2, kl=kl))
    for bounds in ({"delta": 1.5}, {"dual_clip": 1.4}, {"dual_clip": 1.1}):
        cases += [settings(loss=kind, **bounds) for kind in ("grpo", "dapo", "gspo")]
    cases.append(settings(loss="sapo", sapo_tau_pos=2.0, sapo_tau_neg=3.0, beta=0.1))
    bonus, kl = {"coef": 0.1}, {"estimator": "corrected"}
    for kind in kinds:
        cases.append(settings(loss=kind, beta=0.1, entropy=bonus, top_entropy_quantile=0.45))
    for kind in ("grpo", "cispo", "gspo"):
        cases.append(settings(loss=kind, entropy={"coef": 0.5}))
        cases.append(settings(loss=kind, off_policy_mask_threshold=0.05, beta=0.1))
    for level in ("token", "sequence"):
        for rule in ("truncate", "mask"):
            correction = {"mode": f"{level}_{rule}", "clip_min": 0.7, "clip_max": 1.6}
            for kind in ("dapo", "cispo", "gspo", "luspo", "sapo"):
                cases.append(settings(loss=kind, sampler_correction=correction, beta=0.05))
            open_ended = {"mode": f"{level}_{rule}", "clip_max": 0.0 if rule == "mask" else 1.2}
            cases.append(settings(sampler_correction=open_ended))
            cases.append(
                settings(
                    loss="grpo", beta=0.1, kl=kl, entropy=bonus, top_entropy_quantile=0.65,
                    off_policy_mask_threshold=0.02, delta=2.0, sampler_correction=correction,
                )
            )
    weights = {"k_pos": 1.0, "lambda_pos": 1.5, "k_neg": 0.5, "lambda_neg": 4.0}
    cases += [settings(loss="vespo"), settings(loss="vespo", beta=0.3, vespo=weights)]
    cases.append(
        settings(loss="vespo", beta=0.1, kl=kl, entropy=bonus, top_entropy_quantile=0.45)
    )
    cases.append(settings(loss="vespo", off_policy_mask_threshold=0.05, vespo=weights))
    for rule in ("truncate", "mask"):
        correction = {"mode": f"token_{rule}", "clip_min": 0.7, "clip_max": 1.6}
        cases.append(settings(loss="vespo", sampler_correction=correction, beta=0.05))
        correction = {"mode": f"token_{rule}", "clip_max": 3.0}
        cases.append(settings(loss="vespo", sampler_correction=correction))
    return cases


def main() -> None:
    # First, because `run_lines` finds the lines of one version of TRL.
    origin = made_by("torch", "trl")
    data = [
        Data(1, [3, 1, 5, 2], 0.3),
        Data(2, [2, 4, 1, 3], 0.5),
        Data(3, [1, 6, 3], 0.15),
    ]
    cases = [case(i % len(data), data[i % len(data)], s) for i, s in enumerate(all_settings())]
    advantages = [
        advantage_case(seed, groups, size, aggregation, scale)
        for seed, (groups, size, aggregation, scale) in enumerate(
            [
                (3, 4, "sum_then_normalize", "group"),
                (2, 5, "sum_then_normalize", "batch"),
                (4, 2, "sum_then_normalize", "none"),
                (3, 4, "normalize_then_sum", "group"),
            ]
        )
    ]
    out = {"made_by": origin, "max_tokens": MAX_TOKENS, "data": [d.describe() for d in data], "cases": cases}
    text = json.dumps(out | {"advantages": advantages})
    OUT.write_text(text + "\n")
    print(len(cases), "cases,", sum(c["trl"] for c in cases), "of them TRL's,", len(text), "bytes")


if __name__ == "__main__":
    main()
