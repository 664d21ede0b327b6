"""scripts/bench/frames.py lists the files of each operation, and finds at most MOST_FRAMES stack
frames between backward and a reduce-scatter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import frames

from optimus.distributed.world import start_world

MOST_FRAMES = 5
"""Maximum number of stack frames of Optimus between torch's backward and a reduce-scatter."""


def measure(folder: str) -> dict[str, Any]:
    return frames.measure_ranks(start_world(device="cpu"), Path(folder))


def test_few_frames_between_backward_and_reduce_scatter(ranks, tmp_path):
    result = ranks(2, measure, str(tmp_path), start_world=False)[0]
    assert 0 < len(result["reduce-scatter"]) <= MOST_FRAMES, result["reduce-scatter"]
    assert "optimus/train/update.py" in result["files"]["an update, ep = 2"]
    assert "optimus/checkpoint/shard_file.py" in result["files"]["a full save"]
    assert "optimus/checkpoint/load.py" in result["files"]["a load"]
    assert "5" in frames.format_result(result, True)


def test_files_of_a_tokenized_document(tmp_path):
    assert "data_prep/sources/documents.py" in frames.measure_tokenize(tmp_path)
