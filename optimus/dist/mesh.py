"""Rank arithmetic: which place a rank has along each axis. Pure values; no process is started.

World = pp * dp * ep * tp; tp innermost, then ep, then dp, pp outermost (CONTRACT.md, "Ranks").
"""

from __future__ import annotations

from dataclasses import dataclass

from optimus.errors import ConfigError


@dataclass(frozen=True)
class Mesh:
    """Sizes of the four axes of parallelism."""

    pp: int = 1
    dp: int = 1
    ep: int = 1
    tp: int = 1

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.ep * self.tp

    @property
    def num_data_ranks(self) -> int:
        """Ranks that see different data: w = dp * ep."""
        return self.dp * self.ep

    def data_rank(self, rank: int) -> int:
        """d = dp_index * ep + ep_index of a global rank."""
        return rank // self.tp % self.num_data_ranks


def make_mesh(world_size: int, pp: int, dp: int, ep: int, tp: int) -> Mesh:
    """A mesh that fills the world; dp = 0 takes what the other axes leave.

    Raises ConfigError with the nearest legal sizes if the product cannot be the world's size.
    """
    model_ranks = pp * ep * tp
    if world_size % model_ranks:
        nearest = max(1, round(world_size / model_ranks)) * model_ranks
        raise ConfigError(
            f"parallel.pp * ep * tp = {pp} * {ep} * {tp} = {model_ranks} does not divide the world "
            f"of {world_size} ranks; start {nearest} ranks or change the sizes"
        )
    left = world_size // model_ranks
    if dp and dp != left:
        raise ConfigError(
            f"parallel.dp = {dp} needs a world of {dp * model_ranks} ranks but {world_size} were "
            f"started; set parallel.dp = {left} or 0 (what the world leaves)"
        )
    return Mesh(pp, left, ep, tp)
