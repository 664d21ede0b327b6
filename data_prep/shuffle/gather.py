"""Collecting instances from token arrays in a given order, in bounded memory.

Legend: R rows asked for, C context, U units. The bytes that come out are those of reading the
instances one by one; how they are read is a matter of speed alone.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from data_prep.layout import HEADER_BYTES, little_endian
from data_prep.shuffle.blend import BlendOrder
from data_prep.shuffle.shuffle import Order
from data_prep.tokenize.token_arrays import TokenArrayReader

INDEX_BYTES = 80
"""Memory of a row beside its tokens: ten 8-byte temporaries of `Gatherer.rows`."""

_DENSE = 4
"""Where wanted rows are at least a quarter of a stretch, the stretch is read whole: one sequential
read costs less than the random reads it replaces."""


class Gatherer:
    """Gives rows of source instances, until closed; not for two threads."""

    def __init__(self, dataset: Path, order: Order, window_bytes: int):
        self._context = order.context
        self._dtype = little_endian(order.dtype)
        self._starts = order.starts()
        self._window_tokens = max(window_bytes // self._dtype.itemsize, order.context)
        self._reader = TokenArrayReader(dataset / order.tokens_dir, order.dtype)

    def close(self) -> None:
        self._reader.close()

    def rows(self, instances: np.ndarray, out: np.ndarray) -> np.ndarray:
        """`out` [R, C] with the tokens of source instances int64 [R], in the order asked for.

        A buffer used again saves the kernel from clearing new pages, a tenth of the time.
        """
        self.fill(out, np.arange(len(instances)), instances)
        return out

    def fill(self, out: np.ndarray, at: np.ndarray, instances: np.ndarray) -> None:
        """out[at[i]] = the tokens of source instance instances[i], for all i."""
        order = np.argsort(instances)
        places = at[order]
        begins = instances[order] * self._context
        units = np.searchsorted(self._starts, begins, side="right") - 1
        crosses = begins + self._context > self._starts[units + 1]
        for row in np.flatnonzero(crosses):
            self._read_across(out[places[row]], int(units[row]), int(begins[row]))
        inside = np.flatnonzero(~crosses)
        edges = np.flatnonzero(np.diff(units[inside])) + 1
        for group in np.split(inside, edges) if inside.size else ():
            unit = int(units[group[0]])
            self._read_within(out, unit, begins[group] - self._starts[unit], places[group])

    def _read_across(self, row: np.ndarray, unit: int, begin: int) -> None:
        """Fill `row` with an instance that begins in `unit` and ends in a later one."""
        filled = 0
        while filled < len(row):
            offset = begin + filled - int(self._starts[unit])
            count = min(
                len(row) - filled, int(self._starts[unit + 1] - self._starts[unit]) - offset
            )
            if count:  # an array may be empty
                self._reader.read_into(row[filled : filled + count], unit, offset)
            filled += count
            unit += 1

    def _read_within(
        self, out: np.ndarray, unit: int, offsets: np.ndarray, places: np.ndarray
    ) -> None:
        """Fill out[places] with the instances at ascending `offsets` of one unit."""
        context, first = self._context, 0
        while first < len(offsets):
            begin = int(offsets[first])
            last = int(np.searchsorted(offsets, begin + self._window_tokens - context, "right"))
            last = max(last, first + 1)
            end = int(offsets[last - 1]) + context
            if (last - first) * context * _DENSE >= end - begin:
                window = self._reader.read(unit, begin, end).reshape(-1, context)
                out[places[first:last]] = window[(offsets[first:last] - begin) // context]
            else:
                self._read_rows(out, unit, offsets[first:last], places[first:last])
            first = last

    def _read_rows(
        self, out: np.ndarray, unit: int, offsets: np.ndarray, places: np.ndarray
    ) -> None:
        """Fill out[places] one by one. The loop is lean: a row costs little more than its read."""
        fd, size = self._reader.descriptor(unit), self._context * self._dtype.itemsize
        if fd is None:  # packed: neighbours come out of one block
            for offset, place in zip(offsets.tolist(), places.tolist(), strict=True):
                self._reader.read_into(out[place], unit, offset)
            return
        begins = HEADER_BYTES + offsets * self._dtype.itemsize
        for begin, offset, place in zip(
            begins.tolist(), offsets.tolist(), places.tolist(), strict=True
        ):
            if os.preadv(fd, (out[place],), begin) != size:
                self._reader.read_into(out[place], unit, offset)


class BlendGatherer:
    """Gives rows of a blend's instances, until closed; not for two threads."""

    def __init__(self, dataset: Path, order: BlendOrder, window_bytes: int):
        self._order = order
        self._sources = [Gatherer(dataset, source, window_bytes) for source in order.sources]

    def close(self) -> None:
        for source in self._sources:
            source.close()

    def rows(self, instances: np.ndarray, out: np.ndarray) -> np.ndarray:
        """`out` [R, C] with the tokens of blend instances int64 [R], in the order asked for."""
        for number, places, own in self._order.split(instances):
            self._sources[number].fill(out, places, own)
        return out


def open_gatherer(
    dataset: Path, order: Order | BlendOrder, window_bytes: int
) -> Gatherer | BlendGatherer:
    """What gives the rows of an order, read through windows of `window_bytes`."""
    if isinstance(order, BlendOrder):
        return BlendGatherer(dataset, order, window_bytes)
    return Gatherer(dataset, order, window_bytes)
