"""Hugging Face directories of OlmoForCausalLM and OlmoeForCausalLM, read and written."""

from optimus.model.hf.config import config_from_hf, config_to_hf, is_hf_directory, read_hf_config
from optimus.model.hf.names import check_hf_weights, places
from optimus.model.hf.write import plan_hf, write_hf, write_hf_json

__all__ = [
    "check_hf_weights",
    "config_from_hf",
    "config_to_hf",
    "is_hf_directory",
    "places",
    "plan_hf",
    "read_hf_config",
    "write_hf",
    "write_hf_json",
]
