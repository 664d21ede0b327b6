"""Configuration: TOML files and overrides in, one frozen and validated `Config` out."""

from optimus.config.load import dump_toml, load_config, make_config
from optimus.config.sections import Config, ModelConfig, OptimConfig

__all__ = [
    "Config",
    "ModelConfig",
    "OptimConfig",
    "dump_toml",
    "load_config",
    "make_config",
]
