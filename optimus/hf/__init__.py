"""Conversion from and to Hugging Face model directories, and replacement of the MoE blocks of
transformers models by FastSparseMoE."""

from optimus.hf.config import config_from_hf, config_to_hf, is_hf_directory, read_hf_config
from optimus.hf.drop_in import FastExperts, use_fast_moe
from optimus.hf.weights import (
    check_hf_weights,
    hf_tensors,
    plan_hf,
    write_all,
    write_hf,
    write_hf_json,
)

__all__ = [
    "FastExperts",
    "check_hf_weights",
    "config_from_hf",
    "config_to_hf",
    "hf_tensors",
    "is_hf_directory",
    "plan_hf",
    "read_hf_config",
    "use_fast_moe",
    "write_all",
    "write_hf",
    "write_hf_json",
]
