"""Configuration: TOML files and overrides in, one frozen and validated `Config` out."""

from optimus.config.load import dump_toml, load_config, make_config
from optimus.config.sections import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig

__all__ = [
    "Config",
    "DataConfig",
    "ModelConfig",
    "OptimConfig",
    "TrainConfig",
    "dump_toml",
    "load_config",
    "make_config",
]
