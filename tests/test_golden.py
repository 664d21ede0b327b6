"""This version of Optimus reads the files that earlier versions wrote to tests/golden, and
continues the runs of these versions.

One earlier version wrote each directory in tests/golden. The file `expected.json` in a directory
has the results of the version that wrote the directory. Tests use copies of the directories.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from data_prep.cli import main as optimus_data
from data_prep.tokenizer.tokenizer import Encoder
from optimus.checkpoint.index import ADAMW_STATES
from optimus.cli import main as optimus
from optimus.config import Config, load_config
from optimus.config.load import read_tree
from optimus.launch.environment import read_launch_env
from optimus.observe.metrics import read_json_lines
from optimus.observe.report import write_report
from optimus.train import loop
from tests.data_prep.corpus import documents
from tests.kit.layouts.whole import WholeModel
from tests.kit.runs import results
from tests.kit.runs.results import GOLDEN, STEP, metrics_of

EXPECTED = {
    path.parent.name: json.loads(path.read_text())
    for path in sorted(GOLDEN.glob("*/expected.json"))
}
"""For each version: the content of its expected.json."""
RUNS = [(version, name) for version, facts in EXPECTED.items() for name in facts["runs"]]
MODELS = [(version, name) for version, name in RUNS if "model" in EXPECTED[version]["runs"][name]]
DATA = [(version, name) for version, facts in EXPECTED.items() for name in facts["data"]]
KILLED = [(version, name) for version, facts in EXPECTED.items() for name in facts["interrupted"]]

ALONE = ["parallel.pp=1", "parallel.dp=1", "parallel.ep=1", "parallel.tp=1"]
ALONE += ["parallel.schedule=1f1b", "parallel.sequence_parallel=false", "optim.sharding=none"]
OTHER_LAYOUTS: dict[str, tuple[int, list[str], bool]] = {
    "moe-fp32": (2, ["parallel.pp=2"], True),
    "moe-bf16-ep-epso": (1, ALONE, False),
    "moe-fp32-so": (1, ALONE, True),
    "moe-fp32-dp-ep-epso": (2, [*ALONE, "parallel.tp=2"], False),
    "moe-bf16-pp-tp": (2, [*ALONE, "parallel.ep=2"], False),
    "moe-fp16-mix-frozen": (2, ["parallel.dp=2", "optim.sharding=epso"], False),
    "dense-bf16-tp": (2, [*ALONE, "parallel.dp=2", "optim.sharding=so"], False),
    "dense-fp32-pp-tied": (1, ALONE, True),
}
"""Another layout for each run: the number of ranks, the settings, and a flag. The flag is True if
results must be bitwise equal."""

OTHER_ARITHMETIC: tuple[str, ...] = ()
"""Old versions that added numbers in another order than this version. If this version continues a
run of such a version, metrics must be equal only within the tolerances below."""

# Tolerances for processors and layouts whose matrix products add in another order. The tolerance of
# fp32 is the bound of deterministic mode for tp and ep.
LOSS_WITHIN = {"fp32": 1e-5, "bf16": 2e-3, "fp16": 2e-3}
NORM_WITHIN = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2}
"""For each dtype: the relative tolerance of gradient norms."""


@pytest.fixture(scope="module")
def copies(tmp_path_factory) -> Path:
    """Return the path of a copy of tests/golden. Tests share the copy and must not change it."""
    return Path(shutil.copytree(GOLDEN, tmp_path_factory.mktemp("golden") / "all"))


@pytest.fixture
def corpus(copies, tmp_path, monkeypatch):
    """Return the function `corpus(version, *changed)`. The function creates a folder with the files
    of the version, makes this folder the working directory, and returns the content of
    expected.json. The paths `changed` are copies. A test must not write to other paths, because
    they are links to files that all tests share."""

    def enter(version: str, *changed: str) -> dict:
        for name in changed:
            shutil.copytree(copies / version / name, tmp_path / name)
        link_missing(copies / version, tmp_path)
        monkeypatch.chdir(tmp_path)  # files refer to each other by relative paths
        return EXPECTED[version]

    return enter


def link_missing(source: Path, folder: Path) -> None:
    """Create links in `folder` to all files of `source` that `folder` does not contain."""
    for path in source.iterdir():
        target = folder / path.name
        if not target.exists():
            target.symlink_to(path)
        elif target.is_dir():
            link_missing(path, target)


def hash_and_train(path: str, overrides: list[str]) -> dict[str, str]:
    """Continue the run with the configuration file `path`. Return the hash of each loaded state by
    name on rank 0, and {} on other ranks."""
    hashes: dict[str, str] = {}
    go = loop.Run.go

    def hash_and_go(run: loop.Run) -> None:
        whole = WholeModel(run.config, run.rank_model.layout, run.groups)
        for state in ADAMW_STATES:
            if tensors := whole.gather(run.states, state):
                hashes[state] = results.hash_tensors(tensors)
        go(run)

    loop.Run.go = hash_and_go
    loop.train(load_config(path, overrides), read_launch_env())
    return hashes


def same_bits(version: str) -> bool:
    """Return True if updates on this machine must be bitwise equal to the golden values of the
    version `version`. This is the case if the version ran on an equal machine and is not in
    OTHER_ARITHMETIC."""
    return results.machine() == EXPECTED[version]["machine"] and version not in OTHER_ARITHMETIC


def assert_near(lines: list[dict], expected_lines: list[dict], dtype: str) -> None:
    """Assert that lines of metrics are equal within the tolerances LOSS_WITHIN and NORM_WITHIN of
    `dtype`. Steps, learning rates, tokens and loss scales must be exactly equal."""
    for line, expected in zip(lines, expected_lines, strict=True):
        assert line.keys() >= expected.keys()
        exact = ("step", "lr", "tokens", "loss_scale", "skipped_steps")
        assert all(line[key] == expected[key] for key in exact if key in expected)
        for key in ("loss", "aux_loss", "z_loss"):
            assert line.get(key) == pytest.approx(expected.get(key), abs=LOSS_WITHIN[dtype]), key
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=NORM_WITHIN[dtype])


def assert_same(lines: list[dict], expected: list[dict]) -> None:
    """Assert that each value in `expected` is bitwise equal to the value in `lines`. Keys that
    `expected` lacks are ignored."""
    known = [{key: line[key] for key in old} for line, old in zip(lines, expected, strict=True)]
    assert known == expected


def continued(run_dir: Path) -> list[dict]:
    return [line for line in metrics_of(run_dir) if line["step"] > STEP]


def test_corpus_is_complete():
    assert "v1" in EXPECTED and len(RUNS) >= 8 and len(DATA) >= 7


@pytest.mark.parametrize(("version", "name"), RUNS)
@pytest.mark.parametrize("other_layout", [False, True], ids=["its-layout", "another-layout"])
def test_run_is_continued(ranks, corpus, version, name, other_layout):
    """Continue a run of an old version. Loaded states must be bitwise equal to the saved states.
    The metrics of later steps must equal the metrics of the old version: bitwise if the layout
    keeps all bits and `same_bits` is true for the old version, and otherwise within tolerances."""
    facts = corpus(version, f"runs/{name}")
    expected, run_dir = facts["runs"][name], Path("runs", name)
    size, layout, bits = OTHER_LAYOUTS[name] if other_layout else (expected["ranks"], [], True)
    config = str(run_dir / "config.toml")
    overrides = ["train.stop_at_step=0", *layout]
    hashes = ranks(size, hash_and_train, config, overrides, start_world=False)[0]
    assert hashes == expected["states"]
    before = read_json_lines(GOLDEN / version / run_dir / "metrics.jsonl")
    assert read_json_lines(run_dir / "metrics.jsonl")[:STEP] == before
    reference, dtype = expected["continued"], load_config(config).train.dtype
    held_out = read_json_lines(run_dir / "eval.jsonl")[-1]
    if bits and same_bits(version):
        assert_same(continued(run_dir), reference["metrics"])
        assert_same([held_out], [reference["eval"]])
        assert results.hash_states(run_dir) == reference["states"]
    else:
        assert_near(continued(run_dir), reference["metrics"], dtype)
        assert held_out["loss"] == pytest.approx(reference["eval"]["loss"], abs=LOSS_WITHIN[dtype])


@pytest.mark.parametrize(("version", "name"), MODELS)
def test_run_starts_from_a_model_only_checkpoint(ranks, corpus, version, name):
    facts = corpus(version, f"runs/{name}")
    expected, run_dir = facts["runs"][name], Path("runs", name)
    overrides = ["train.stop_at_step=0", f"checkpoint.load=model@{STEP}"]
    config = str(run_dir / "config.toml")
    ranks(expected["ranks"], hash_and_train, config, overrides, start_world=False)
    reference = expected["model"]["metrics"]
    if same_bits(version):
        assert_same(continued(run_dir), reference)
    else:
        assert_near(continued(run_dir), reference, load_config(config).train.dtype)


@pytest.mark.parametrize(("version", "name"), RUNS)
def test_checkpoints_are_valid_and_listed(corpus, capsys, version, name):
    expected = corpus(version)["runs"][name]
    assert optimus(["checkpoint", "verify", f"runs/{name}", "--json"]) == 0
    checkpoints = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [checkpoint["name"].split("-")[0] for checkpoint in checkpoints] == (
        ["model", "step"] if "model" in expected else ["step"]
    )
    assert optimus(["checkpoint", "list", f"runs/{name}", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["next_start"] == f"step-{STEP:08d}"
    assert {checkpoint["state"] for checkpoint in listed["checkpoints"]} == {"valid"}
    for checkpoint in checkpoints:
        path = f"runs/{name}/checkpoints/{checkpoint['name']}"
        assert optimus(["checkpoint", "show", path, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["step"] == STEP


@pytest.mark.parametrize(("version", "name"), RUNS)
def test_checkpoints_are_exported_and_evaluated(corpus, capsys, tmp_path, version, name):
    expected = corpus(version)["runs"][name]
    dtype = load_config(f"runs/{name}/config.toml").train.dtype
    checkpoints = {"step": expected} | ({"model": expected["model"]} if "model" in expected else {})
    for kind, reference in checkpoints.items():
        path = f"runs/{name}/checkpoints/{kind}-{STEP:08d}"
        capsys.readouterr()
        assert optimus(["eval", path, "data/more", "--instances", "8", "--json"]) == 0
        loss = json.loads(capsys.readouterr().out)["loss"]
        within = LOSS_WITHIN["fp32" if kind == "step" else "bf16"]
        assert loss == pytest.approx(reference["loss"], abs=within), (kind, dtype)
    exported = tmp_path / "exported"
    path = f"runs/{name}/checkpoints/step-{STEP:08d}"
    assert optimus(["checkpoint", "export", path, str(exported), "--dtype", "fp32"]) == 0
    assert results.hash_weights(exported) == expected["exported"]
    if "model" in expected:
        model = Path("runs", name, "checkpoints", f"model-{STEP:08d}")
        assert results.hash_weights(model) == expected["model"]["weights"]


@pytest.mark.parametrize("version", EXPECTED)
def test_run_is_plotted_and_continues_a_text(corpus, capsys, version):
    corpus(version, "runs/moe-fp32")
    plot, _ = write_report(Path("runs/moe-fp32"))
    assert plot.stat().st_size
    for kind in ("step", "model"):
        path = f"runs/moe-fp32/checkpoints/{kind}-{STEP:08d}"
        assert optimus(["generate", path, "--prompt", "ba ke", "--tokens", "3"]) == 0
        assert capsys.readouterr().out.startswith("ba ke")


@pytest.mark.parametrize(("version", "name"), RUNS)
def test_configurations_are_loaded(corpus, version, name):
    """For each run of an old version, the configuration file must have the values of the resolved
    configuration that the run saved, except for values that were measured at the start."""
    expected = corpus(version)["runs"][name]
    _, config, *overrides = expected["command"]
    written, resolved = load_config(config, overrides), load_config(f"runs/{name}/config.toml")
    assert isinstance(written, Config)
    values = resolved.model_dump(mode="json")
    for section, table in read_tree(Path(f"runs/{name}/config.toml")).items():
        for key, value in table.items():
            assert values[section][key] == value, f"{section}.{key}"
    measured = {"ep_dispatch", "backend", "grouped_gemm", "threads", "chunk_length"}
    for section, table in written.model_dump(mode="json").items():
        for key, value in (table or {}).items():
            assert key in measured or values[section][key] == value, f"{section}.{key}"
    of_checkpoint = load_config(f"runs/{name}/checkpoints/step-{STEP:08d}/config.toml")
    assert of_checkpoint == resolved


@pytest.mark.parametrize(("version", "name"), DATA)
def test_data_sets_are_valid_and_readable(corpus, capsys, version, name):
    expected = corpus(version)["data"][name]
    assert optimus_data(["verify", f"data/{name}"]) == 0, capsys.readouterr().out
    assert optimus_data(["stats", f"data/{name}", "--json"]) == 0
    assert optimus_data(["inspect", f"data/{name}", "0"]) == 0
    assert results.hash_instances(Path("data", name)) == expected["instances"]
    if "held_out" in expected:
        assert results.hash_instances(Path("data", name, "eval")) == expected["held_out"]


def arrays(hashes: dict[str, str]) -> dict[str, str]:
    """Return the hashes of .npy files. Other files are left out, because later versions can write
    new keys to JSON files."""
    return {name: value for name, value in hashes.items() if name.endswith(".npy")}


@pytest.mark.parametrize(("version", "name"), DATA)
def test_data_sets_are_unchanged_or_reproduced(corpus, version, name, tmp_path):
    """The command that wrote a data set is run again. It must not change the complete data set.
    After the data set is deleted, the command must write equal arrays."""
    # All of `data` is copied, because commands compare paths with links resolved.
    facts = corpus(version, "data")["data"][name]
    folder = Path("data", name)
    shard_again = ["shard", str(folder), "--workers", "1"]
    assert optimus_data(facts["command"]) == 0
    if name == "again":
        assert optimus_data(shard_again) == 0
    assert results.hash_files(folder) == facts["files"]
    shutil.rmtree(folder)
    assert optimus_data(facts["command"]) == 0
    if name == "again":
        assert optimus_data(shard_again) == 0
    assert arrays(results.hash_files(folder)) == arrays(facts["files"])


@pytest.mark.parametrize(("version", "name"), KILLED)
def test_interrupted_directory_is_finished_without_repeated_work(
    corpus, version, name, monkeypatch
):
    """An old version was killed while it wrote a data set. With this version, the same command must
    complete the data set, and must not encode a document that the old version already encoded."""
    folder = Path("interrupted", name)
    facts = corpus(version, str(folder))["interrupted"][name]
    (finished,) = folder.glob("tokens/unit-*.json")
    (started,) = folder.glob("tokens/unit-*.part-0001")
    stored = [
        *texts_of(folder, int(finished.stem[-5:])),
        texts_of(folder, int(started.stem[-5:]))[0],
    ]
    encoded, encode = [], Encoder.encode
    monkeypatch.setattr(
        Encoder, "encode", lambda self, texts: encoded.extend(texts) or encode(self, texts)
    )
    assert optimus_data(facts["command"]) == 0
    assert encoded and not set(stored) & set(encoded)
    assert arrays(results.hash_files(folder)) == arrays(facts["files"])


def texts_of(folder: Path, unit: int) -> list[str]:
    """Return the texts of the documents that belong to unit number `unit` in plan.json. A unit is a
    range of input files that one worker tokenizes."""
    plan = json.loads((folder / "tokens" / "plan.json").read_text())
    names = [plan["inputs"][number]["name"] for number in range(*plan["units"][unit])]
    all_documents = documents(Path(names[0]).parent)
    return [text for name, _, text in all_documents if name in names]


def test_corpus_was_not_changed(copies):
    """No test in this file has changed the shared files. This test must be the last in the file."""
    assert results.hash_files(copies) == results.hash_files(GOLDEN)
