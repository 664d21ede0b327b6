from __future__ import annotations

import pytest

from optimus.data.batch import MAX_MICROBATCHES, plan_batch
from optimus.errors import ConfigError
from tests.kit.runs.tiny import tiny_config


def config(**overrides):
    return tiny_config("data", "run", **overrides)


@pytest.mark.parametrize("data_ranks, accumulation", [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_microbatches_per_rank_are_derived_from_tokens_and_ranks(data_ranks, accumulation):
    plan = plan_batch(config().train, data_ranks)
    assert plan.microbatches_per_rank == accumulation
    assert (plan.instances, plan.tokens, plan.targets) == (8, 8 * 32, 8 * 31)


def test_default_batch_is_a_microbatch_on_each_rank():
    plan = plan_batch(config(train__global_batch_tokens=0, train__microbatch_size=3).train, 4)
    assert (plan.microbatches_per_rank, plan.instances) == (1, 12)


def test_a_batch_of_too_many_microbatches_is_refused():
    tokens = 2 * 32 * MAX_MICROBATCHES
    train = config().train.model_copy(update={"global_batch_tokens": tokens})
    assert plan_batch(train, 2).microbatches_per_rank == MAX_MICROBATCHES
    with pytest.raises(ConfigError, match="at most 65,536 are supported; use larger microbatches"):
        plan_batch(train, 1)
