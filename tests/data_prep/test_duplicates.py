"""Tests of documents with duplicate ids, which are quarantined (also by several ranks) or refused
with a message that contains the lines of both documents."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from data_prep.cli import main
from data_prep.layout import npy_header, write_checked_json
from data_prep.pipeline.verify import verify
from data_prep.tokenize import duplicates
from data_prep.tokenize.duplicates import find
from data_prep.tokenize.store import hash_of_id
from optimus.io import files
from tests.data_prep.corpus import killed_until_done, refused, tree
from tests.data_prep.test_bad_input import arguments
from tests.data_prep.test_ranks import start_rank, statuses
from tests.data_prep.test_tokenize import stored_documents


def write(folder: Path, **ids_of_files: list[object]) -> None:
    """Write JSON lines files, one for each keyword, with documents that have the given ids. The id
    `...` means a document without id."""
    folder.mkdir(exist_ok=True)
    for name, ids in ids_of_files.items():
        rows = [{"text": f"good text {name} {n}"} for n in range(len(ids))]
        rows = [row if i is ... else {**row, "id": i} for row, i in zip(rows, ids, strict=True)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


MANY = {
    "a": ["x", 5, "y", ..., None, ""],
    "b": ["5", "z", "y", ..., None, ""],
    "c": [*range(100, 160), "z", 5, "z"],
}
GONE = {("b", 3): ("a", 3), ("c", 61): ("b", 2), ("c", 62): ("a", 2), ("c", 63): ("b", 2)}


def test_duplicate_id_is_refused_with_both_lines(made, tmp_path, capsys):
    write(tmp_path / "text", a=MANY["a"], b=MANY["b"])
    command = arguments(made, tmp_path, "--unit-size", "1")
    for _ in range(2):
        error = refused(capsys, command)
        assert "b.jsonl:3: duplicate id 'y': " in error and "a.jsonl:3 has it" in error
        assert "--on-error quarantine" in error and "--id-field ''" in error
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert main([*command, "--out", str(tmp_path / "other"), "--id-field", ""]) == 0
    assert not list((tmp_path / "other" / "tokens").glob("*.ids.npy"))
    assert main([*command, "--on-error", "quarantine"]) == 0, "the run continues with quarantine"
    refused(capsys, command, "duplicate id")  # without quarantine the run is refused


@pytest.mark.parametrize(
    ("ids", "needle"),
    [
        ({"a": [7], "b": [*range(50), 3], "c": [8]}, "b.jsonl:51: duplicate id 3: "),
        ({"a": range(40), "b": range(39, 0, -1), "c": [99]}, "b.jsonl:1: duplicate id 39: "),
        ({"a": range(40), "b": range(39, 80), "c": [99]}, "b.jsonl:1: duplicate id 39: "),
    ],
)
def test_duplicates_in_adjacent_files_are_refused_before_the_last_unit(
    made, tmp_path, capsys, ids, needle
):
    """The first two units contain the duplicates. The third unit is the smallest, and is therefore
    written last. The error must end the run before this unit is written."""
    write(tmp_path / "text", **ids)
    for _ in range(2):
        refused(capsys, arguments(made, tmp_path, "--unit-size", "1"), needle)
        assert not list((tmp_path / "out" / "tokens").glob("unit-00002*"))


def quarantined(out: Path) -> dict[tuple[str, int], tuple[str, int]]:
    duplicates = {}
    for entry in map(json.loads, (out / "quarantine.jsonl").read_text().splitlines()):
        name, line = entry["reason"].split(": ", 1)[1].removesuffix(" has it").rsplit(":", 1)
        duplicates[Path(entry["input"]).stem, entry["line"]] = Path(name).stem, int(line)
    return duplicates


@pytest.mark.parametrize("more", [[], ["--unit-size", "1"], ["--unit-size", "1", "--workers", "2"]])
def test_quarantine_lists_later_duplicates_and_keeps_the_first(
    made, tmp_path, capsys, monkeypatch, more
):
    write(tmp_path / "text", **MANY)
    monkeypatch.setattr(duplicates, "_ROW_BYTES", 64 << 20)  # so that a bucket has few documents
    more = [*more, "--on-error", "quarantine", "--eval-fraction", "0.3", "--json"]
    assert main(arguments(made, tmp_path, *more)) == 0
    assert json.loads(capsys.readouterr().out)["quarantined"] == len(GONE)
    out = tmp_path / "out"
    assert quarantined(out) == GONE
    kept = stored_documents(out) + stored_documents(out / "eval")
    assert {(Path(name).stem, line) for name, line, _ in kept} == {
        (name, line)
        for name, ids in MANY.items()
        for line in range(1, len(ids) + 1)
        if (name, line) not in GONE
    }
    assert main(["verify", str(out)]) == 0
    before = tree(out)
    assert main(arguments(made, tmp_path, *more)) == 0
    assert tree(out) == before
    (out / "tokens" / "duplicates.json").write_text("lost")
    assert any("duplicates.json" in line for line in verify(out))
    assert main(arguments(made, tmp_path, *more)) == 0
    assert tree(out) == before, "duplicates are found again, after the documents were removed"


@pytest.mark.parametrize("fraction", ["0", "0.5"])
def test_unit_whose_ids_are_all_duplicates_is_whole(made, tmp_path, fraction):
    write(tmp_path / "text", a=[*range(20)], b=[*range(20)], c=[1, 2, ..., ...])
    more = ["--unit-size", "1", "--on-error", "quarantine", "--eval-fraction", fraction]
    assert main(arguments(made, tmp_path, *more)) == 0
    assert list(verify(tmp_path / "out")) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda rows: np.add(rows, [99, 0, 0, 0]), "names a document that does not exist"),
        (lambda rows: np.subtract(rows, [99, 0, 0, 0]), "names a document that does not exist"),
        (lambda rows: np.add(rows, [0, 0, 99, 0]), "not in the order of the documents"),
        (lambda rows: rows[[0, 0, 1, 2]], "not in the order of the documents"),
        (lambda rows: rows[:, [0, 1, 0, 1]], "not in the order of the documents"),
        (lambda rows: rows[:0], "tokenization is not complete"),
        (lambda rows: rows[:1], "tokenization is not complete"),
        (lambda rows: rows[0], "its number of rows differs from the count"),
    ],
)
def test_forged_list_of_duplicates_is_refused(made, tmp_path, capsys, change, problem):
    write(tmp_path / "text", **MANY)
    more = ["--on-error", "quarantine"]
    assert main(arguments(made, tmp_path, *more)) == 0
    tokens = tmp_path / "out" / "tokens"
    mark = json.loads((tokens / "duplicates.json").read_text())
    rows = change(np.load(tokens / "duplicates.npy"))
    data = npy_header(rows.shape, "int64") + rows.astype("<i8").tobytes()
    (tokens / "duplicates.npy").write_bytes(data)
    mark |= {"count": len(rows), "xxh3": files.xxh3_bytes(data)}
    del mark["self_xxh3"]
    write_checked_json(tokens / "duplicates.json", mark)
    lines = list(verify(tmp_path / "out"))
    assert any(problem in line and "duplicates" in line for line in lines), lines
    if problem.startswith("tokenization"):  # a valid list, but of other documents
        return
    assert main(arguments(made, tmp_path, *more)) == 0  # ids are compared again
    assert list(verify(tmp_path / "out")) == []


def test_kills_and_ranks_change_no_byte_of_a_quarantine(made, tmp_path):
    write(tmp_path / "text", **MANY)
    base = arguments(made, tmp_path, "--on-error", "quarantine", "--unit-size", "1")
    whole, killed, ranked = (str(tmp_path / name) for name in ("whole", "killed", "ranked"))
    assert main([*base, "--out", whole]) == 0
    assert killed_until_done([*base, "--out", killed])[0] > 8
    assert tree(Path(killed)) == tree(Path(whole))
    command = [*base, "--out", ranked, "--world", "2"]
    assert statuses([start_rank([*command, "--rank", rank]) for rank in "01"]) == [0] * 2
    assert main([*base, "--out", ranked]) == 0  # removes temporary files
    assert tree(Path(ranked)) == tree(Path(whole))


def test_later_steps_refuse_arrays_with_duplicates(made, tmp_path, capsys):
    write(tmp_path / "text", **MANY)
    tokenize, out = arguments(made, tmp_path), str(tmp_path / "out")
    context = ["--context", "4"]
    shuffle, blend = ["shuffle", out, *context], ["blend", "--source", f"{out}=1", *context]
    blend += ["--out", str(tmp_path / "blend"), "--workers", "1"]
    assert main(tokenize) == 2
    capsys.readouterr()
    for command in (shuffle, blend):
        refused(capsys, command, "tokenization is not complete")
    quarantine = [*tokenize, "--on-error", "quarantine"]
    assert main(quarantine) == 0 and main(shuffle) == 0
    sidecar = tmp_path / "out" / "tokens" / "unit-00000.json"
    value = json.loads(sidecar.read_bytes())
    for key in ("self_xxh3", "dropped"):
        value.pop(key)
    capsys.readouterr()
    write_checked_json(sidecar, value)  # as after a kill before the unit is made again
    for command in (shuffle, blend, ["shard", out, "--workers", "1"]):
        refused(capsys, command, "tokenization is not complete")
    assert main(quarantine) == main(blend) == 0


def test_text_field_may_also_be_the_id_field(made, tmp_path, text, capsys):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"text": ["same text here", "other", "same text here"]})
    parquet.write_table(table, text / "a.parquet")
    refused(capsys, arguments(made, tmp_path, "--id-field", "text"), "a.parquet:3: duplicate id")


def test_duplicate_id_in_a_table_is_refused_with_both_rows(made, tmp_path, text, capsys):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"key": [1, 2, None, None, 2], "text": [f"good {n}" for n in range(5)]})
    parquet.write_table(table, text / "a.parquet", row_group_size=2)
    error = refused(capsys, arguments(made, tmp_path, "--id-field", "key"))
    assert "a.parquet:5: duplicate id 2: " in error
    assert "a.parquet:2 has it" in error
    assert main(arguments(made, tmp_path, "--out", str(tmp_path / "other"))) == 0


def test_hashes_of_different_ids_differ():
    values = [1, "1", 1.5, True, "a", ["a"], {"a": 1}]
    assert len({hash_of_id(value) for value in values}) == len(values)
    assert hash_of_id({"a": 1, "b": 2}) == hash_of_id({"b": 2, "a": 1})
    assert hash_of_id(None) == hash_of_id("") == hash_of_id(float("nan")) == bytes(16)


def test_find_agrees_with_a_dictionary(tmp_path):
    from data_prep.layout import npy_header
    from data_prep.tokenize.store import docs_path, ids_path

    rng, first, expected = np.random.default_rng(0), {}, []
    for unit in range(4):
        values = rng.integers(0, 300, 200)
        docs = np.array([[9 * (line + 1), unit, line + 1] for line in range(200)], np.int64)
        head = npy_header(docs.shape, "int64")
        docs_path(tmp_path, unit).write_bytes(head + docs.tobytes())
        data = b"".join(hash_of_id(int(value)) for value in values)
        ids_path(tmp_path, unit).write_bytes(npy_header((200, 16), "uint8") + data)
        for line, value in enumerate(values.tolist(), 1):
            if value in first:
                expected.append([unit, line, *first[value]])
            first.setdefault(value, (unit, line))
    for memory in (1 << 30, 10_000, 2000):
        assert find([tmp_path], range(4), memory).tolist() == expected


def test_id_field_of_a_data_set_without_ids_is_refused_or_ignored(made, tmp_path, capsys):
    """`--id-field id` is refused. Without the option, the run succeeds, and a line says that the
    default id field is ignored."""
    write(tmp_path / "text", a=["x", "y", "x"])
    command = arguments(made, tmp_path)
    assert main([*command, "--id-field", ""]) == 0
    before = tree(tmp_path / "out")
    refused(capsys, [*command, "--id-field", "id"], "started with id_field = '', now id; ")
    assert main(command) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "without ids" in line]
    assert len(lines) == 1 and str(tmp_path / "out") in lines[0]
    assert main([*command, "--id-field", ""]) == 0
    assert "without ids" not in capsys.readouterr().err
    assert tree(tmp_path / "out") == before
