"""Validated, frozen configurations from TOML files and command-line overrides."""

from optimus.config.checks import nearest_divisor
from optimus.config.load import dump_toml, explain, load_config, load_saved_config, make_config
from optimus.config.model import FREE_IN_LOGITS, ROPE_FIELDS, ModelConfig, RopeScaling
from optimus.config.sections import (
    MAX_PATTERN_CHARS,
    MAX_PATTERNS,
    Config,
    Count,
    DataConfig,
    MixSource,
    OffloadConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
)

__all__ = [
    "FREE_IN_LOGITS",
    "MAX_PATTERNS",
    "MAX_PATTERN_CHARS",
    "ROPE_FIELDS",
    "Config",
    "Count",
    "DataConfig",
    "MixSource",
    "ModelConfig",
    "OffloadConfig",
    "OptimConfig",
    "ParallelConfig",
    "RopeScaling",
    "TrainConfig",
    "dump_toml",
    "explain",
    "load_config",
    "load_saved_config",
    "make_config",
    "nearest_divisor",
]
