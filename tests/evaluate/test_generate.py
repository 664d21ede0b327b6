from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models

from optimus.config import ModelConfig
from optimus.data.dataset import TokenDataset
from optimus.data.tokenizer import tokenizer_path
from optimus.errors import DataError
from optimus.evaluate.checkpoint import continue_text
from optimus.evaluate.generate import generate, sample_text
from optimus.hf import write_hf
from optimus.model.init import initialise_
from optimus.model.transformer import Transformer
from tests.kit.runs.tiny import tiny_config


def make_model() -> Transformer:
    model = Transformer(tiny_config("d", "r").model)
    initialise_(model, 1)
    return model


def write_model(model: Transformer, path: Path, config: ModelConfig | None = None) -> None:
    weights = ((name, 0, p.detach().flatten()) for name, p in model.named_parameters())
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    write_hf(path, config or model.config, weights, dtypes)


def test_temperature_zero_takes_the_likeliest_token_each_time():
    model, prompt = make_model(), torch.tensor([3, 1, 4])
    new = generate(model, prompt, 5, context=32, temperature=0)
    tokens = prompt
    for expected in new:
        assert int(model(tokens.unsqueeze(0))[0, -1].argmax()) == int(expected)
        tokens = torch.cat([tokens, expected.view(1)])


def test_sampling_depends_on_the_seed_alone_and_keeps_to_the_top():
    model, prompt = make_model(), torch.tensor([3])
    tokens, same = (generate(model, prompt, 20, context=8, seed=5) for _ in range(2))
    assert torch.equal(tokens, same)
    assert not torch.equal(tokens, generate(model, prompt, 20, context=8, seed=6))
    likeliest = generate(model, prompt, 20, context=8, temperature=0)
    assert torch.equal(likeliest, generate(model, prompt, 20, context=8, top_k=1, seed=9))


@pytest.mark.filterwarnings("error")
def test_a_context_beyond_64_bits_is_all_tokens():
    """A context length of 2^64 gives the same result as a context length that covers all tokens. A
    model can have such a length, since `max_position_embeddings` in config.json can be any
    integer."""
    model, prompt = make_model(), torch.tensor([3, 1])
    new = generate(model, prompt, 3, context=1 << 64, temperature=0)
    assert torch.equal(new, generate(model, prompt, 3, context=32, temperature=0))


def test_it_ends_at_the_stop_token():
    model, prompt = make_model(), torch.tensor([3])
    first = int(generate(model, prompt, 1, context=8, temperature=0))
    new = generate(model, prompt, 9, context=8, temperature=0, stop_tokens=(first,))
    assert new.tolist() == [first]


def test_a_continuation_ends_where_the_model_says(tiny_data, tmp_path):
    model = make_model()
    ends = {"none": (), "all": tuple(range(model.config.vocab_size))}
    for name, tokens in ends.items():
        config = model.config.model_copy(update={"eos_token_ids": tokens})
        write_model(model, tmp_path / name, config)
        shutil.copy(tokenizer_path(tiny_data), tmp_path / name)

    def continuation(name: str, tokens: int) -> str:
        return continue_text(str(tmp_path / name), "abc", tokens, temperature=0, top_k=0, seed=0)

    assert continuation("all", 5) == continuation("none", 1) != continuation("none", 5)


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path):
    write_model(make_model(), tmp_path / "m")
    words = models.WordLevel({"?": 0, "abc": 100_000}, unk_token="?")
    Tokenizer(words).save(str(tmp_path / "m" / "tokenizer.json"))
    with pytest.raises(DataError, match=r"tokenizer\.json encodes --prompt with id 100000, but"):
        continue_text(str(tmp_path / "m"), "abc", 1, temperature=0, top_k=0, seed=0)


def test_a_sample_ends_at_the_stop_token(tiny_data):
    model, dataset, cpu = make_model(), TokenDataset(tiny_data), torch.device("cpu")
    short, whole = (sample_text(model, dataset, tokens, cpu, seed=1) for tokens in (1, 5))
    all_tokens = range(model.config.vocab_size)
    assert sample_text(model, dataset, 5, cpu, seed=1, stop_tokens=all_tokens) == short != whole


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_logits_that_are_not_finite_end_nothing(value, temperature):
    """Sampling from infinite or NaN logits must return tokens and raise no error.

    An error on this rank would leave other ranks waiting for the tokens.
    """

    def broken(tokens):
        return torch.full((1, 1, 8), value)

    new = generate(broken, torch.tensor([3]), 4, context=8, temperature=temperature)
    assert len(new) == 4
