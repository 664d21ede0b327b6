"""Rows of a finished data set, by memory mapping, opened when first needed."""

from __future__ import annotations

import mmap
import os
import threading
from collections import OrderedDict
from pathlib import Path

import numpy as np

from data_prep import layout
from data_prep.dataset.manifest import Manifest
from optimus.errors import DamageError, DataError
from optimus.io import files

_OPEN_SHARDS = 64


class ShardReader:
    """Reads rows of the shards in their stored order. Threads may share it.

    At most 64 shards are mapped at a time, so neither descriptors nor mapped memory grow with a
    data set of ten thousand shards.
    """

    def __init__(self, dataset: Path, manifest: Manifest):
        self._dataset, self._manifest = dataset, manifest
        self._dtype = layout.little_endian(manifest.dtype)
        self._open: OrderedDict[int, np.ndarray] = OrderedDict()  # shard -> [n, C], oldest first
        self._lock = threading.Lock()

    def rows(self, first: int, stop: int, left: int = 0, right: int | None = None) -> np.ndarray:
        """Columns [left, right), or all from `left` on, of rows [first, stop) as a new array in the
        data set's dtype."""
        right = self._manifest.context if right is None else right
        out = np.empty((stop - first, right - left), self._dtype)
        self.rows_into(out, first, left)
        return out

    def rows_into(self, out: np.ndarray, first: int, left: int = 0) -> None:
        """Fill `out` [n, c], of any dtype that holds the ids, with the columns [left, left + c) of
        the rows from `first` on."""
        right = left + out.shape[1]
        length = self._manifest.instances_per_shard
        place = 0
        while place < len(out):
            shard, offset = divmod(first + place, length)
            count = min(len(out) - place, length - offset)
            out[place : place + count] = self._shard(shard)[offset : offset + count, left:right]
            place += count

    def pick_into(
        self, out: np.ndarray, rows: np.ndarray, places: np.ndarray | None = None
    ) -> None:
        """out[places[i]] (or out[i]) = row rows[i] for all i; both int64 [n], `out` [_, C].

        Rows are read in ascending order. The loop is lean: a row costs little more than its copy.
        """
        order = np.argsort(rows)
        shards, offsets = np.divmod(rows[order], self._manifest.instances_per_shard)
        into = order if places is None else places[order]
        opened, view = -1, np.empty((0, 0), self._dtype)
        for place, shard, offset in zip(
            into.tolist(), shards.tolist(), offsets.tolist(), strict=True
        ):
            if shard != opened:
                opened, view = shard, self._shard(shard)
            out[place] = view[offset]

    def _shard(self, shard: int) -> np.ndarray:
        with self._lock:
            rows = self._open.pop(shard, None)
            if rows is None:
                if len(self._open) == _OPEN_SHARDS:
                    self._open.popitem(last=False)  # unmapped once nobody reads it
                rows = self._map(shard)
            self._open[shard] = rows
            return rows

    def _map(self, shard: int) -> np.ndarray:
        entry = self._manifest.shards[shard]
        path = self._dataset / entry.name
        try:
            with files.open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
                if size != entry.size:
                    raise DamageError(
                        f"{path}: has {size} bytes, the manifest says {entry.size}; "
                        "run optimus-data verify"
                    )
                view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from None
        shape = (entry.instances, self._manifest.context)
        return np.frombuffer(view, self._dtype, offset=layout.HEADER_BYTES).reshape(shape)
