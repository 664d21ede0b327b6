"""Classes, functions and constants to read finished data sets. `optimus` imports data_prep only
through this module."""

from data_prep.dataset.describe import MAX_EPOCHS, documents_of
from data_prep.dataset.manifest import (
    HeldOutRule,
    check_held_out,
    dataset_held_out_rule,
    held_out_problem,
    read_manifest,
)
from data_prep.dataset.reader import ShardReader
from data_prep.layout import SENTENCEPIECE, SPLITS, TOKENIZER, tokenizer_file
from data_prep.shuffle.blend import MIXING_ALGORITHM, Mixing, integer_weights
from data_prep.shuffle.order import PERMUTATION_ALGORITHM, Permutation
from data_prep.tokenizer.sentencepiece_model import (
    SentencePieceTokenizer,
    fields,
    is_sentencepiece,
)
from data_prep.tokenizer.tokenizer import library_errors, open_tokenizer, read_facts, sha256_of

__all__ = [
    "MAX_EPOCHS",
    "MIXING_ALGORITHM",
    "PERMUTATION_ALGORITHM",
    "SENTENCEPIECE",
    "SPLITS",
    "TOKENIZER",
    "HeldOutRule",
    "Mixing",
    "Permutation",
    "SentencePieceTokenizer",
    "ShardReader",
    "check_held_out",
    "dataset_held_out_rule",
    "documents_of",
    "fields",
    "held_out_problem",
    "integer_weights",
    "is_sentencepiece",
    "library_errors",
    "open_tokenizer",
    "read_facts",
    "read_manifest",
    "sha256_of",
    "tokenizer_file",
]
