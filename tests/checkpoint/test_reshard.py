"""Tests of loading under another layout, from real files, and of plans for many ranks."""

from __future__ import annotations

import gc
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest

from optimus.checkpoint import shard_file
from optimus.checkpoint import weights as weights_module
from optimus.checkpoint.index import ADAMW_STATES, Index, ShardReport, decode, encode
from optimus.checkpoint.load import plan_reads
from optimus.checkpoint.shard_file import ShardFile
from optimus.checkpoint.slices import ParamSlice, StateSlice, intersect, slices_to_write
from optimus.checkpoint.weights import ShardWeights
from optimus.config import load_config
from optimus.distributed.mesh import Mesh
from optimus.errors import CheckpointError
from tests.kit.layouts.reshard import (
    BLOCK_BYTES,
    Holdings,
    all_layouts,
    all_shapes,
    assert_loads,
    layout_config,
    pairwise,
    requests_of,
    save,
    take,
    whole_states,
)
from tests.kit.runs.saves import block_bytes

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def random_box(shape, generator):
    """Return a random box: for each dim, one or two index ranges."""
    box = []
    for size in shape:
        cuts = sorted(generator.sample(range(size + 1), 4))
        box.append(((cuts[0], cuts[1]), (cuts[2], cuts[3]))[: generator.choice((1, 2))])
    return tuple(box)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_intersect_returns_the_common_elements_of_two_boxes(dims):
    generator = random.Random(dims)
    for _ in range(150):
        shape = tuple(generator.randint(4, 9) for _ in range(dims))
        whole = numpy.arange(numpy.prod(shape)).reshape(shape)
        disk, box = random_box(shape, generator), random_box(shape, generator)
        if generator.random() < 0.3:  # in these cases, the boxes differ in at most one dim
            box = (box[0], *disk[1:])
        full = ParamSlice("p", disk, 0, 10**6)
        size = len(take(whole, full._replace(box=box)))
        start = generator.randint(0, size - 1)
        request = ParamSlice("p", box, start, generator.randint(start + 1, size))
        stored_values, wanted = take(whole, full), take(whole, request)
        result = numpy.full(len(wanted), -1)
        for offset, at, length in intersect(disk, request).tolist():
            result[at : at + length] = stored_values[offset : offset + length]
        expected = numpy.where(numpy.isin(wanted, stored_values), wanted, -1)
        assert numpy.array_equal(result, expected)


def test_pairs_contain_all_meshes():
    pairs = pairwise()
    meshes = {layout.mesh for layout in all_layouts()}
    assert len(meshes) == 35 and len(pairs) < 50
    for side in zip(*pairs, strict=True):
        assert {layout.mesh for layout in side} == meshes


@pytest.fixture
def small_blocks() -> Iterator[None]:
    with block_bytes(BLOCK_BYTES):
        yield


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("third", range(3))
def test_a_layout_reads_the_bits_that_another_layout_wrote(tmp_path, third):
    """Save with one layout and load with another, for a third of the pairs in `pairwise()`. The
    script scripts/drills/reshard.py tests more pairs of layouts."""
    for number, (layout, other) in enumerate(pairwise()[third::3]):
        holdings = layout.holdings()
        states = whole_states(all_shapes(holdings), seed=number)
        directory = tmp_path / str(number)
        directory.mkdir()
        index = save(directory, holdings, states, layout.scatter)
        assert_loads(directory, index, other.holdings(), states)


def test_an_index_with_missing_rows_is_refused(tmp_path):
    mesh = Mesh(dp=2)
    holdings = Holdings(layout_config(mesh, optim__sharding="so"), mesh)
    states = whole_states(all_shapes(holdings))
    index = save(tmp_path, holdings, states)
    stored = index.stored("embed.weight")
    request = ParamSlice("embed.weight", stored.boxes[0], 0, stored.rows[-1, 3])
    assert stored.element_ranges(request)[:, 3].sum() == request.stop
    less = type(stored)(stored.name, stored.boxes, stored.rows[:-1])
    with pytest.raises(CheckpointError, match="lacks elements of parameter embed.weight"):
        less.element_ranges(request)
    with pytest.raises(CheckpointError, match="no parameter x"):
        index.stored("x")


def weights_of(path: Path, index: Index) -> ShardWeights:
    return ShardWeights(SimpleNamespace(path=path, index=lambda: index, check_rows=lambda _: None))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("open_files", [2, 32])
def test_weights_are_assembled_from_the_slices_of_all_ranks(tmp_path, monkeypatch, open_files):
    monkeypatch.setattr(weights_module, "BATCH_ELEMENTS", 1000)
    monkeypatch.setattr(weights_module, "_OPEN_FILES", open_files)
    mesh = Mesh(pp=2, ep=2, tp=2)
    holdings = Holdings(layout_config(mesh, optim__sharding="so"), mesh)
    states = whole_states(all_shapes(holdings))
    index = save(tmp_path, holdings, states)
    result = {name: numpy.full(shape, numpy.nan) for name, shape in all_shapes(holdings).items()}
    shard_file.traffic.update(opens=0, bytes=0)
    with weights_of(tmp_path, index) as weights:
        for name, start, values in weights.ranges():
            result[name].reshape(-1)[start : start + len(values)] = values
    assert all(numpy.array_equal(result[name], whole) for name, whole in states["master"].items())
    if open_files == 32:  # every file stays open, and few blocks are read twice
        assert shard_file.traffic["opens"] == 8
        blocks = sum(math.ceil(shard.size / 3 / BLOCK_BYTES) for shard in index.shards)
        assert shard_file.traffic["bytes"] <= 2 * blocks * BLOCK_BYTES + 8 * shard_file.HEADER_BYTES


def test_incomplete_weights_are_refused(tmp_path):
    mesh = Mesh(tp=2)
    holdings = Holdings(layout_config(mesh), mesh)
    index = save(tmp_path, holdings, whole_states(all_shapes(holdings)))
    raw = json.loads(index.lines["embed.weight"])
    # A row is missing, or another row is in its place and the number of elements is correct.
    for rows in (raw["rows"][:-1], [*raw["rows"][:-1], raw["rows"][0]]):
        line = json.dumps(raw | {"rows": rows})
        less = replace(index, lines={**index.lines, "embed.weight": line})
        with pytest.raises(CheckpointError, match="every element of parameter embed.weight"):
            list(weights_of(tmp_path, less))


def simulated_report(holdings: Holdings, rank: int, slices: list[StateSlice]) -> ShardReport:
    """Return the report that a writer of `slices` would make, without writing a file."""
    at, boxes, rows, size = (
        4096,
        {},
        [],
        sum(s.stop - s.start for s in slices) * 4,
    )
    for state_slice in slices:
        for (name, box, start, stop), offset in state_slice.params:
            offsets = [at + offset * 4 + state * size for state in range(len(ADAMW_STATES))]
            rows.append((boxes.setdefault((name, box), len(boxes)), start, stop, *offsets))
        at += (state_slice.stop - state_slice.start) * 4
    blocks = -(-(3 * size + 4096) // shard_file.BLOCK_BYTES)
    return ShardReport(ShardFile(rank, 3 * size + 4096, "0" * 16 * blocks), list(boxes), rows)


def processor_s(function, *arguments):
    """Call `function(*arguments)`. Return the processor time of the call in seconds, and its
    result."""
    started = time.process_time()
    result = function(*arguments)
    return time.process_time() - started, result


def test_planning_for_ten_thousand_ranks_opens_few_files_and_reads_no_more(capsys):
    """The test checks the files and elements that a rank reads under another layout. The test
    prints the processor times of the plans of all writers, of the index, and of the plan of the
    reads, but does not check these times, because they depend on the machine."""
    path = CONFIGS / "model" / "mula-220b-a10b.toml"

    def holdings(mesh: Mesh, sharding: str) -> Holdings:
        sizes = [f"parallel.{axis}={size}" for axis, size in mesh._asdict().items()]
        return Holdings(load_config(path, [*sizes, f"optim.sharding={sharding}"]), mesh)

    saved = holdings(Mesh(pp=2, dp=416, ep=12), "epso")
    assert saved.mesh.world_size == 9984
    shapes = saved.of(0).shapes | saved.of(9983).shapes  # of both stages
    of_writers, written = 0.0, []
    # In a run, only the first rank has all reports. Garbage collection would scan the reports of
    # this test many times, and the measured times would include the scans.
    gc.disable()
    for rank in range(9984):
        holding, coordinate = saved.of(rank), saved.mesh.coordinate(rank)
        seconds, slices = processor_s(
            slices_to_write, holding.shards, holding.boxes, saved.mesh, coordinate
        )
        of_writers += seconds
        written.append(simulated_report(saved, rank, slices))
    gc.enable()
    of_index, data = processor_s(encode, "g", 1, ADAMW_STATES, written, shapes)
    rows = sum(len(report.rows) for report in written)
    del written
    other = holdings(Mesh(pp=4, dp=312, ep=4, tp=2), "so")
    of_readers, opened = [], []
    for rank in (0, 1, 4992, 9983):
        requests = requests_of(other.of(rank), other, rank, fill=False)
        seconds, runs = processor_s(lambda requests: plan_reads(decode(data), requests), requests)
        of_readers.append(seconds)
        opened.append(len(set(runs[:, 0].tolist())))
        needed = sum(len(request.memory) for request in requests)
        assert 0.97 * needed <= runs[:, 4].sum() <= needed
    total = of_writers + of_index + max(of_readers)
    with capsys.disabled():
        print(
            f"\n{rows} slices; CPU s: plans of all writers {of_writers:.1f}, the index of "
            f"{len(data) / 1e6:.0f} MB {of_index:.1f}, what one rank reads {max(of_readers):.2f}; "
            f"in sum {total:.1f}; files that a rank opens {opened}"
        )
    assert max(opened) < 50
