"""Tests of tokenizers with the configurations of published model families: a run stores the same
ids as the tokenizers library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from data_prep.cli import main
from data_prep.tokenizer.encoder import SECTION_CHARS
from data_prep.tokenizer.tokenizer import Encoder, open_tokenizer
from tests.data_prep.test_bad_input import arguments
from tests.data_prep.test_tokenize import stored_documents

EOS = "</s>"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")


def level(use_regex: bool = False) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


DEEPSEEK = [
    split("[\r\n]"),
    split(r"\s?[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba]+"),
    split(r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"),
    split(r"\s+$"),
    split(r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"),
    pre_tokenizers.Digits(individual_digits=True),
    level(),
]
LLAMA2 = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
SPACES = [" " * count for count in range(24, 1, -1)]
BPE, BYTES = (models.BPE, trainers.BpeTrainer), pre_tokenizers.ByteLevel.alphabet()
FAMILIES = {  # kind of model, normalizer, pre-tokenizer, added tokens, True if recognised
    "gpt-2": (BPE, None, level(True), [], True),
    "gpt-neox": (BPE, normalizers.NFC(), level(True), SPACES, True),
    "llama-3": (BPE, None, pre_tokenizers.Sequence([split(LLAMA3), level()]), [], True),
    "olmo-2": (
        BPE,
        normalizers.NFC(),
        pre_tokenizers.Sequence([split(LLAMA3), level()]),
        ["return x"],
        True,
    ),
    "qwen-2": (BPE, normalizers.NFC(), pre_tokenizers.Sequence([split(QWEN2), level()]), [], True),
    "deepseek": (BPE, None, pre_tokenizers.Sequence(DEEPSEEK), ["<think>"], False),
    "llama-2": (BPE, LLAMA2, None, [], False),
    "metaspace": (BPE, None, pre_tokenizers.Metaspace(), [], False),
    "bert": (
        (models.WordPiece, trainers.WordPieceTrainer),
        normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
        [],
        False,
    ),
    "t5": (
        (models.Unigram, trainers.UnigramTrainer),
        normalizers.NFKC(),
        pre_tokenizers.Metaspace(),
        [],
        False,
    ),
}
RECOGNISED = [family for family, facts in FAMILIES.items() if facts[-1]]
ASSIGNED = [code for code in range(0x110000) if not 0xD800 <= code < 0xE000]
HARD = [
    *("", " ", "\n", "\0", "a\0b\0\0 c", "\ufeffbom", "\r\n\r\n a\r\nb\rc\n\r"),
    *(" " * 5000 + "x", "\t\n " * 3000, "\u00a0\u2003\u3000\u200b\u2028\x85\x1c x"),
    f"{EOS}{EOS} a{EOS}b <s> <think>x</think> <|endoftext|><pad>",
    "👩‍👩‍👧‍👦🏳️‍🌈🇺🇳 👍🏽 ✊🏿\ufe0f\u20e3",
    "\u0301 \u0301a\u0301\u0327 \u0378\u0379 \ue000 \U000e0001 \U0010ffff \ufffe",
    "e\u0301 é \u1112\u1161\u11ab 한 Å \u212b ﬁ Ⅷ ² ½ ٣ \uff13 ｱ",
    "العربية עברית हिन्दी ไทย 漢字かな交じり文 ελληνικά русский",
    "It's HE'LL we'Ve '\u017f 1234567 3.14159 x_1 a-b... ''' \\n ``` //",
    *("".join(map(chr, ASSIGNED[first : first + 512])) for first in range(0, 0x3400, 512)),
    *("".join(map(chr, ASSIGNED[first :: len(ASSIGNED) // 400])) for first in range(3)),
]


def real_text() -> list[str]:
    """Return some modules of Python's standard library as text."""
    folder = Path(json.__file__).parents[1]
    names = ("argparse.py", "json/decoder.py", "html/entities.py", "textwrap.py")
    return [(folder / name).read_text("utf-8") for name in names]


def train_family(path: Path, family: str) -> bool:
    """Train and write the tokenizer of a family. Return True if the fast encoder recognises the
    tokenizer."""
    (model, trainer), normalizer, pre_tokenizer, added, known = FAMILIES[family]
    options = {"unk_token": "<unk>"} if model is not models.Unigram else {}
    if family in ("llama-2", "metaspace"):
        options |= {"byte_fallback": True, "fuse_unk": True}
    tokenizer = Tokenizer(model(**({} if known else options)))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    special = [EOS, "<s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    more = {"unk_token": "<unk>"} if model is models.Unigram else {}
    tokenizer.train_from_iterator(
        [line for text in real_text() for line in text.splitlines(keepends=True)],
        trainer(
            vocab_size=1200,
            special_tokens=special if "byte_fallback" in options else special[:3],
            show_progress=False,
            initial_alphabet=BYTES if model is models.BPE else [],
            **more,
        ),
    )
    if added:
        tokenizer.add_tokens(added)
    tokenizer.save(str(path))
    return known


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_of_a_run_are_the_librarys(tmp_path, made, family):
    known = train_family(tmp_path / "t.json", family)
    assert (Encoder(tmp_path / "t.json").cutter is not None) == known
    (tmp_path / "text").mkdir()
    texts = [*HARD, *real_text()]
    if family == "t5":  # its model has </s> as a piece, which is refused
        texts = [text for text in texts if EOS not in text]
    if known:
        texts.append("".join(real_text()) * 4)
        assert len(texts[-1]) > 2 * SECTION_CHARS
    lines = "".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(texts))
    (tmp_path / "text" / "a.jsonl").write_text(lines)
    command = arguments(made, tmp_path, "--memory", "2GB", "--eos", EOS)
    assert main([*command, "--tokenizer", str(tmp_path / "t.json")]) == 0
    library = open_tokenizer(tmp_path / "t.json")
    eos = library.token_to_id(EOS)
    stored = stored_documents(tmp_path / "out")
    assert len(stored) == len(texts)
    for text, (_, line, ids) in zip(texts, stored, strict=True):
        expected = library.encode(text, add_special_tokens=False).ids
        same = ids == [*expected, eos]  # pytest would compare long lists for minutes
        assert same, f"{family} {line} {text[:40]!r}"
