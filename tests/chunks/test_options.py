"""Tests of options of parameters, which patterns of parameter names select."""

from __future__ import annotations

import pytest

from optimus.chunks import options
from optimus.chunks.options import ParamOptions, check_patterns, options_of
from optimus.config import OptimConfig
from optimus.errors import ConfigError
from optimus.parallel.placement import whole_model
from tests.kit.runs.tiny import tiny_config

NAMES = dict(whole_model(tiny_config("d", "r").model).named_parameters())


def optim(*groups: dict, frozen: tuple[str, ...] = ()) -> OptimConfig:
    return OptimConfig.model_validate({"groups": list(groups), "frozen": list(frozen)})


def test_frozen_has_precedence_over_the_first_matching_group():
    """The patterns of two groups match the same parameter. The parameter has the options of the
    first group. A parameter that a frozen pattern matches is frozen, and a parameter that no
    pattern matches has the defaults."""
    settings = optim(
        {"pattern": "*norm*", "weight_decay": 0.0},
        {"pattern": "blocks.[01].*", "lr_scale": 0.5},
        frozen=("embed.*",),
    )
    check_patterns(settings, NAMES)
    assert options_of("blocks.0.attention_norm.weight", settings) == ParamOptions(0.0, 1.0)
    assert options_of("blocks.1.attention.q_proj.weight", settings) == ParamOptions(None, 0.5)
    assert options_of("embed.weight", settings) == ParamOptions(frozen=True)
    assert options_of("head.weight", settings) == ParamOptions()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            optim({"pattern": "*nrom*"}),
            r"optim.groups\[0\].pattern = '\*nrom\*' matches no parameter; the parameters are "
            r"blocks.N.attention.k_norm.weight, .*, head.weight",
        ),
        (optim(frozen=("*.Norm*",)), r"optim.frozen names '\*.Norm\*', which matches no parameter"),
        (
            optim({"pattern": "*"}, {"pattern": "embed.*"}),
            r"optim.groups\[1\].pattern = 'embed.\*' has no effect: optim.frozen or earlier groups",
        ),
        (optim(frozen=("*",)), r"optim.frozen = \['\*'\] leaves nothing to train"),
    ],
)
def test_a_pattern_without_effect_is_an_error(settings, message):
    """A pattern matches no parameter, matches only parameters that earlier patterns match, or
    freezes all parameters. The error contains the key and the value of the pattern."""
    with pytest.raises(ConfigError, match=message):
        check_patterns(settings, NAMES)


def test_each_pattern_is_compiled_once():
    """Check 528 groups, each with the pattern of one parameter. Each pattern is compiled once.
    fnmatch caches only 256 patterns: with this cache, each pattern was compiled again for each
    name, and the check took minutes."""
    names = [f"blocks.{layer}.weight_{number}" for layer in range(48) for number in range(11)]
    settings = optim(*({"pattern": name, "lr_scale": 0.5} for name in names))
    options._compiled.cache_clear()
    check_patterns(settings, names)
    assert all(options_of(name, settings).lr_scale == 0.5 for name in names)
    assert options._compiled.cache_info().misses == len(names)
