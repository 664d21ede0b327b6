"""Parameters, operations and memory of a configuration, from shapes alone."""

from __future__ import annotations

from typing import Any

from optimus.config import Config
from optimus.model.flops import count_parameters, flops_per_token

_GIB = 1 << 30


def plan(config: Config) -> dict[str, Any]:
    """What the run needs, ready for JSON; a configuration with a bare `[model]` will do.

    Always `total_params`, `active_params` and `memory`, the bytes of model states that one device
    holds under plain data parallelism, without activations. With `train.seq_len` also
    `flops_per_token`, with a global batch `flops_per_step`, and with a number of steps `tokens` and
    `flops` of the whole run. FLOPs are those of CONTRACT.md, forward and backward.
    """
    train = config.train
    total, active = count_parameters(config.model)
    result: dict[str, Any] = {
        "architecture": config.model.architecture,
        "total_params": total,
        "active_params": active,
        "dtype": train.dtype,
        "memory": model_state_bytes(config, total),
    }
    if not train.seq_len:
        return result
    result["seq_len"] = train.seq_len
    result["flops_per_token"] = flops_per_token(config.model, train.seq_len)
    if train.global_batch_tokens:
        result["global_batch_tokens"] = train.global_batch_tokens
        result["flops_per_step"] = result["flops_per_token"] * train.global_batch_tokens
        if train.max_steps:
            result["tokens"] = train.global_batch_tokens * train.max_steps
            result["flops"] = result["flops_per_step"] * train.max_steps
    return result


def model_state_bytes(config: Config, total_params: int) -> dict[str, int]:
    """Bytes on a device: parameters in the training dtype; gradients in theirs, one more
    for the head's use of tied embeddings; masters and the two moments of AdamW in fp32, where fp32
    parameters are their own masters; in deterministic mode two more buffers of gradients."""
    model = config.model
    gradients = total_params
    if model.tie_embeddings:
        gradients += model.vocab_size * model.hidden_size
    gradients *= 2 if config.optim.grad_dtype == "bf16" else 4
    masters = config.train.dtype == "fp32"
    parts = {
        "parameters": (4 if masters else 2) * total_params,
        "gradients": gradients,
        "optimizer": (8 if masters else 12) * total_params,
        "deterministic": 2 * gradients if config.train.deterministic else 0,
    }
    return {**parts, "total": sum(parts.values())}


def format_plan(result: dict[str, Any]) -> str:
    """The plan for the eye, a line a fact."""
    memory = result["memory"]
    lines = [
        ("parameters", f"{result['total_params']:,}"),
        ("active for a token", f"{result['active_params']:,}"),
    ]
    if "flops_per_token" in result:
        per_token = result["flops_per_token"] / 1e9
        lines.append((f"per token of {result['seq_len']}", f"{per_token:,.3f} GFLOP"))
    if "flops_per_step" in result:
        batch, work = result["global_batch_tokens"], result["flops_per_step"] / 1e12
        lines.append(("per update", f"{batch:,} tokens, {work:,.1f} TFLOP"))
    if "flops" in result:
        lines.append(("whole run", f"{result['tokens']:,} tokens, {result['flops']:.3e} FLOP"))
    lines.append(("on each device", f"{_gib(memory['total'])} of model states, data parallel"))
    for name in ("parameters", "gradients", "optimizer", "deterministic"):
        if memory[name]:
            lines.append((f"  {name}", _gib(memory[name])))
    lines.append(("", f"{result['dtype']} training; activations come on top"))
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)


def _gib(size: int) -> str:
    return f"{size / _GIB:,.2f} GiB"
