"""Reader of the rows (instances) of a finished data set. The shards are memory-mapped."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from data_prep import layout
from data_prep.dataset.manifest import Manifest
from optimus.errors import DamageError, DataError
from optimus.io import files

_OPEN_SHARDS = 64
_STAT_THREADS = 16


class ShardReader:
    """Reader of the rows (instances) of a data set. Threads may share a `ShardReader`.

    Rows are numbered from 0 in the order in which the shards store them. A shard is mapped when one
    of its rows is read for the first time. At most 64 shards are mapped at a time, so that the
    number of descriptors and the mapped memory do not grow with the number of shards.

    Args:
        dataset: Directory of the data set.
        manifest: Manifest of the data set.

    Raises:
        DataError: The methods that read rows raise this error if a shard cannot be read.
        DamageError: The methods that read rows raise this error if the size of a shard differs from
            the size in the manifest.
    """

    def __init__(self, dataset: Path, manifest: Manifest):
        self._dataset, self._manifest = dataset, manifest
        self._dtype = layout.little_endian(manifest.dtype)
        # Maps a shard to [instances, tokens per instance]. The least recently used shard is first.
        self._open: OrderedDict[int, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()

    def rows(self, first: int, stop: int, left: int = 0, right: int | None = None) -> np.ndarray:
        """Return columns [left, right) of rows [first, stop) as a new array in the stored dtype,
        [stop - first, right - left]. If `right` is None, the last column is included."""
        right = self._manifest.context if right is None else right
        out = np.empty((stop - first, right - left), self._dtype)
        self.rows_into(out, first, left)
        return out

    def rows_into(self, out: np.ndarray, first: int, left: int = 0) -> None:
        """Copy columns [left, left + c) of rows [first, first + n) to `out` [n, c].

        `out` has any dtype that can represent the ids.
        """
        right = left + out.shape[1]
        length = self._manifest.instances_per_shard
        row = 0
        while row < len(out):
            shard, offset = divmod(first + row, length)
            count = min(len(out) - row, length - offset)
            out[row : row + count] = self._shard(shard)[offset : offset + count, left:right]
            row += count

    def pick_into(
        self, out: np.ndarray, rows: np.ndarray, targets: np.ndarray | None = None
    ) -> None:
        """Copy row `rows[i]` to `out[targets[i]]` for each i. Rows are read in ascending order.

        Args:
            out: The target, [number of rows, tokens per instance], of any dtype that can represent
                the ids.
            rows: Numbers of the rows, int64 [n].
            targets: Indices of the rows of `out`, int64 [n]. None: row `rows[i]` is copied to
                `out[i]`.
        """
        order = np.argsort(rows)
        shards, offsets = np.divmod(rows[order], self._manifest.instances_per_shard)
        targets = order if targets is None else targets[order]
        opened, view = -1, np.empty((0, 0), self._dtype)
        for target, shard, offset in zip(
            targets.tolist(), shards.tolist(), offsets.tolist(), strict=True
        ):
            if shard != opened:
                opened, view = shard, self._shard(shard)
            out[target] = view[offset]

    def _shard(self, shard: int) -> np.ndarray:
        with self._lock:
            rows = self._open.pop(shard, None)
            if rows is None:
                if len(self._open) == _OPEN_SHARDS:
                    # The shard is unmapped when no array refers to the mapped memory.
                    self._open.popitem(last=False)
                entry = self._manifest.shards[shard]
                path = self._dataset / entry.name
                with self._readable(path), files.open_regular(path) as file:
                    self._check_size(path, os.fstat(file.fileno()).st_size, entry.size)
                    view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                ids = np.frombuffer(view, self._dtype, offset=layout.HEADER_BYTES)
                rows = ids.reshape(entry.instances, self._manifest.context)
            self._open[shard] = rows
            return rows

    def check_sizes(self) -> None:
        """Check that all shards exist and have the sizes in the manifest.

        Raises:
            DataError: A shard is missing or its size cannot be read.
            DamageError: A shard has another size.
        """
        paths = [self._dataset / entry.name for entry in self._manifest.shards]

        def size_of(path: Path) -> int:
            with self._readable(path):
                return os.stat(path).st_size

        # In parallel, because a network file system takes milliseconds per call.
        with ThreadPoolExecutor(_STAT_THREADS) as pool:
            for path, size, entry in zip(
                paths, pool.map(size_of, paths), self._manifest.shards, strict=True
            ):
                self._check_size(path, size, entry.size)

    @contextlib.contextmanager
    def _readable(self, path: Path) -> Iterator[None]:
        """Context manager that converts an OSError to a DataError about the shard at `path`."""
        try:
            yield
        except OSError as error:
            raise DataError(
                f"{path}: cannot be read: {error.strerror}; run optimus-data verify {self._dataset}"
            ) from None

    def _check_size(self, path: Path, size: int, expected: int) -> None:
        if size != expected:
            raise DamageError(
                f"{path}: has {size} bytes, the manifest says {expected}; run optimus-data verify "
                f"{self._dataset}"
            )
