"""Which parameters are treated how, by their names."""

from __future__ import annotations

import pytest

from optimus.chunks.setting import Setting, check_patterns, setting_of
from optimus.config import OptimConfig
from optimus.errors import ConfigError
from optimus.parallel.placement import whole_model
from tests.helpers.tiny import tiny_config

NAMES = dict(whole_model(tiny_config("d", "r").model).named_parameters())


def optim(*groups: dict, frozen: tuple[str, ...] = ()) -> OptimConfig:
    return OptimConfig.model_validate({"groups": list(groups), "frozen": list(frozen)})


def test_frozen_wins_then_the_first_group_that_matches():
    settings = optim(
        {"pattern": "*norm*", "weight_decay": 0.0},
        {"pattern": "blocks.[01].*", "lr_scale": 0.5},
        frozen=("embed.*",),
    )
    check_patterns(settings, NAMES)
    assert setting_of("blocks.0.attention_norm.weight", settings) == Setting(0.0, 1.0)
    assert setting_of("blocks.1.attention.q_proj.weight", settings) == Setting(None, 0.5)
    assert setting_of("embed.weight", settings) == Setting(frozen=True)
    assert setting_of("head.weight", settings) == Setting()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            optim({"pattern": "*nrom*"}),
            r"optim.groups\[0\].pattern = '\*nrom\*' matches no parameter; they are called "
            r"blocks.N.attention.k_norm.weight, .*, head.weight",
        ),
        (optim(frozen=("*.Norm*",)), r"optim.frozen names '\*.Norm\*', which matches no parameter"),
        (
            optim({"pattern": "*"}, {"pattern": "embed.*"}),
            r"optim.groups\[1\].pattern = 'embed.\*': optim.frozen or groups before it take all",
        ),
        (optim(frozen=("*",)), r"optim.frozen = \['\*'\] leaves nothing to train"),
    ],
)
def test_a_pattern_without_an_effect_is_refused(settings, told):
    with pytest.raises(ConfigError, match=told):
        check_patterns(settings, NAMES)
