"""Measure the CPU time that Megatron-LM's GPTDataset needs to read one epoch of a data set.

    PYTHON scripts/bench/megatron_loader.py STEM CONTEXT CACHE

STEM is the path of the data set without .bin and .idx, CONTEXT is the number of tokens in a sample,
and CACHE is a folder for index files. data_loader.py runs this script in a virtual environment with
megatron-core. The script prints one JSON object.
"""

from __future__ import annotations

import json
import sys
import time
import warnings

import numpy
import torch
from megatron.core import __version__
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import Split


class Tokenizer:
    """Stub of a tokenizer with the attributes that GPTDataset reads."""

    vocab_size, eod, pad = 50257, 0, -1

    def __init__(self) -> None:
        self.special_tokens_dict: dict[str, int] = {}
        self.unique_identifiers = {"class": "Tokenizer"}


def main(stem: str, context: int, cache: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=context,
        split="1,0,0",
        path_to_cache=cache,
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,  # cheapest setting: attention kernels create the mask
    )
    start = time.process_time()
    indexed = GPTDataset.build_low_level_dataset(stem, config)
    documents = numpy.arange(GPTDataset.numel_low_level_dataset(indexed), dtype=numpy.int32)
    dataset = GPTDataset(indexed, stem, documents, None, Split.train, config)
    open_s = time.process_time() - start
    for number in range(len(dataset)):  # an untimed pass warms the page cache
        dataset[number]
    start, tokens = time.process_time(), 0
    for number in range(len(dataset)):
        tokens += dataset[number]["tokens"].numel()
    cpu_s = time.process_time() - start
    versions = {"megatron-core": __version__, "torch": torch.__version__}
    print(json.dumps({"tokens": tokens, "cpu_s": cpu_s, "open_s": open_s, "versions": versions}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
