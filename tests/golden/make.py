"""Write checkpoints, data sets and configurations with the code of this checkout.

    python tests/golden/make.py v1 COMMIT

The script writes the directory tests/golden/v1, which must not exist before. The file
`expected.json` in this directory has values such as hashes and losses. tests/test_golden.py checks
that later versions of Optimus compute the same values from the other files of the directory.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
os.environ |= {"PYTHONPATH": os.pathsep.join(sys.path[:2]), "OMP_NUM_THREADS": "1"}

from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402

from data_prep.tokenize import writer  # noqa: E402
from optimus.io import files  # noqa: E402
from optimus.observe.metrics import read_json_lines  # noqa: E402
from tests.data_prep.corpus import run_killed_at  # noqa: E402
from tests.kit.runs import results  # noqa: E402
from tests.kit.runs.results import (  # noqa: E402
    CONTINUED,
    STEP,
    metrics_of,
)

EOS = "<|endoftext|>"
CONTEXT = 16
WORDS = [a + b for a in ("ba", "ke", "lo", "mi", "nu", "pa", "re") for b in ("", *"abcdefgh")][:61]
WIDE = 70_000
"""Size of a vocabulary whose token ids are stored as uint32."""

RUNS = {
    "moe-fp32": 1,
    "moe-bf16-ep-epso": 2,
    "moe-fp32-so": 2,
    "moe-fp32-dp-ep-epso": 4,
    "moe-bf16-pp-tp": 4,
    "moe-fp16-mix-frozen": 1,
    "dense-bf16-tp": 2,
    "dense-fp32-pp-tied": 2,
}
"""Maps the name of a configuration in CONFIGS to the number of ranks of its run."""
WITH_MODELS = ("moe-fp32", "moe-bf16-ep-epso", "dense-bf16-tp", "dense-fp32-pp-tied")
"""Runs that also write model-only checkpoints."""

MOE = """
[model]
architecture = "olmoe"
num_layers = 2
hidden_size = 8
num_attention_heads = 2
intermediate_size = 4
num_experts = 4
num_experts_per_tok = 2
vocab_size = 64
max_position_embeddings = 16
"""
DENSE = """
[model]
architecture = "olmo"
num_layers = 2
hidden_size = 8
num_attention_heads = 2
intermediate_size = 12
vocab_size = 64
max_position_embeddings = 16
"""
RUN = """
[data]
path = "data/words"

[train]
max_steps = 4
seq_len = 16
global_batch_tokens = 64
microbatch_size = 1
dtype = "fp32"
device = "cpu"
deterministic = true
eval_interval = 2
eval_instances = 8

[optim]
lr = 1e-2
min_lr = 1e-3
warmup_steps = 1

[kernels]
backend = "torch"

[checkpoint]
interval = 0

[observe]
tensorboard = false
"""
MODELS = "[checkpoint]\nmodel_interval = 2\n"
CONFIGS = {
    "moe-fp32": f'base = ["moe.toml", "run.toml"]\n{MODELS}',
    "moe-bf16-ep-epso": f"""base = ["moe.toml", "run.toml"]
[parallel]
ep = 2
[train]
dtype = "bf16"
[optim]
sharding = "epso"
chunk_length = 500
{MODELS}""",
    "moe-fp32-so": """base = ["moe.toml", "run.toml"]
[parallel]
dp = 2
[optim]
sharding = "so"
""",
    "moe-fp32-dp-ep-epso": """base = ["moe.toml", "run.toml"]
[parallel]
dp = 2
ep = 2
[optim]
sharding = "epso"
[checkpoint]
scatter = "paper"
""",
    "moe-bf16-pp-tp": """base = ["moe.toml", "run.toml"]
[parallel]
pp = 2
tp = 2
sequence_parallel = true
schedule = "zb-h1"
[train]
dtype = "bf16"
""",
    "moe-fp16-mix-frozen": """base = ["moe.toml", "run.toml"]
[data]
path = ""
[[data.mix]]
path = "data/words"
weight = 0.7
[[data.mix]]
path = "data/more"
weight = 0.3
[train]
dtype = "fp16"
deterministic = false
threads = 1
[optim]
frozen = ["embed.*"]
loss_scale = 1024.0
[[optim.groups]]
pattern = "*norm*"
weight_decay = 0.0
""",
    "dense-bf16-tp": f"""base = ["dense.toml", "run.toml"]
[parallel]
tp = 2
[train]
dtype = "bf16"
{MODELS}""",
    "dense-fp32-pp-tied": f"""base = ["dense.toml", "run.toml"]
[model]
tie_embeddings = true
[data]
document_mask = true
[parallel]
pp = 2
[optim]
sharding = "so"
{MODELS}async_save = true
""",
}

UNITS = ("--unit-size", "1500", "--shard-size", "1024", "--workers", "1")
TOKENIZE = {
    "words": ("one", "words.json", "--eval-fraction", "0.2"),
    "more": ("two", "words.json", "--eval-fraction", "0.2"),
    "wide": ("two", "wide.json"),
    "bytes": ("three", "bytes.json", "--on-error", "quarantine"),
}
"""Maps the name of a data set to (folder below text/, tokenizer file, options of
`optimus-data`)."""
BLEND = ("--source", "data/words=0.7", "data/more=0.3", "--shard-size", "1024", "--workers", "1")
AGAIN = ("--context", "7", "--seed", "3", "--carry-tails", "--shard-size", "1024")
KILLED_AFTER = 18
"""`optimus-data` is killed after it has committed this number of files."""


def main() -> None:
    version, commit = sys.argv[1:]
    out = HERE / version
    out.mkdir()
    os.chdir(out)
    write_text()
    write_tokenizers()
    write_configurations()
    expected = {"commit": commit, "machine": results.machine()}
    expected["data"] = make_data()
    expected["interrupted"] = make_interrupted()
    expected["runs"] = {name: make_run(name) for name in RUNS}
    Path("expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def optimus(*words: object) -> str:
    return _command("optimus.cli", *words)


def optimus_data(*words: object) -> str:
    return _command("data_prep.cli", *words)


def _command(module: str, *words: object) -> str:
    print(module.partition(".")[0], *words, flush=True)
    command = [sys.executable, "-m", module, *map(str, words)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def write_text() -> None:
    """Write text files of made-up words. Each word has only three possible next words."""
    rng = random.Random(17)

    def document() -> str:
        index, words = rng.randrange(len(WORDS)), []
        for _ in range(rng.randint(10, 40)):
            words.append(WORDS[index])
            index = (index * 3 + rng.choice((1, 1, 1, 5, 8))) % len(WORDS)
        return " ".join(words)

    def lines(name: str, count: int) -> Iterator[str]:
        for number in range(count):
            yield json.dumps({"id": f"{name}-{number}", "text": document()}) + "\n"

    for folder in ("one", "two", "three"):
        Path("text", folder).mkdir(parents=True)
    for number in range(3):
        Path(f"text/one/{number}.jsonl").write_text("".join(lines(f"one-{number}", 12)))
    packed = gzip.compress("".join(lines("packed", 10)).encode(), mtime=0)
    Path("text/one/packed.jsonl.gz").write_bytes(packed)
    Path("text/two/0.jsonl").write_text("".join(lines("two", 15)))
    Path("text/two/plain.txt").write_text("\n".join(document() for _ in range(6)))
    broken = [*lines("three", 14), "no JSON\n", *lines("three", 1)]
    Path("text/three/0.jsonl").write_text("".join(broken))
    Path("text/three/plain.txt").write_text("déjà vu, 漢字 🙂\r\n  " + document())


def write_tokenizers() -> None:
    """Write a small and a large word-level tokenizer, and a byte-level BPE tokenizer."""
    for name, last in (("words", len(WORDS) + 2), ("wide", WIDE - 1)):
        vocab = {EOS: 0, "?": 1, **{word: 2 + index for index, word in enumerate(WORDS)}}
        vocab["."] = last
        tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.add_special_tokens([EOS])
        Path(f"{name}.json").write_text(tokenizer.to_str(pretty=False))
    train = ("train-tokenizer", "--input", "text/one", "text/two")
    optimus_data(*train, "--vocab-size", 300, "--out", "bytes.json")


def write_configurations() -> None:
    folder = Path("configs")
    folder.mkdir()
    texts = {"moe": MOE, "dense": DENSE, "run": RUN} | CONFIGS
    for name, text in texts.items():
        (folder / f"{name}.toml").write_text(text.lstrip())


def tokenize(name: str, out: str, command: str = "run") -> list[str]:
    """Return the arguments with which `optimus-data` writes the data set `name` to `out`."""
    text, tokenizer, *options = TOKENIZE[name]
    words = [command, "--input", f"text/{text}", "--tokenizer", tokenizer, "--out", out, *options]
    if command == "run":
        return [*words, "--context", str(CONTEXT), *UNITS]
    return [*words, *(UNITS[:2] + UNITS[4:])]


def make_data() -> dict[str, dict]:
    commands = {name: tokenize(name, f"data/{name}") for name in TOKENIZE}
    commands["fused"] = [*tokenize("words", "data/fused"), "--fused"]
    commands["blend"] = ["blend", *BLEND, "--context", str(CONTEXT), "--out", "data/blend"]
    commands["again"] = ["shuffle", "data/words", "--to", "data/again", *AGAIN]
    expected = {}
    for name, command in commands.items():
        optimus_data(*command)
        if name == "again":
            optimus_data("shard", "data/again", "--workers", "1")
        path = Path("data", name)
        expected[name] = {"command": command, "instances": results.hash_instances(path)}
        if (path / "eval" / "manifest.json").exists():
            expected[name]["held_out"] = results.hash_instances(path / "eval")
        expected[name]["files"] = results.hash_files(path)
    return expected


def make_interrupted() -> dict[str, dict]:
    """Kill two commands of `optimus-data` before they finish.

    Then run each command again in a temporary copy of the working directory, where the command
    finishes. Return a dict that maps the name of each case to the command and the hashes of the
    finished files.
    """
    writer.SEGMENT_BYTES = (
        400  # so that units have checkpoints, which otherwise need 16 MiB of text
    )
    commands = {
        "tokenize": tokenize("words", "interrupted/tokenize", "tokenize"),
        "fused": [*tokenize("words", "interrupted/fused"), "--fused"],
    }
    expected = {}
    for name, command in commands.items():
        status = run_killed_at(command, KILLED_AFTER, before=False)
        assert status == -9, f"{name} ended with {status}"
        interrupted = Path("interrupted", name)
        for path in interrupted.rglob(".*"):
            assert files.is_temporary(path), path
            path.unlink()  # the file name contains the name of this machine
        with in_copy():
            optimus_data(*command)
            expected[name] = {"command": command, "files": results.hash_files(interrupted)}
    return expected


def make_run(name: str) -> dict:
    """Train a run to update STEP, and continue the run in temporary copies of the working
    directory.

    Return the values for `expected.json`.
    """
    run, config = Path("runs", name), f"configs/{name}.toml"
    start = ["train", config, f"train.run_dir={run}"]
    ranks = ["--nproc", RUNS[name]] if RUNS[name] > 1 else []
    optimus(*start, f"train.stop_at_step={STEP}", *ranks)
    (run / ".lock").unlink()
    expected = {"ranks": RUNS[name], "command": [*start, f"train.stop_at_step={STEP}"]}
    expected["states"] = results.hash_states(run)
    evaluate = ("--instances", 8, "--json")
    with in_copy():
        optimus(*start, *ranks)
        expected["continued"] = {"metrics": continued(run), "states": results.hash_states(run)}
        expected["continued"]["eval"] = read_json_lines(run / "eval.jsonl")[-1]
    full = run / "checkpoints" / f"step-{STEP:08d}"
    expected["loss"] = json.loads(optimus("eval", full, "data/more", *evaluate))["loss"]
    with in_copy():
        optimus("checkpoint", "export", full, "exported", "--dtype", "fp32")
        expected["exported"] = results.hash_weights(Path("exported"))
    if name in WITH_MODELS:
        model = run / "checkpoints" / f"model-{STEP:08d}"
        expected["model"] = {"weights": results.hash_weights(model)}
        loss = json.loads(optimus("eval", model, "data/more", *evaluate))["loss"]
        expected["model"]["loss"] = loss
        with in_copy():
            optimus(*start, f"checkpoint.load=model@{STEP}", *ranks)
            expected["model"]["metrics"] = continued(run)
    return expected


def continued(run: Path) -> list[dict]:
    lines = [line for line in metrics_of(run) if line["step"] > STEP]
    assert [line["step"] for line in lines] == list(range(STEP + 1, CONTINUED + 1))
    return lines


@contextlib.contextmanager
def in_copy() -> Iterator[None]:
    """Change to a temporary copy of the working directory, and back at the end."""
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(".", scratch, dirs_exist_ok=True)
        with contextlib.chdir(scratch):
            yield


if __name__ == "__main__":
    main()
