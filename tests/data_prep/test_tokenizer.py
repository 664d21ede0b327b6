"""Tests of tokenizer files that take much time or memory when they are opened."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from data_prep.tokenizer import tokenizer as module
from data_prep.tokenizer.sentencepiece_model import SentencePieceTokenizer
from data_prep.tokenizer.tokenizer import open_tokenizer
from optimus.errors import DataError


def write(path: Path, change: object = None, **components: object) -> Path:
    """Write a tokenizer.json of two letters. `components`, such as a normalizer, are inserted into
    the JSON tree. If the library inserted the components, the library would also apply them to the
    added token. If `change` is given, the tree is replaced by the result of `change(tree)`."""
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    tokenizer.add_tokens([AddedToken("aaa", normalized=True)])
    tree = json.loads(tokenizer.to_str())
    tree |= {key: json.loads(value.__getstate__()) for key, value in components.items()}
    path.write_text(json.dumps(change(tree) if callable(change) else tree))
    return path


SLOW = pre_tokenizers.Sequence(
    [pre_tokenizers.Split(Regex(r"(?m:.|.){20}(?!(?m:.))(?!\z)"), "isolated")] * 50
)


def test_slow_pattern_is_refused_and_blocks_no_signals(tmp_path, monkeypatch):
    path = write(tmp_path / "slow.json", pre_tokenizer=SLOW)
    monkeypatch.setattr(module, "_CHECK_CPU_S", 1)
    received = []
    before = signal.signal(signal.SIGUSR1, lambda *_: received.append(True))
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        with pytest.raises(DataError, match="slow.json: .* more than 1 s of processor time"):
            open_tokenizer(path)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    assert received


def reordered(tree: dict) -> dict:
    return {"model": tree.pop("model"), **tree}


@pytest.mark.parametrize("change", [None, reordered])
def test_added_token_that_fills_memory_at_loading_is_refused(tmp_path, monkeypatch, change):
    monkeypatch.setattr(module, "_CHECK_BYTES", 32 << 20)
    bomb = normalizers.Sequence([normalizers.Replace("a", "aa")] * 40)
    path = write(tmp_path / "tokenizer.json", change, normalizer=bomb)
    with pytest.raises(DataError, match="the tokenizers library fails with this tokenizer"):
        open_tokenizer(path)


def test_normalizer_with_an_escaped_key_is_checked(tmp_path):
    """A second key "normalizer" at the end of the file replaces the first normalizer. The second
    normalizer must be checked, even if its key is written with escapes."""
    path = write(tmp_path / "tokenizer.json", lambda tree: tree | {"added_tokens": []})
    bomb = json.dumps({"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 99})
    for key in (r"n\u006frmalizer", "normalizer"):
        changed = tmp_path / "changed.json"
        changed.write_text(f'{path.read_text()[:-1]}, "{key}": {bomb}}}')
        with pytest.raises(DataError, match="its normalizer makes texts up to 99 times"):
            open_tokenizer(changed)


def test_check_of_the_steps_does_not_load_the_model(tmp_path):
    content = write(tmp_path / "tokenizer.json").read_bytes()
    assert b"merges" in content and len(module._without_model(content)) < len(content)
    vocabulary = content.replace(b'"vocab": {', b'"vocab": {"decoder": 2, ')
    assert len(module._without_model(vocabulary)) < len(content)


def test_tokenizer_is_opened_in_threads_and_daemonic_processes(tmp_path):
    path = write(tmp_path / "tokenizer.json")
    opened = []
    threads = [threading.Thread(target=lambda: opened.append(open_tokenizer(path))) for _ in "abcd"]
    for thread in threads:
        thread.start()
    process = multiprocessing.get_context("fork").Process(
        target=open_tokenizer, args=(path,), daemon=True
    )
    process.start()
    for thread in (*threads, process):
        thread.join()
    assert len(opened) == 4 and process.exitcode == 0


def test_sentencepiece_model_that_makes_texts_much_longer_is_refused(tmp_path):
    spm = pytest.importorskip("sentencepiece")
    (tmp_path / "rules").write_text("61\t" + " ".join(["78"] * 2000) + "\n")
    for name, rules in (("usual", {}), ("long", {"normalization_rule_tsv": tmp_path / "rules"})):
        spm.SentencePieceTrainer.train(
            sentence_iterator=iter(["a b c d e"] * 9),
            model_prefix=str(tmp_path / name),
            vocab_size=9 if name == "usual" else 8,
            hard_vocab_limit=False,
            minloglevel=3,
            **rules,
        )
    SentencePieceTokenizer(tmp_path / "usual.model")
    long = tmp_path / "long.model"
    with pytest.raises(DataError, match=r"or denormalizer makes texts up to 2e\+03 times"):
        SentencePieceTokenizer(long)
    content = long.read_bytes()  # a denormalizer_spec with the same map
    (tmp_path / "decode.model").write_bytes(content.replace(b"\x1a", b"\x2a"))
    with pytest.raises(DataError, match="decode.model: "):
        SentencePieceTokenizer(tmp_path / "decode.model")


def test_template_that_repeats_the_text_is_not_applied(tmp_path):
    """The template in a tokenizer file of 41 kB could repeat the ids of each text a thousand times,
    so templates are not applied."""

    def repeat(tree: dict) -> dict:
        text = {"Sequence": {"id": "A", "type_id": 0}}
        pair = [text, {"Sequence": {"id": "B", "type_id": 1}}]
        template = {"type": "TemplateProcessing", "single": [text] * 1000, "pair": pair}
        return tree | {"post_processor": template | {"special_tokens": {}}}

    path = write(tmp_path / "repeats.json", repeat)
    assert open_tokenizer(path).encode("ab", add_special_tokens=False).ids == [0, 1]


def test_panic_of_the_library_at_loading_prints_nothing(tmp_path, capfd):
    """The library panics, because the prefix of continuing subwords is longer than a token of the
    vocabulary."""

    def prefix(tree: dict) -> dict:
        tree["model"] |= {"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
        tree["model"]["continuing_subword_prefix"] = "train"
        return tree

    with pytest.raises(DataError, match="panics.json: "):
        open_tokenizer(write(tmp_path / "panics.json", prefix))
    assert capfd.readouterr().err == ""
