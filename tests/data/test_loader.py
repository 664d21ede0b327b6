"""The loader: contiguous ranges on any number of ranks, read ahead, errors and end."""

from __future__ import annotations

import shutil
import threading
import time

import numpy as np
import pytest
import torch

from optimus.data.dataset import TokenDataset
from optimus.data.documents import document_ids
from optimus.data.loader import Loader, Microbatch
from optimus.errors import DataError


def joined(microbatches: list[Microbatch]) -> torch.Tensor:
    """Their tokens, int64 [n, C]."""
    return torch.cat([microbatch.tokens for microbatch in microbatches])


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "optimus-loader"]


@pytest.fixture
def dataset(tiny_data):
    yield TokenDataset(tiny_data)
    assert not loader_threads(), "a thread outlives its loader"


@pytest.mark.parametrize(("size", "ranks"), [(1, 1), (3, 2), (2, 3), (1, 4)])
def test_every_layout_reads_the_same_steps(dataset, size, ranks):
    """Far enough to pass from one epoch into the next in the middle of a step."""
    per_step = 12
    wrap = dataset.num_instances // per_step + 1
    assert dataset.num_instances % per_step, "the example must wrap inside a step"
    loaders = [Loader(dataset, per_step, size, rank, ranks) for rank in range(ranks)]
    for step in (1, 2, 3, wrap, wrap + 1):
        parts = [loader.microbatches(step) for loader in loaders]
        assert all(part.tokens.dtype == torch.int64 for row in parts for part in row)
        assert all(part.tokens.shape == (size, dataset.context) for row in parts for part in row)
        assert all(part.document_ids is None for row in parts for part in row)
        in_order = [row[i] for i in range(len(parts[0])) for row in parts]
        expected = dataset.read((step - 1) * per_step, step * per_step)
        assert torch.equal(joined(in_order), torch.from_numpy(expected))
    for loader in loaders:
        loader.close()


def test_reads_ahead_and_jumps(dataset, monkeypatch):
    asked = []
    read = dataset.read

    def note(start, stop, out):
        asked.append((start, stop))
        return read(start, stop, out)

    monkeypatch.setattr(dataset, "read", note)
    with Loader(dataset, 4, 4, 0, 1) as loader:
        first = loader.microbatches(1)[0].tokens
        deadline = time.monotonic() + 10
        while len(asked) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert asked[:3] == [(0, 4), (4, 12), (12, 28)], "each stretch is twice the last"
        time.sleep(0.05)
        assert len(asked) <= 4, "but not without bound"
        for step in (9, 2, 3, 4, 5, 5, 2, 2, 1):
            expected = torch.from_numpy(read((step - 1) * 4, step * 4))
            assert torch.equal(loader.microbatches(step)[0].tokens, expected)
        assert torch.equal(loader.microbatches(1)[0].tokens, first)


def test_large_updates_are_read_one_at_a_time(dataset, monkeypatch):
    """What is read ahead is bounded in bytes, whatever the size of an update."""
    asked = []
    read = dataset.read
    monkeypatch.setattr(dataset, "read", lambda *given: asked.append(given[:2]) or read(*given))
    monkeypatch.setattr("optimus.data.loader._STRETCH_BYTES", 3 * 4 * dataset.context * 8)
    with Loader(dataset, 4, 2, 0, 1) as loader:
        for step in range(1, 12):
            loader.microbatches(step)
    assert asked[:4] == [(0, 4), (4, 12), (12, 24), (24, 36)], "never above three updates"


@pytest.mark.parametrize("document_mask", [False, True])
def test_a_batch_that_is_held_is_never_written_to(dataset, monkeypatch, document_mask):
    """Memory is used again only when nothing refers to it; the odd batch is kept as a slice."""
    monkeypatch.setattr("optimus.data.loader._STRETCH_BYTES", 2 * 4 * dataset.context * 8)
    held, places = {}, set()
    with Loader(dataset, 4, 2, 0, 1, document_mask) as loader:
        for step in range(1, 100):
            one = loader.microbatches(step)[1]
            places.add(one.tokens.data_ptr())
            if step % 9 == 0:
                held[step] = (one.tokens[1:, 3:], one.document_ids)
            del one
    for step, (tokens, ids) in held.items():
        expected = dataset.read(step * 4 - 2, step * 4)
        assert np.array_equal(tokens.numpy(), expected[1:, 3:])
        assert not document_mask or np.array_equal(
            ids.numpy(), document_ids(expected, dataset.eos_id)
        )
    assert len(places) < 60, "and then it is used again"


def test_an_error_of_the_thread_is_raised_where_it_belongs(many_shards, tmp_path):
    """Updates before the damage are given; the one that meets it raises, however often."""
    data = tmp_path / "data"
    shutil.copytree(many_shards, data)
    whole, dataset = TokenDataset(many_shards), TokenDataset(data)
    shard = data / "shards" / "shard-00002.npy"  # instances 6, 7, 8
    shard.write_bytes(shard.read_bytes()[:-1])
    with Loader(dataset, 2, 1, 0, 1) as loader:
        for step in (1, 2, 3):
            expected = torch.from_numpy(whole.read(2 * step - 2, 2 * step))
            assert torch.equal(joined(loader.microbatches(step)), expected)
        for _ in range(2):
            with pytest.raises(DataError, match=r"shard-00002\.npy"):
                loader.microbatches(4)
        assert not loader_threads()
        assert loader.microbatches(1) and loader_threads()
    assert not loader_threads()


def test_close_ends_a_thread_that_waits_to_hand_over(dataset):
    loader = Loader(dataset, 4, 2, 0, 1)
    loader.microbatches(1)
    time.sleep(0.05)  # the thread now waits to hand over the next update
    start = time.monotonic()
    loader.close()
    loader.close()
    assert time.monotonic() - start < 5 and not loader_threads()


def test_document_ids_count_the_ends_before_a_token():
    """An EOS belongs to the document that it ends."""
    tokens = np.array([[5, 0, 6, 7, 0], [0, 0, 1, 2, 3], [1, 2, 3, 4, 5]])
    ids = document_ids(tokens, 0)
    assert ids.tolist() == [[0, 0, 1, 1, 1], [0, 1, 2, 2, 2], [0, 0, 0, 0, 0]]
    assert document_ids(tokens[:, :1], 0).tolist() == [[0], [0], [0]]
    assert ids.dtype == np.int32 and document_ids(tokens, 9).max() == 0
    random = np.random.default_rng(0).integers(0, 3, (50, 17))
    counted = np.cumsum(random == 0, axis=1) - (random == 0)
    assert np.array_equal(document_ids(random, 0, np.empty((50, 17), np.int32)), counted)


def test_the_mask_comes_with_the_tokens(dataset):
    """The same tokens; the ids end where the tokenizer's EOS stands, and nowhere else."""
    from tokenizers import Tokenizer

    eos = Tokenizer.from_file(dataset.tokenizer_file).token_to_id("<|endoftext|>")
    with (
        Loader(dataset, 24, 4, 0, 2, document_mask=True) as masked,
        Loader(dataset, 24, 4, 0, 2) as plain,
    ):
        ends = 0
        for with_ids, without in zip(masked.microbatches(3), plain.microbatches(3), strict=True):
            assert torch.equal(with_ids.tokens, without.tokens)
            steps = with_ids.document_ids.diff(dim=1)
            assert torch.equal(steps == 1, with_ids.tokens[:, :-1] == eos)
            assert torch.equal(steps == 0, with_ids.tokens[:, :-1] != eos)
            assert not with_ids.document_ids[:, 0].any()
            ends += int(steps.sum())
    assert ends > 0
