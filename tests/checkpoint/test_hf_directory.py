"""Tests that exported directories contain all settings that transformers needs to pad texts and to
end generated texts."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from pathlib import Path

import pytest
import torch

from data_prep.dataset.manifest import read_manifest as read_data_manifest
from optimus.checkpoint import convert, store
from optimus.checkpoint.convert import _copy_sidecars, eos_token_ids, from_hf, to_hf
from optimus.checkpoint.format import MANIFEST, SIDECARS, TEMPLATES, read_manifest
from optimus.checkpoint.weights import model_config_of
from optimus.cli import main
from optimus.config import make_config
from optimus.data.tokenizer import TextTokenizer, tokenizer_path
from optimus.errors import CheckpointError, DamageError
from optimus.io import files
from optimus.io.files import read_regular
from optimus.io.safetensors import TensorFiles
from optimus.train.resolve import read_inputs
from tests.data_prep.corpus import write_sentencepiece
from tests.kit.faults.disk import flip
from tests.kit.runs.tiny import VOCAB, make_tiny_data, tiny_tree
from tests.kit.runs.training import run_tree

transformers = pytest.importorskip("transformers")

PROMPTS = ["abc", "a longer prompt: of several words, déjà vu  (x)"]
VOCABULARY = VOCAB + 64
"""Vocabulary size of the models, larger than the vocabulary size of the tokenizers."""
ADDED = ("tokenizer_config.json", "generation_config.json")


def trained_on(data: Path, run_dir: Path) -> Path:
    settings = {"train__max_steps": 2, "optim__warmup_steps": 1, "model__vocab_size": VOCABULARY}
    settings |= {"checkpoint__interval": 2, "checkpoint__model_interval": 2}
    run_tree(tiny_tree(data, run_dir, **settings))
    return run_dir


@pytest.fixture(scope="module")
def run_dir(tiny_data, tmp_path_factory) -> Path:
    return trained_on(tiny_data, tmp_path_factory.mktemp("hf") / "run")


@pytest.fixture(scope="module")
def sentencepiece_data(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("spm")
    texts = ["abc def ghi of several words, longer prompt: x", "déjà vu (x) lmnop kk ee"]
    write_sentencepiece(directory / "spm.model", texts * 40)
    return make_tiny_data(directory / "data", tokenizer=directory / "spm.model")


@pytest.fixture(scope="module")
def sentencepiece_run(sentencepiece_data, tmp_path_factory) -> Path:
    return trained_on(sentencepiece_data, tmp_path_factory.mktemp("spm-run") / "run")


@pytest.fixture
def old(run_dir, tmp_path) -> Path:
    """Return a run directory as version 0.1.0 wrote it, without the files and the setting that
    later versions add."""
    run_dir = Path(shutil.copytree(run_dir, tmp_path / "old"))
    for path in store.find_all(run_dir):
        if (path / "config.json").is_file():
            config = json.loads((path / "config.json").read_text())
            files.write_json(path / "config.json", config | {"eos_token_id": None})
            for name in ADDED:
                (path / name).unlink()
        rewrite_manifest(path)
    return run_dir


def rewrite_manifest(path: Path) -> None:
    """Rewrite the manifest of a checkpoint so that it lists the existing files and has no
    `data.eos_token_id`."""
    tree = json.loads((path / MANIFEST).read_text())
    del tree["self_xxh3"]
    tree["settings"].pop("data.eos_token_id", None)
    tree["files"] = [
        {"name": entry["name"], "size": file.stat().st_size, "xxh3": files.xxh3_file(file)}
        for entry in tree["files"]
        if (file := path / entry["name"]).exists()
    ]
    (path / MANIFEST).write_bytes(files.checked_json(tree))


def check_directory(path: Path, data: Path) -> None:
    """With transformers, check that texts are padded, that text is generated, and that generation
    stops at the end token."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    text_tokenizer, manifest = TextTokenizer(tokenizer_path(data)), read_data_manifest(data)
    assert tokenizer.eos_token_id == manifest.eos_id
    assert 0 <= tokenizer.pad_token_id < len(tokenizer) == manifest.vocab_size
    batch = tokenizer(PROMPTS, padding=True, return_tensors="pt")
    assert list(batch) == ["input_ids", "attention_mask"]
    assert batch["input_ids"].max() < manifest.vocab_size
    for text, ids, mask in zip(PROMPTS, batch["input_ids"], batch["attention_mask"], strict=True):
        assert ids[mask.bool()].tolist() == text_tokenizer.encode(text)
        assert tokenizer.decode(ids, skip_special_tokens=True) == text_tokenizer.decode(
            text_tokenizer.encode(text)
        )
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert manifest.eos_id in eos_of(model.config.eos_token_id)
    assert model(**batch).logits.isfinite().all()
    alone = [
        model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=6, do_sample=False)
        for text in PROMPTS
    ]
    together = model.generate(**batch, max_new_tokens=6, do_sample=False)
    length = batch["input_ids"].shape[1]
    for text, single, row in zip(PROMPTS, alone, together, strict=True):
        new = single[0, len(text_tokenizer.encode(text)) :]
        assert row[length : length + len(new)].tolist() == new.tolist()
    # For the second prompt, the model generates only the end token. For the first prompt, the model
    # generates one token before the end token.
    last = [text_tokenizer.encode(text)[-1] for text in PROMPTS]
    assert last[0] != last[1]
    end_with(model, {last[0]: last[1], last[1]: manifest.eos_id})
    ended = model.generate(**batch, max_new_tokens=50, do_sample=False)[:, length:]
    pad = tokenizer.pad_token_id
    assert ended.tolist() == [[last[1], manifest.eos_id], [manifest.eos_id, pad]]


def end_with(model: torch.nn.Module, following: dict[int, int]) -> None:
    """Set weights so that the model generates `following[token]` after each `token`."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.zero_()  # logits depend only on the last token
        table = model.model.embed_tokens.weight.normal_()
        model.lm_head.weight.zero_()
        for token, after in following.items():
            model.lm_head.weight[after] += table[token]


def eos_of(field: int | list[int]) -> list[int]:
    return [field] if isinstance(field, int) else field


def exported(run: Path, out: Path, how: str) -> Path:
    """Return a Hugging Face directory of a run: for "model-only" the checkpoint itself, otherwise
    `out`, which the command of `how` writes."""
    if how == "model-only":
        return store.model_path(run, 2)
    command = ["checkpoint", "export"] if how == "export" else ["convert", "to-hf"]
    source = store.model_path(run, 2) if how == "to-hf of a model" else run
    assert main([*command, str(source), str(out)]) == 0
    return out


HOW = ("model-only", "to-hf", "to-hf of a model", "export")


@pytest.mark.parametrize("how", HOW)
def test_transformers_pads_and_ends_with_an_exported_directory(run_dir, tiny_data, tmp_path, how):
    check_directory(exported(run_dir, tmp_path / "hf", how), tiny_data)


@pytest.mark.parametrize("how", ["model-only", "to-hf"])
def test_a_sentencepiece_model_is_exported_too(
    sentencepiece_run, sentencepiece_data, tmp_path, how
):
    directory = exported(sentencepiece_run, tmp_path / "hf", how)
    assert {"tokenizer.model", "tokenizer.json"} <= {path.name for path in directory.iterdir()}
    check_directory(directory, sentencepiece_data)


@pytest.mark.parametrize("how", ["to-hf", "to-hf of a model"])
@pytest.mark.parametrize("data_is_there", [True, False])
def test_an_earlier_versions_checkpoint_is_exported_complete(
    old, tiny_data, tmp_path, capsys, monkeypatch, how, data_is_there
):
    """The end token comes from the data set or, without a data set, from names in the tokenizer."""
    from optimus.checkpoint import convert

    absent = "_eos_of_data_sets" if not data_is_there else "_eos_of_tokenizer"
    monkeypatch.setattr(convert, absent, lambda *_: None)
    check_directory(exported(old, tmp_path / "hf", how), tiny_data)
    assert "warning" not in capsys.readouterr().err


def test_an_unknown_end_token_is_reported_with_the_key(old, tmp_path, capsys, monkeypatch):
    path = store.model_path(old, 2)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    more = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer["added_tokens"] = [
        {"id": number, "content": name, **more, "special": True}
        for number, name in enumerate(("[one]", "[other]"))
    ]
    vocab = tokenizer["model"]["vocab"]
    renamed = {0: "[one]", 1: "[other]"}
    tokenizer["model"]["vocab"] = {renamed.get(id, name): id for name, id in vocab.items()}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    rewrite_manifest(path)
    assert main(["convert", "to-hf", str(path), str(tmp_path / "hf")]) == 0
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert "eos_token_id is not known" in printed and "set model.eos_token_ids" in printed
    assert "eos_token_id" not in json.loads((tmp_path / "hf" / ADDED[1]).read_text())


def test_the_manifest_covers_the_added_files(run_dir, tmp_path, capsys):
    run = Path(shutil.copytree(run_dir, tmp_path / "run"))
    path = store.model_path(run, 2)
    listed = {entry.name for entry in read_manifest(path).files}
    assert listed == {file.name for file in path.iterdir()} - {MANIFEST}
    assert listed > set(ADDED)
    assert main(["checkpoint", "verify", str(path)]) == 0
    flip(path / ADDED[0], 10)
    assert main(["checkpoint", "verify", str(path)]) == 1
    assert f"{ADDED[0]}: its content does not match" in capsys.readouterr().out


def test_the_end_token_of_the_data_precedes_the_configured_tokens(run_dir):
    full = store.full_path(run_dir, 2)
    config = model_config_of(full)
    for configured, expected in (((), (0,)), ((5, 0), (0, 5)), ((VOCABULARY,), (0,))):
        changed = config.model_copy(update={"eos_token_ids": configured})
        assert eos_token_ids(full, changed) == expected


def source_directory(directory: Path, run: Path, **generation: object) -> dict[str, bytes]:
    """Make a Hugging Face directory that has the files of a published directory. Add `generation`
    to its generation_config.json. Return the contents of the files that a conversion must keep, by
    file name."""
    assert main(["convert", "to-hf", str(run), str(directory)]) == 0
    config = {"eos_token": {"content": "<|endoftext|>"}, "model_max_length": 77}
    config |= {"pad_token": "<|endoftext|>", "tokenizer_class": "GPTNeoXTokenizerFast", "x": 1}
    texts = {
        "tokenizer_config.json": json.dumps(config, indent=3),
        "generation_config.json": json.dumps({"eos_token_id": [0, 7], "top_k": 3, **generation}),
        "special_tokens_map.json": '{"eos_token":  "<|endoftext|>"}',
        "chat_template.jinja": "{{ messages }}",
    }
    (directory / "additional_chat_templates").mkdir()
    texts["additional_chat_templates/tool.jinja"] = "{{ tools }}"
    for name, text in texts.items():
        (directory / name).write_text(text)
    return {name: (directory / name).read_bytes() for name in (*texts, "tokenizer.json")}


def test_a_round_trip_keeps_the_files_of_the_source(run_dir, tmp_path, capsys):
    hf, ours, again = (tmp_path / name for name in ("hf", "ours", "again"))
    theirs = source_directory(hf, run_dir)
    assert main(["convert", "from-hf", str(hf), str(ours)]) == 0
    assert main(["checkpoint", "verify", str(ours)]) == 0
    assert main(["convert", "to-hf", str(ours), str(again)]) == 0
    assert {name: (again / name).read_bytes() for name in theirs} == theirs
    read = [json.loads((path / "config.json").read_text()) for path in (hf, again)]
    assert read[0] == read[1]
    assert capsys.readouterr().err == ""


def test_warning_of_a_token_outside_the_vocabulary_is_short(run_dir, tmp_path, capsys):
    """A directory of another user can contain a text of any length in place of a token id."""
    hf = tmp_path / "hf"
    source_directory(hf, run_dir, pad_token_id=["x" * 300_000])
    assert main(["convert", "to-hf", str(hf), str(tmp_path / "out")]) == 0
    (line,) = (text for text in capsys.readouterr().err.splitlines() if "pad_token_id" in text)
    assert len(line) < 2200 and "is written instead" in line


@pytest.mark.parametrize("token", [VOCABULARY, 1 << 64])
def test_bos_outside_the_vocabulary_is_left_out(run_dir, tmp_path, token):
    hf, out = tmp_path / "hf", tmp_path / "out"
    assert main(["convert", "to-hf", str(run_dir), str(hf)]) == 0
    path = hf / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"bos_token_id": token}))
    for name in ADDED:
        (hf / name).unlink()
    assert main(["convert", "to-hf", str(hf), str(out)]) == 0
    for name in ADDED:
        assert "bos" not in (out / name).read_text()


def test_a_round_trip_replaces_ids_outside_the_vocabulary(run_dir, tmp_path, capsys):
    hf, ours, again = (tmp_path / name for name in ("hf", "ours", "again"))
    source_directory(hf, run_dir, pad_token_id=VOCABULARY)
    assert main(["convert", "from-hf", str(hf), str(ours)]) == 0
    assert main(["convert", "to-hf", str(ours), str(again)]) == 0
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and f"pad_token_id = {VOCABULARY} is outside" in printed
    assert json.loads((again / ADDED[1]).read_text()) == {
        "eos_token_id": [0, 7],
        "top_k": 3,
        "pad_token_id": 0,
    }


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b"-----BEGIN KEY-----\n"),
        ("tokenizer.json", b'{"client_secret": "x"}'),
        ("tokenizer.model", b"\n-----BEGIN KEY-----\n"),
        ("tokenizer_config.json", b"[1]"),
        ("vocab.json", b"[" * 100_000),
        ("merges.txt", b"secret"),
        ("chat_template.jinja", b"secret"),
        ("additional_chat_templates/a.jinja", b"secret"),
    ],
)
def test_a_sidecar_file_of_another_type_is_not_copied(tmp_path, name, content):
    """A sidecar file in a downloaded directory can be a link to another directory. The target of
    the link must not be published with the model."""
    secret, source, target = tmp_path / "secret", tmp_path / "source", tmp_path / "target"
    secret.write_bytes(content)
    (source / name).parent.mkdir(parents=True)
    target.mkdir()
    (source / name).symlink_to(secret)
    with pytest.raises(CheckpointError, match="outside its directory") as error:
        _copy_sidecars(source, target)
    assert "secret" not in str(error.value).replace(str(secret), "")
    (source / name).unlink()
    if not name.endswith((".txt", ".jinja")):
        (source / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=r"a JSON object|sentencepiece"):
            _copy_sidecars(source, target)
        (source / name).unlink()
    os.mkfifo(source / name)
    with pytest.raises(CheckpointError, match="not a regular file"):
        _copy_sidecars(source, target)
    assert not list(target.rglob("*.*"))


@pytest.mark.parametrize("name", SIDECARS)
def test_a_link_out_of_the_directory_is_not_copied(tmp_path, name):
    """The target of a link can be a JSON file of the user that contains a secret, such as a key or
    a password."""
    secrets, source, target = tmp_path / "secrets", tmp_path / "source", tmp_path / "target"
    for folder in (secrets, source, target):
        folder.mkdir()
    (secrets / "a.json").write_text('{"auths": "secret", "model": {}}')
    for leads_to in (secrets / "a.json", secrets):
        (source / name).symlink_to(leads_to)
        with pytest.raises(CheckpointError, match="links to .*, outside its directory"):
            _copy_sidecars(source, target)
        (source / name).unlink()
    (source / "additional_chat_templates").mkdir(exist_ok=True)
    (source / "additional_chat_templates" / "a.json").symlink_to(secrets / "a.json")
    with pytest.raises(CheckpointError, match="outside its directory"):
        _copy_sidecars(source, target)
    assert not list(target.iterdir())


def test_a_folder_replaced_by_a_link_meanwhile_is_not_followed(tmp_path, monkeypatch):
    secrets, source, target = tmp_path / "secrets", tmp_path / "source", tmp_path / "target"
    folder = source / "additional_chat_templates"
    for directory in (secrets, folder, target):
        directory.mkdir(parents=True)
        (directory / "a.json").write_text("{}")
    (target / "a.json").unlink()

    def replace_first(path, *rest):
        folder.rename(tmp_path / "was")
        folder.symlink_to(secrets)
        return read_regular(path, *rest)

    monkeypatch.setattr(convert, "read_regular", replace_first)
    with pytest.raises(CheckpointError, match=r"a\.json: "):
        _copy_sidecars(source, target)
    assert not list(target.iterdir())


@pytest.mark.parametrize(
    ("name", "link"),
    [
        ("model.safetensors", "model.safetensors"),
        ("model.safetensors", "weights.bin"),
        ("config.json", "config.json"),
    ],
)
def test_a_link_out_of_a_hugging_face_directory_is_refused(run_dir, tmp_path, name, link):
    """The refused links include links that are listed only in the index of the weights."""
    out = tmp_path / "hf"
    to_hf(run_dir, out)
    if link != name:
        table = dict.fromkeys(TensorFiles(out).names(), link)
        (out / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    (out / name).rename(tmp_path / "private")
    (out / link).symlink_to(tmp_path / "private")
    with pytest.raises(CheckpointError, match="outside its directory"):
        from_hf(out, tmp_path / "checkpoint")


def test_templates_in_too_many_folders_are_not_copied(tmp_path):
    (tmp_path / "target").mkdir()
    folder = tmp_path.joinpath("source", TEMPLATES, *"d" * 20)
    folder.mkdir(parents=True)
    (folder / "a.jinja").write_text("{{ messages }}")
    with pytest.raises(CheckpointError, match="more than .* 8 levels of folders"):
        _copy_sidecars(tmp_path / "source", tmp_path / "target")


def test_large_templates_are_copied_singly_up_to_a_limit(tmp_path, monkeypatch):
    folder, size_bytes = tmp_path / "source" / TEMPLATES, 8 << 20
    for path in (folder, tmp_path / "target"):
        path.mkdir(parents=True)
    for number in range(4):
        (folder / f"{number}.jinja").touch()
        os.truncate(folder / f"{number}.jinja", size_bytes)
    tracemalloc.start()
    _copy_sidecars(tmp_path / "source", tmp_path / "target")
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1.5 * size_bytes
    monkeypatch.setattr(convert, "_SIDECARS_BYTES", 4 * size_bytes - 1)
    with pytest.raises(CheckpointError, match=r"source: .* more than 33,554,431 bytes"):
        _copy_sidecars(tmp_path / "source", tmp_path / "target")


def test_links_of_the_hubs_cache_are_copied_as_files(run_dir, tmp_path):
    """A snapshot in the cache of the Hugging Face Hub has links to files in ../../blobs."""
    source, target = tmp_path / "snapshots" / "1", tmp_path / "target"
    for path in (source, target, tmp_path / "blobs"):
        path.mkdir(parents=True)
    tokenizer = store.full_path(run_dir, 2) / "tokenizer.json"
    shutil.copy(tokenizer, tmp_path / "blobs" / "4")
    (source / "tokenizer.json").symlink_to("../../blobs/4")
    (tmp_path / "blobs" / "5").write_text("{{ messages }}")
    (source / "chat_template.jinja").symlink_to("../../blobs/5")
    _copy_sidecars(source, target)
    assert (target / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
    assert (target / "chat_template.jinja").read_text() == "{{ messages }}"
    assert not any(path.is_symlink() for path in target.iterdir())


def test_another_tokenizer_than_the_data_has_is_refused_and_not_copied(tiny_data, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(tiny_data, data)
    file = data / "tokenizer.json"
    inputs = read_inputs(make_config(tiny_tree(data, tmp_path / "run")), 1)
    assert inputs.data.tokenizer == file.read_bytes()
    file.write_bytes(file.read_bytes().replace(b'"the"', b'"xyz"') + b" ")
    with pytest.raises(DamageError, match=r"tokenizer.json: is not .*; run optimus-data verify"):
        read_inputs(make_config(tiny_tree(data, tmp_path / "run")), 1)
    for change in (lambda: None, lambda: os.mkfifo(file)):
        file.unlink(missing_ok=True)
        change()
        with pytest.raises(DamageError, match=r"tokenizer.json: .*; run optimus-data verify"):
            read_inputs(make_config(tiny_tree(data, tmp_path / "run")), 1)
