"""Batch sizes of an update, computed from the global batch size and the number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

from optimus.config import TrainConfig
from optimus.errors import ConfigError, counted

MAX_MICROBATCHES = 1 << 16
"""Largest number of microbatches per rank in an update. The limit bounds the length of the pipeline
schedule, which lists every microbatch."""


@dataclass(frozen=True)
class BatchPlan:
    """Batch sizes of an update (optimizer step).

    `num_data_ranks` ranks read different data. In an update, each of these ranks runs
    `microbatches_per_rank` microbatches of `microbatch_size` sequences.
    """

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
        """Return the number of predicted tokens of an update: all tokens except the first of each
        sequence."""
        return self.instances * (self.seq_len - 1)


def plan_batch(train: TrainConfig, num_data_ranks: int) -> BatchPlan:
    """Return the batch sizes of an update (optimizer step).

    Args:
        train: Section `[train]` of the configuration.
        num_data_ranks: Number of ranks that read different data, dp * ep.

    Raises:
        ConfigError: `train.seq_len` is 0, or `train.global_batch_tokens` is too large or not a
            multiple of num_data_ranks * microbatch_size * seq_len.
    """
    if not train.seq_len:
        raise ConfigError("train.seq_len is missing; set it to the data set's context, in tokens")
    tokens_per_round = train.microbatch_size * train.seq_len * num_data_ranks
    batch_tokens = train.global_batch_tokens or tokens_per_round
    if batch_tokens % tokens_per_round:
        nearest = max(1, round(batch_tokens / tokens_per_round)) * tokens_per_round
        raise ConfigError(
            f"train.global_batch_tokens = {batch_tokens} is not a multiple of {tokens_per_round} "
            f"({counted(num_data_ranks, 'data rank')} x "
            f"{counted(train.microbatch_size, 'sequence')} x "
            f"{train.seq_len} tokens); the nearest multiple is {nearest}"
        )
    microbatches = batch_tokens // tokens_per_round
    if microbatches > MAX_MICROBATCHES:
        raise ConfigError(
            f"train.global_batch_tokens = {batch_tokens} makes {microbatches:,} microbatches per "
            f"rank, but at most {MAX_MICROBATCHES:,} are supported; use larger microbatches or "
            "more ranks"
        )
    return BatchPlan(train.microbatch_size, train.seq_len, microbatches, num_data_ranks)
