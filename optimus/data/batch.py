"""How the global batch divides into microbatches over data ranks. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from optimus.config.sections import TrainConfig
from optimus.errors import ConfigError, counted


@dataclass(frozen=True)
class BatchPlan:
    """One update: k microbatches of b sequences of S tokens on each of w data ranks."""

    microbatch_size: int
    seq_len: int
    microbatches_per_rank: int
    num_data_ranks: int

    @property
    def instances(self) -> int:
        return self.microbatch_size * self.num_microbatches

    @property
    def num_microbatches(self) -> int:
        return self.microbatches_per_rank * self.num_data_ranks

    @property
    def tokens(self) -> int:
        return self.instances * self.seq_len

    @property
    def targets(self) -> int:
        """Predicted tokens: all but the first of every instance."""
        return self.instances * (self.seq_len - 1)


def plan_batch(train: TrainConfig, num_data_ranks: int) -> BatchPlan:
    """The batch plan of a run; ConfigError names the nearest batch that the ranks divide."""
    if not train.seq_len:
        raise ConfigError("train.seq_len is missing; give the data set's context, in tokens")
    tokens_per_round = train.microbatch_size * train.seq_len * num_data_ranks
    batch_tokens = train.global_batch_tokens or tokens_per_round
    if batch_tokens % tokens_per_round:
        nearest = max(1, round(batch_tokens / tokens_per_round)) * tokens_per_round
        raise ConfigError(
            f"train.global_batch_tokens = {batch_tokens} is not divided by "
            f"{counted(num_data_ranks, 'data rank')} x "
            f"{counted(train.microbatch_size, 'sequence')} x "
            f"{train.seq_len} tokens; the nearest "
            f"that is: {nearest}"
        )
    return BatchPlan(
        train.microbatch_size, train.seq_len, batch_tokens // tokens_per_round, num_data_ranks
    )
