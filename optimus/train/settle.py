"""Settings that are measured at the start of a run, once its ranks and its model are there."""

from __future__ import annotations

from dataclasses import replace

from optimus.chunks.engine import ChunkEngine
from optimus.config import Config
from optimus.distributed.groups import Groups
from optimus.errors import counted
from optimus.parallel.dispatch import measure_dispatches
from optimus.parallel.expert import dispatchers
from optimus.parallel.recompute_cost import measure_recompute
from optimus.platform import dtype_of
from optimus.rank.model import RankModel
from optimus.train.preflight import Preflight

_DISPATCH = "parallel.ep_dispatch"
_SAME = ("parallel.ep", "parallel.tp", "train.microbatch_size", "train.deterministic")
"""What a resumed run must share with its checkpoint for the choice made then to stand."""


def settle_dispatch(
    config: Config, flight: Preflight, groups: Groups, part: RankModel, states: ChunkEngine
) -> tuple[Config, Preflight, list[str]]:
    """Choose `parallel.ep_dispatch` where it is "auto": in both values it is then what was chosen,
    and the lines are for the log. A collective of all ranks, alike on each."""
    stored = flight.start.full.settings if flight.start.full is not None else {}
    same = all(stored.get(key) == flight.settings[key] for key in _SAME)
    kept = stored.get(_DISPATCH, "auto") if same else "auto"
    config, news = take_dispatch(config, groups, part, states, kept)
    if news:
        settings = flight.settings | {_DISPATCH: config.parallel.ep_dispatch}
        flight = replace(flight, settings=settings)
    return config, flight, news


def take_dispatch(
    config: Config, groups: Groups, part: RankModel, states: ChunkEngine, kept: str = "auto"
) -> tuple[Config, list[str]]:
    """Put the dispatch that "auto" means into the model and the configuration, and return the line
    that says so. `kept` is the checkpoint's choice. The faster one is measured only where
    `dispatch_without_measuring` leaves it open."""
    if groups.mesh.ep == 1 or config.parallel.ep_dispatch != "auto":
        return config, []
    train = config.train
    device_type = next(part.model.parameters()).device.type
    decided = dispatch_without_measuring(device_type, train.deterministic, kept)
    if decided is not None:
        choice, why = decided
    else:
        experts = {id(p) for one in dispatchers(part.model)[:1] for p in one.experts.parameters()}
        states.gather([name for name, p in part.model.named_parameters() if id(p) in experts])
        seconds = measure_dispatches(
            part.model,
            (train.microbatch_size * train.seq_len, config.model.hidden_size),
            config.model.num_experts_per_tok,
            dtype_of(train.dtype),
            groups.everyone,
            seed=groups.data.rank,
        )
        choice = min(seconds, key=lambda name: seconds[name])
        times = ", ".join(f"{name} {1e3 * taken:.2f} ms" for name, taken in seconds.items())
        why = f"{times} for a layer, forward and backward, on the slowest rank"
    for one in dispatchers(part.model):
        one.dispatch = choice
    parallel = config.parallel.model_copy(update={"ep_dispatch": choice})
    news = f"{_DISPATCH}: {choice} ({why})"
    return config.model_copy(update={"parallel": parallel}), [news]


def dispatch_without_measuring(
    device_type: str, deterministic: bool, kept: str
) -> tuple[str, str] | None:
    """Return the dispatch that "auto" means and the reason, or None if both have to be measured.

    Args:
        device_type: as in `torch.device.type`.
        deterministic: `train.deterministic`.
        kept: what the checkpoint recorded for the same layout; "auto" without one.
    """
    if deterministic:
        return "allgather", "train.deterministic takes it"
    if device_type == "xpu":
        # xccl: all_to_all_single under expert parallelism ended in ur_die at 2 nodes, without a
        # Python exception; a measurement would end the run at its start, also after a resume.
        recorded = ", though the checkpoint has alltoall" if kept == "alltoall" else ""
        return "allgather", (
            f"not measured on Intel GPUs{recorded}: all-to-all is known to kill the process there; "
            f"set {_DISPATCH} = 'alltoall' to use it all the same"
        )
    return None if kept == "auto" else (kept, "as in the checkpoint")


def recompute_news(config: Config, groups: Groups, part: RankModel) -> list[str]:
    """For the log: what `recompute.modules` saves and costs, on this rank. A collective of the
    ranks that share layers."""
    modules, model, train = config.recompute.modules, config.model, config.train
    if not modules:
        return []
    length = train.seq_len // part.model.sequence_shards
    shape = (train.microbatch_size, length, model.hidden_size)
    cost = measure_recompute(part.model, shape, dtype_of(train.dtype), seed=groups.data.rank)
    layers = counted(len(part.model.blocks), "layer")
    return [f"recompute of {', '.join(modules)}: {cost}; a microbatch in {layers} of rank 0"]
