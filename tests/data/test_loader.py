"""Tests of Loader: instances on any number of ranks, prefetching, read errors and closing."""

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
    """Concatenate the tokens of all microbatches: int64 [instances, context]."""
    return torch.cat([microbatch.tokens for microbatch in microbatches])


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "optimus-loader"]


@pytest.fixture
def dataset(tiny_data):
    yield TokenDataset(tiny_data)
    assert not loader_threads(), "a thread runs after its loader was closed"


@pytest.mark.parametrize(("size", "ranks"), [(1, 1), (3, 2), (2, 3), (1, 4)])
def test_ranks_of_any_layout_together_read_the_instances_of_a_step(dataset, size, ranks):
    """Together, the ranks read all instances of a step in order, also in a step in which an epoch
    ends."""
    per_step = 12
    wrap = dataset.num_instances // per_step + 1
    assert dataset.num_instances % per_step, "an epoch must end within a step"
    loaders = [Loader(dataset, per_step, size, rank, ranks) for rank in range(ranks)]
    for step in (1, 2, 3, wrap, wrap + 1):
        by_rank = [loader.microbatches(step) for loader in loaders]
        in_order = [batches[i] for i in range(len(by_rank[0])) for batches in by_rank]
        assert all(batch.tokens.dtype == torch.int64 for batch in in_order)
        assert all(batch.tokens.shape == (size, dataset.context) for batch in in_order)
        assert all(batch.document_ids is None for batch in in_order)
        expected = dataset.read((step - 1) * per_step, step * per_step)
        assert torch.equal(joined(in_order), torch.from_numpy(expected))
    for loader in loaders:
        loader.close()


def test_thread_reads_ahead_and_steps_may_come_in_any_order(dataset, monkeypatch):
    reads = []
    read = dataset.read

    def record(start, stop, out):
        reads.append((start, stop))
        return read(start, stop, out)

    monkeypatch.setattr(dataset, "read", record)
    with Loader(dataset, 4, 4, 0, 1) as loader:
        first = loader.microbatches(1)[0].tokens
        deadline = time.monotonic() + 10
        while len(reads) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert reads[:3] == [(0, 4), (4, 12), (12, 28)], (
            "each group is twice as long as the one before"
        )
        time.sleep(0.05)
        assert len(reads) <= 4, "the number of groups read ahead is limited"
        for step in (9, 2, 3, 4, 5, 5, 2, 2, 1):
            expected = torch.from_numpy(read((step - 1) * 4, step * 4))
            assert torch.equal(loader.microbatches(step)[0].tokens, expected)
        assert torch.equal(loader.microbatches(1)[0].tokens, first)


def test_groups_of_updates_are_limited_in_bytes(dataset, monkeypatch):
    reads = []
    read = dataset.read
    monkeypatch.setattr(dataset, "read", lambda *args: reads.append(args[:2]) or read(*args))
    monkeypatch.setattr("optimus.data.loader._GROUP_BYTES", 3 * 4 * dataset.context * 8)
    with Loader(dataset, 4, 2, 0, 1) as loader:
        for step in range(1, 12):
            loader.microbatches(step)
    assert reads[:4] == [(0, 4), (4, 12), (12, 24), (24, 36)], "never above three updates"


@pytest.mark.parametrize("document_mask", [False, True])
def test_memory_of_a_referenced_batch_is_not_reused(dataset, monkeypatch, document_mask):
    """The test keeps slices of some batches. The loader must not reuse the memory of these batches,
    but reuses the memory of other batches."""
    monkeypatch.setattr("optimus.data.loader._GROUP_BYTES", 2 * 4 * dataset.context * 8)
    kept, addresses = {}, set()
    with Loader(dataset, 4, 2, 0, 1, document_mask) as loader:
        for step in range(1, 100):
            batch = loader.microbatches(step)[1]
            addresses.add(batch.tokens.data_ptr())
            if step % 9 == 0:
                kept[step] = (batch.tokens[1:, 3:], batch.document_ids)
            del batch
    for step, (tokens, ids) in kept.items():
        expected = dataset.read(step * 4 - 2, step * 4)
        assert np.array_equal(tokens.numpy(), expected[1:, 3:])
        assert not document_mask or np.array_equal(
            ids.numpy(), document_ids(expected, dataset.eos_id)
        )
    assert len(addresses) < 60, "memory is not reused"


def test_read_error_is_raised_at_its_update(many_shards, tmp_path):
    """A shard is damaged. Only the request for the update that needs this shard raises an error."""
    data = tmp_path / "data"
    shutil.copytree(many_shards, data)
    intact, dataset = TokenDataset(many_shards), TokenDataset(data)
    shard = data / "shards" / "shard-00002.npy"  # has instances 6, 7 and 8
    shard.write_bytes(shard.read_bytes()[:-1])
    with Loader(dataset, 2, 1, 0, 1) as loader:
        for step in (1, 2, 3):
            expected = torch.from_numpy(intact.read(2 * step - 2, 2 * step))
            assert torch.equal(joined(loader.microbatches(step)), expected)
        for _ in range(2):
            with pytest.raises(DataError, match=r"shard-00002\.npy"):
                loader.microbatches(4)
        assert not loader_threads()
        assert loader.microbatches(1) and loader_threads()
    assert not loader_threads()


def test_close_ends_a_waiting_thread(dataset):
    loader = Loader(dataset, 4, 2, 0, 1)
    loader.microbatches(1)
    time.sleep(0.05)  # the thread has read enough and waits
    start = time.monotonic()
    loader.close()
    loader.close()
    assert time.monotonic() - start < 5 and not loader_threads()


def test_document_ids_count_the_documents_that_end_before_a_token():
    """An EOS token is the last token of its document, so the token after the EOS token is the first
    with the next id."""
    tokens = np.array([[5, 0, 6, 7, 0], [0, 0, 1, 2, 3], [1, 2, 3, 4, 5]])
    ids = document_ids(tokens, 0)
    assert ids.tolist() == [[0, 0, 1, 1, 1], [0, 1, 2, 2, 2], [0, 0, 0, 0, 0]]
    assert document_ids(tokens[:, :1], 0).tolist() == [[0], [0], [0]]
    assert ids.dtype == np.int32 and document_ids(tokens, 9).max() == 0
    random = np.random.default_rng(0).integers(0, 3, (50, 17))
    counted = np.cumsum(random == 0, axis=1) - (random == 0)
    assert np.array_equal(document_ids(random, 0, np.empty((50, 17), np.int32)), counted)


def test_document_mask_adds_ids_to_the_same_tokens(dataset):
    """Document ids increase by 1 after each EOS token and nowhere else."""
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
