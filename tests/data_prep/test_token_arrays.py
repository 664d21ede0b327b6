"""Tests of the writer of a token array: ids are checked, and the documents of a dropped input are
removed."""

from __future__ import annotations

import numpy as np
import pytest

from data_prep.tokenize.store import TokenArrayWriter
from optimus.errors import DataError

VOCAB, EOS = 300, 7


@pytest.fixture(params=[False, True], ids=["plain", "packed"])
def array(request, tmp_path):
    with open(tmp_path / "array", "wb") as file:
        yield TokenArrayWriter(file, VOCAB, "uint16", EOS, request.param)


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


def test_ids_outside_the_vocabulary_are_refused(array):
    array.append([ids(0, VOCAB - 1)], [(0, 0)])
    array.extend(ids(VOCAB - 1))
    for outside in (VOCAB, 70000):
        with pytest.raises(
            DataError, match=f"returned id {outside}, outside its vocabulary of 300"
        ):
            array.append([ids(1, outside)], [(0, 0)])
        with pytest.raises(
            DataError, match=f"returned id {outside}, outside its vocabulary of 300"
        ):
            array.extend(ids(outside))


def test_eos_within_a_document_is_refused(array):
    """Documents end at EOS, so an EOS at another position is an error."""
    for text in ([EOS], [1, EOS], [EOS, EOS, 2]):
        with pytest.raises(DataError, match="returned the EOS id for plain text"):
            array.append([ids(*text)], [(0, 0)])
        with pytest.raises(DataError, match="returned the EOS id for plain text"):
            array.extend(ids(*text))


def test_eos_within_a_document_is_refused_with_its_line(array):
    with pytest.raises(DataError, match="^b.txt:3: the tokenizer returned the EOS id"):
        array.append([ids(1), ids(EOS)], [(0, 1), (0, 3)], (), ["b.txt:1", "b.txt:3"])
    with pytest.raises(DataError, match="^b.txt:4: the tokenizer returned the EOS id"):
        array.extend(ids(EOS), "b.txt:4")


def test_document_written_in_sections_equals_a_document_written_at_once(array):
    array.append([ids(1, 2, 3), ids(4)], [(0, 1), (0, 2)])
    at_once = array.checkpoint()
    for section in (ids(1, 2), ids(3)):
        array.extend(section)
    array.close(0, 1)
    array.extend(ids(4))
    array.close(0, 2)
    tokens, rows, id_hashes = array.checkpoint()
    assert (tokens, id_hashes) == (at_once[0], at_once[2])
    assert np.frombuffer(rows, "<i8").reshape(-1, 3).tolist() == [[10, 0, 1], [12, 0, 2]]


def test_checkpoint_after_a_dropped_input_has_all_other_documents(array, tmp_path):
    array.append([ids(1, 2), ids(3)], [(0, 1), (0, 2)])
    array.checkpoint()
    array.append([ids(4)], [(1, 1)])
    array.checkpoint()
    array.drop_input(1)
    array.append([ids(5)], [(2, 1)])
    tokens, rows, id_hashes = array.checkpoint()
    assert np.frombuffer(rows, "<i8").reshape(-1, 3).tolist() == [[3, 0, 1], [5, 0, 2], [7, 2, 1]]
    packed = type(array._store).__name__ == "PackedStore"
    with open(tmp_path / "again", "wb") as file:
        again = TokenArrayWriter(file, VOCAB, "uint16", EOS, packed)
        again.restore(range(3), tokens, rows, id_hashes)
        assert (again.tokens, again.documents) == (array.tokens, array.documents) == (7, 3)
        assert again.finish() == array.finish()
