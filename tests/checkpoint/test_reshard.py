"""Any layout to any layout, by plans over real files; and how long planning takes on many ranks."""

from __future__ import annotations

import itertools
import random
import time
from pathlib import Path

import numpy
import pytest

from optimus.checkpoint import shards
from optimus.checkpoint.index import STATES, Written, decode, encode
from optimus.checkpoint.pieces import Piece, spans_to_write
from optimus.checkpoint.reshard import runs_between
from optimus.checkpoint.shards import ShardFile
from optimus.checkpoint.transfer import plan_reads
from optimus.config import load_config
from optimus.dist.mesh import Mesh
from optimus.errors import CheckpointError
from tests.helpers.held import Holdings, layout_config
from tests.helpers.shards import all_shapes, assert_loads, save, take, wants_of, whole_states

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def random_box(shape, generator):
    """One or two ranges of each dim."""
    box = []
    for size in shape:
        cuts = sorted(generator.sample(range(size + 1), 4))
        box.append(((cuts[0], cuts[1]), (cuts[2], cuts[3]))[: generator.choice((1, 2))])
    return tuple(box)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_runs_between_any_two_boxes_carry_what_both_have(dims):
    generator = random.Random(dims)
    for _ in range(150):
        shape = tuple(generator.randint(4, 9) for _ in range(dims))
        whole = numpy.arange(numpy.prod(shape)).reshape(shape)
        disk, box = random_box(shape, generator), random_box(shape, generator)
        if generator.random() < 0.3:  # often they differ in one dim alone
            box = (box[0], *disk[1:])
        full = Piece("p", disk, 0, 10**6)
        size = len(take(whole, full._replace(box=box)))
        start = generator.randint(0, size - 1)
        want = Piece("p", box, start, generator.randint(start + 1, size))
        there, wanted = take(whole, full), take(whole, want)
        found = numpy.full(len(wanted), -1)
        for offset, at, length in runs_between(disk, want).tolist():
            found[at : at + length] = there[offset : offset + length]
        expected = numpy.where(numpy.isin(wanted, there), wanted, -1)
        assert numpy.array_equal(found, expected)


def layouts():
    """Every mesh of 1, 2 and 4 ranks, with each way to divide the states, lengths and ends."""
    for sizes in itertools.product((1, 2, 4), repeat=4):
        if numpy.prod(sizes) <= 4:
            for sharding in ("none", "so", "epso"):
                yield Mesh(*sizes), sharding


def pairs(count=24, seed=1):
    every = list(layouts())
    generator = random.Random(seed)
    return [(generator.choice(every), generator.choice(every)) for _ in range(count)]


@pytest.mark.parametrize("number", range(3))
def test_what_one_layout_wrote_another_reads_to_the_bit(tmp_path, number, monkeypatch):
    monkeypatch.setattr(shards, "BLOCK_BYTES", 1 << 13)
    monkeypatch.setattr("optimus.checkpoint.index.BLOCK_BYTES", 1 << 13)
    for count, pair in enumerate(pairs()[number * 8 : number * 8 + 8]):
        holdings = []
        for which, (mesh, sharding) in enumerate(pair):
            model = {"model__num_layers": 4, "model__tie_embeddings": number > 0}
            length = (700, 1 << 24)[which ^ count % 2]
            schedule = {"parallel__schedule": "1f1b"}
            if mesh.pp == 2 and number == 2:
                schedule = {"parallel__schedule": "interleaved", "parallel__virtual_stages": 2}
            settings = {"optim__sharding": sharding, "optim__chunk_length": length}
            config = layout_config(mesh, **model, **settings, **schedule)
            holdings.append(Holdings(config, mesh))
        states = whole_states(all_shapes(holdings[0]), seed=count)
        directory = tmp_path / str(count)
        directory.mkdir()
        index = save(directory, holdings[0], states, ("balanced", "paper")[count % 2])
        assert_loads(directory, index, holdings[1], states)


def test_the_same_layout_reads_each_byte_of_its_own_file_once(tmp_path):
    mesh = Mesh(pp=2, dp=2)
    holdings = Holdings(layout_config(mesh, optim__sharding="so"), mesh)
    states = whole_states(all_shapes(holdings))
    index = save(tmp_path, holdings, states)
    shards.traffic.update(opens=0, bytes=0)
    assert_loads(tmp_path, index, holdings, states)
    headers = 4 * shards.HEADER_BYTES
    assert shards.traffic["opens"] == 4
    assert shards.traffic["bytes"] == sum(shard.size for shard in index.shards) + headers


def test_an_index_that_leads_to_too_little_is_refused(tmp_path):
    mesh = Mesh(dp=2)
    holdings = Holdings(layout_config(mesh, optim__sharding="so"), mesh)
    states = whole_states(all_shapes(holdings))
    index = save(tmp_path, holdings, states)
    stored = index.stored("embed.weight")
    want = Piece("embed.weight", stored.boxes[0], 0, stored.rows[-1, 3])
    assert stored.element_runs(want)[:, 3].sum() == want.stop
    less = type(stored)(stored.name, stored.boxes, stored.rows[:-1])
    with pytest.raises(CheckpointError, match="only a part of parameter embed.weight"):
        less.element_runs(want)
    with pytest.raises(CheckpointError, match="no parameter x"):
        index.stored("x")


def simulated_save(holdings: Holdings) -> list[Written]:
    """What the writers of a save would report, without their files."""
    mesh, written = holdings.mesh, []
    for rank in range(mesh.world_size):
        one, at, pieces = holdings.of(rank), 4096, []
        spans = spans_to_write(one.held, one.boxes, mesh, mesh.place(rank))
        size = sum(span.stop - span.start for span in spans) * 4
        for span in spans:
            pieces += [
                (piece, tuple(at + place * 4 + state * size for state in range(len(STATES))))
                for piece, place in span.pieces
            ]
            at += (span.stop - span.start) * 4
        blocks = -(-(3 * size + 4096) // shards.BLOCK_BYTES)
        written.append(Written(ShardFile(rank, 3 * size + 4096, "0" * 16 * blocks), pieces))
    return written


def test_planning_for_ten_thousand_ranks_takes_seconds(capsys):
    """The index as the first rank makes it, then a rank's own plan under another layout."""
    path = CONFIGS / "model" / "mula-220b-a10b.toml"

    def holdings(mesh: Mesh, sharding: str) -> Holdings:
        sizes = [f"parallel.{axis}={size}" for axis, size in mesh.sizes._asdict().items()]
        return Holdings(load_config(path, [*sizes, f"optim.sharding={sharding}"]), mesh)

    saved = holdings(Mesh(pp=2, dp=416, ep=12), "epso")
    assert saved.mesh.world_size == 9984
    shapes = all_shapes(saved)  # and lays out all chunks
    started = time.process_time()
    written = simulated_save(saved)
    reported = time.process_time()
    data = encode("g", 1, written, shapes)
    encoded = time.process_time() - reported
    index = decode(data)
    rows = sum(line.count("],[") for line in index.lines.values())
    other = holdings(Mesh(pp=4, dp=312, ep=4, tp=2), "so")
    other.of(0)
    planned = []
    for rank in (0, 1, 4992, 9983):
        wants = wants_of(other.of(rank), other, rank)
        start = time.process_time()
        runs = plan_reads(decode(data), wants)
        planned.append(time.process_time() - start)
        needed = sum(len(want.memory) for want in wants)
        assert 0.97 * needed <= runs[:, 4].sum() <= needed
    with capsys.disabled():
        print(
            f"\n{rows} pieces; CPU s: plans of all writers {reported - started:.1f}, the index "
            f"of {len(data) / 1e6:.0f} MB {encoded:.1f}, what one rank reads {max(planned):.2f}"
        )
    assert encoded < 10 and max(planned) < 10
