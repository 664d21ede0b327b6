"""Process groups of parameters, and the check that ranks of a group have the same parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from optimus.chunks.options import DEFAULT_OPTIONS, ParamOptions
from optimus.distributed.collectives import ALONE, Group, all_gather_objects, ranks_of
from optimus.errors import ConfigError


@dataclass(frozen=True)
class ParamProcessGroups:
    """Process groups of a parameter. Parameters with equal groups share chunks. Therefore all ranks
    of a reduce group divide the parameters with this group into chunks in the same way.

    The ranks are numbered so that
    `reduce_group.rank == shard_group.rank * replica_group.size + replica_group.rank`.
    """

    stage: int = 0
    """Pipeline stage whose backward completes the gradient."""
    reduce_group: Group = ALONE
    """Ranks that have a copy of the parameter and add up its gradient. Deterministic mode adds the
    gradients in the order of these ranks."""
    shard_group: Group = ALONE
    """Ranks that divide the optimizer states."""
    replica_group: Group = ALONE
    """Ranks of `reduce_group` that have the same shard of the states."""
    partial_group: Group = ALONE
    """Tensor-parallel ranks that have copies of the parameter, for example of the weight of a norm.
    Each rank computes a partial gradient. The gradient is the sum of the partial gradients."""
    copy_axes: tuple[str, ...] = ()
    """Mesh axes along which ranks have the same shard of the states."""
    stage_group: Group = ALONE
    """Ranks of the pipeline stages that have a copy of the parameter. Each of these ranks computes
    the gradient of its use of the parameter, and the gradients are added up. In the gradient norm,
    only the copy of the first stage counts."""
    options: ParamOptions = DEFAULT_OPTIONS
    """Options of the optimizer for the parameter."""
    is_first_copy: bool = field(default=True, compare=False)
    """True on the first of the ranks that have the same shard of the states."""

    @property
    def counts(self) -> bool:
        """True if this rank's shard is included in the gradient norm. Only the first copy of a
        shard is included."""
        return self.is_first_copy and not self.is_later_copy

    @property
    def is_later_copy(self) -> bool:
        """True if an earlier pipeline stage also has the parameter."""
        return self.stage_group.rank > 0

    @property
    def of_chunk(self) -> ParamProcessGroups:
        """Groups of the parameter's chunk. On the first stage that has the parameter, the chunk can
        also contain parameters that only this stage has, so `stage_group` is removed."""
        return self if self.is_later_copy else replace(self, stage_group=ALONE)


def groups_of_params(
    names: Iterable[str], groups_of: Callable[[str], ParamProcessGroups | None]
) -> dict[str, ParamProcessGroups]:
    """Return a dict from each parameter to its process groups. Raises ConfigError if a parameter
    has no groups."""
    result = {}
    for name in names:
        groups = groups_of(name)
        if groups is None:
            raise ConfigError(
                f"parameter {name} has no process groups for its gradient and its optimizer "
                f"states; add {name} to the placements of the layout"
            )
        result[name] = groups
    return result


def check_same_params(
    named: Mapping[str, Tensor],
    groups_of: Mapping[str, ParamProcessGroups],
    everyone: Group,
) -> None:
    """Check that the ranks of each reduce group have the same parameters in the same order.

    All ranks must call this function, in which the ranks exchange a few hashes. Parameters on the
    meta device are not checked, because `optimus plan` creates such parameters in a single process.

    Args:
        named: Parameters of this rank by name.
        groups_of: Process groups of each parameter by name.
        everyone: Group of all ranks.

    Raises:
        ConfigError: The ranks differ. The message, the same on all ranks, names the first
            parameter that differs.
    """
    if everyone.size == 1 or any(parameter.is_meta for parameter in named.values()):
        return
    params: dict[str, list[str]] = {}
    sizes = {}
    for name, groups in groups_of.items():
        reduce_group = groups.reduce_group
        if reduce_group.size > 1:
            first = ranks_of(reduce_group)[0]
            label = f"{reduce_group.axes} from rank {first}, stage {groups.stage}"
            line = f"{name} {list(named[name].shape)} {groups.options}"
            params.setdefault(label, []).append(line)
            sizes[label] = reduce_group.size
    local = {}
    for label, lines in params.items():
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
        local[label] = sizes[label], digest
    of_ranks = all_gather_objects(local, everyone, dict[str, tuple[int, str]])
    for label in sorted(set().union(*of_ranks)):
        digests = [of_rank[label] for of_rank in of_ranks if label in of_rank]
        if len(digests) != digests[0][0] or len(set(digests)) > 1:
            _refuse(label, all_gather_objects(params.get(label), everyone, list[str] | None))


def _refuse(label: str, of_ranks: list[list[str] | None]) -> None:
    """Raise ConfigError with the first difference between the parameters of the ranks in a reduce
    group.

    Args:
        label: Description of the group, for the message.
        of_ranks: For each rank of the run, one line for each parameter that the rank reduces in
            this group; None if the rank reduces none.
    """
    present = [(rank, lines) for rank, lines in enumerate(of_ranks) if lines is not None]
    first, reference = present[0]
    remedy = "give all ranks the same parameters in the same order"
    for rank, lines in present[1:]:
        for index in range(max(len(lines), len(reference))):
            ours, theirs = (some[index : index + 1] for some in (reference, lines))
            if ours != theirs:
                raise ConfigError(
                    f"ranks {first} and {rank} add up gradients ({label}), but their parameters "
                    f"differ: rank {first} has {ours[0] if ours else 'none'}, and rank {rank} has "
                    f"{theirs[0] if theirs else 'none'}; {remedy}",
                )
    raise ConfigError(
        f"parameter {reference[0]} exists on rank {first}, but not on all ranks that should add "
        f"up its gradient ({label}); {remedy}",
    )
