from __future__ import annotations

import itertools

import pytest

from optimus.config import make_config
from optimus.errors import ConfigError
from optimus.parallel.pipeline.plan import assign_layers, layers_by_hand, plan_stages
from tests.kit.runs.tiny import DENSE, tiny_tree


def worst_cost(cuts, costs, last):
    bounds = (0, *cuts, len(costs))
    sums = [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]
    sums[-1] += last
    return max(sums)


@pytest.mark.parametrize("last", [0, 1.0, 3.5])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_the_most_expensive_stage_is_as_cheap_as_possible(stages, last):
    costs = [1, 1, 2, 1, 3, 1, 1]
    ranges = assign_layers(costs, stages, last)
    assert [layer for stage in ranges for layer in stage] == list(range(len(costs)))
    cuts = [stage.start for stage in ranges[1:]]
    all_cuts = itertools.combinations(range(1, len(costs)), stages - 1)
    assert worst_cost(cuts, costs, last) == min(worst_cost(c, costs, last) for c in all_cuts)


def test_the_head_replaces_a_layer_of_the_last_stage():
    assert [len(stage) for stage in assign_layers([1.0] * 15, 4, 1.0)] == [4, 4, 4, 3]


def test_many_layers_of_a_single_stage_are_not_searched():
    """A single stage has only one possible assignment, so the slow search is skipped."""
    assert assign_layers([1.0] * (1 << 20), 1) == (range(1 << 20),)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ConfigError, match="use at most 2 stages"):
        assign_layers([1, 1], 3)


def test_stage_layers_set_the_layers_of_stages():
    assert layers_by_hand([1, 3], 4, 2) == (range(1), range(1, 4))
    for wrong in ([1, 2], [4], [0, 4], [2, 2, 0]):
        with pytest.raises(ConfigError, match="add up to model.num_layers = 4"):
            layers_by_hand(wrong, 4, 2)


def test_stages_of_a_configuration_include_the_cost_of_its_head():
    """The last stage also computes the head, so it gets fewer layers if the vocabulary is large."""
    for vocab_size, expected in ((1280, [8, 4]), (320, [6, 6])):
        of = {"model__num_layers": 12, "model__vocab_size": vocab_size}
        layers = plan_stages(make_config(tiny_tree("d", "r", **DENSE | of)), 2)
        assert [len(stage) for stage in layers] == expected
