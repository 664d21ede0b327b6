"""Validated, frozen configurations from TOML files and command-line overrides."""

from optimus.config.load import dump_toml, load_config, load_saved_config, make_config
from optimus.config.sections import Config, ModelConfig, OptimConfig

__all__ = [
    "Config",
    "ModelConfig",
    "OptimConfig",
    "dump_toml",
    "load_config",
    "load_saved_config",
    "make_config",
]
