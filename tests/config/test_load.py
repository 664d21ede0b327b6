from __future__ import annotations

import os
import re

import pytest

from optimus.config import Config, dump_toml, load_config, make_config
from optimus.config.checks import nearest_divisor
from optimus.config.load import SYNONYMS, _hint, _section_type
from optimus.errors import ConfigError
from tests.kit.runs.tiny import DENSE, tiny_tree

MODEL = """
[model]
architecture = "olmoe"
num_layers = 2
hidden_size = 64
num_attention_heads = 4
intermediate_size = 32
num_experts = 4
num_experts_per_tok = 2
vocab_size = 128
"""


@pytest.fixture
def model_file(tmp_path):
    path = tmp_path / "model.toml"
    path.write_text(MODEL)
    return path


def test_overrides_replace_the_file_and_the_file_replaces_its_bases(tmp_path, model_file):
    (tmp_path / "run").mkdir()
    run = tmp_path / "run" / "run.toml"
    run.write_text('base = "../model.toml"\n[model]\nnum_layers = 3\n[optim]\nlr = 1e-3\n')
    config = load_config(run, ["optim.lr=2e-3", "train.dtype=fp32", "optim.betas=[0.8, 0.9]"])
    assert (config.model.num_layers, config.model.hidden_size) == (3, 64)
    assert (config.optim.lr, config.optim.betas, config.train.dtype) == (2e-3, (0.8, 0.9), "fp32")


def test_resolved_configuration_reads_back_equal(tmp_path, model_file):
    escapes = 'train.run_dir="a \\"b\\" \\\\c"'
    scaling = 'model.rope_scaling={type="linear", factor=2.0}'
    config = load_config(model_file, [escapes, scaling, "optim.lr=0.1234567890123456789"])
    assert config.train.run_dir == 'a "b" \\c'
    again = tmp_path / "again.toml"
    again.write_text(dump_toml(config))
    assert load_config(again) == config


def test_resolved_configuration_keeps_all_characters_of_a_setting(tmp_path, model_file):
    characters = [*map(chr, range(1, 0x100)), "\u2028", "\U0001f600", "\uffff"]
    config = load_config(model_file, [f"train.run_dir = r{''.join(characters)}x "])
    assert config.train.run_dir == f"r{''.join(characters)}x"
    again = tmp_path / "again.toml"
    again.write_bytes(dump_toml(config).encode())
    assert load_config(again) == config


@pytest.mark.parametrize(
    "value, message",
    [("r\udcff", r"train.run_dir = 'r\\udcff' is not UTF-8 text"), ("a\0b", "contains a NUL")],
)
def test_text_that_is_not_utf8_or_has_nul_is_refused(model_file, value, message):
    with pytest.raises(ConfigError, match=message):
        load_config(model_file, [f"train.run_dir={value}"])


HOSTILE_TOML = {
    "nested too deeply": "x = " + 100_000 * "[",
    "nested too deeply as tables": "x = " + 50_000 * "{a=",
    "4300 digits": "x = " + 5_000 * "9",
    "more than 64 bits": "x = [{y = 0x" + 5_000 * "f" + "}]",
    "more than 100 dots": "[" + ".".join(20_000 * "a") + "]",
    "larger than 1,048,576 bytes": "#" * (1 << 20) + "\n",
    "not UTF-8 text": "x = '\udcff'",
}


@pytest.mark.parametrize(("reason", "text"), HOSTILE_TOML.items(), ids=HOSTILE_TOML)
def test_hostile_file_is_refused(tmp_path, reason, text):
    path = tmp_path / "run.toml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=r"run\.toml: ") as caught:
        load_config(path)
    assert "\n" not in str(caught.value) and reason.partition(" as ")[0] in str(caught.value)


def test_fifo_and_directory_are_refused(tmp_path):
    os.mkfifo(tmp_path / "fifo.toml")
    with pytest.raises(ConfigError, match=r"fifo\.toml: not a regular file"):
        load_config(tmp_path / "fifo.toml")
    (tmp_path / "run.toml").write_text('base = "fifo.toml"\n')
    with pytest.raises(ConfigError, match=r"fifo\.toml: not a regular file"):
        load_config(tmp_path / "run.toml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(tmp_path)


def test_bases_are_read_once_and_limited_in_number(tmp_path, model_file):
    """Each of 25 files lists the previous file twice as a base.

    If a base were read each time that it is listed, 2**25 reads would be necessary.
    """
    (tmp_path / "0.toml").write_text(model_file.read_text())
    for number in range(1, 26):
        base = f'base = ["{number - 1}.toml", "{number - 1}.toml"]\n'
        (tmp_path / f"{number}.toml").write_text(base)
    assert load_config(tmp_path / "25.toml") == load_config(model_file)
    for number in range(26, 60):
        (tmp_path / f"{number}.toml").write_text(f'base = "{number - 1}.toml"\n')
    with pytest.raises(ConfigError, match="leads to more than 50 files"):
        load_config(tmp_path / "59.toml")


@pytest.mark.parametrize(
    "override, message",
    [
        ("max_step=5", r"not of the form section.key=value; did you mean train.max_steps\?$"),
        ("optim.lrr=1", r"unknown key optim.lrr = 1; did you mean optim.lr\?"),
        ("train.lr=1", r"unknown key train.lr = 1; did you mean optim.lr\?$"),
        ("optim.learning_rate=1", r"optim.learning_rate = 1; did you mean optim.lr\?$"),
        ("optim.warmup=1", r"did you mean optim.warmup_steps\?$"),
        ("optim.learnig_rate=1", r"did you mean optim.lr\?$"),
        ("model.num_hiden_layers=1", r"did you mean model.num_layers\?$"),
        (
            "train.batch_size=8",
            r"did you mean train.global_batch_tokens or train.microbatch_size\?$",
        ),
        ("model.num_hidden_layers=2", r"did you mean model.num_layers\?$"),
        ("model.d-model=2", r"did you mean model.hidden_size\?$"),
        ("model.top_k=2", r"did you mean model.num_experts_per_tok\?$"),
        ("train.output_dir=x", r"did you mean train.run_dir\?$"),
        ("parallel.tensor_parallel=2", r"did you mean parallel.tp\?$"),
        ("train.tensor_parallel=2", r"did you mean parallel.tp\?$"),
        ("model.schedule=linear", r"did you mean parallel.schedule or optim.schedule\?$"),
        (
            "distributed.tp_size=2",
            r"unknown key distributed.tp_size = 2; did you mean parallel.tp\?$",
        ),
        ("train.warmup_step=2", r"did you mean optim.warmup_steps\?$"),
        (
            "train.batchsize=2",
            r"did you mean train.global_batch_tokens or train.microbatch_size\?$",
        ),
        ("optim.Learning-Rat=2", r"did you mean optim.lr\?$"),
        ("train.qqq=2", r"the keys of \[train\] are run_dir"),
        ("eval.interval=0", r"unknown key eval.interval = 0; did you mean train.eval_interval\?$"),
        ("optimm.lr=1", r"unknown key optimm.lr = 1; did you mean optim.lr\?"),
        ("foo.bar=1", r"unknown key foo.bar = 1; the keys of the file are model"),
        ("optim.lr=fast", r"optim.lr = 'fast'.* valid number"),
        ("optim.lr=nan", r"optim.lr = nan.* finite"),
        ("optim.lr=-1", r"optim.lr = -1.* greater than 0"),
        ("model.num_layers=2.5", r"model.num_layers = 2.5.* valid integer"),
        ("model.num_layers=true", r"model.num_layers = True.* valid integer"),
        ("train.deterministic=1", r"train.deterministic = 1.* valid boolean"),
        ("train.dtype=bf61", r"train.dtype = 'bf61': must be .* did you mean 'bf16'\?"),
        ("optim.betas=[0.9]", r"optim.betas = \[0.9\]: must be a list of 2 values$"),
        ("optim.betas=[0.9, 0.9, 0.9]", r"optim.betas = .*: must be a list of 2 values$"),
        ("optim.betas=0.9,0.95", r"optim.betas = '0.9,0.95': must be a list in brackets"),
        ("optim.betas=[0.9", r"^command line: optim.betas = \[0.9: the closing \] is missing"),
        ("optim.betas=[0.9 0.95]", r"optim.betas = \[0.9 0.95\]: not readable as TOML: .*commas"),
        ('train.run_dir="a', r"train.run_dir = \"a: the closing \" is missing"),
        ("optim.betas=[0.9, 1.0]", r"optim.betas.1 = 1.0.* less than 1"),
        ("train.seq_len", r"not of the form section.key=value"),
        ("train=3", r"not of the form section.key=value$"),
        ("lr=3", r"not of the form section.key=value; did you mean optim.lr\?"),
        ("learning_rate=3", r"not of the form .* did you mean optim.lr\?"),
        ("model.vocab_size.x=3", r"vocab_size is a value, not a section"),
        ("model.hidden_size=4611686018427387904", "hidden_size = .* more elements than torch"),
        ("model.vocab_size=4611686018427387904", "vocab_size .* more elements than torch"),
        ("model.intermediate_size=4611686018427387904", "intermediate_size .* more elements"),
        ("model.num_layers=4097", "num_layers = 4097.* 4096"),
        ("model.hidden_size=65", r"hidden_size = 65 is not divisible by num_attention_heads = 4"),
        ("model.num_key_value_heads=3", r"num_key_value_heads = 3 must divide .* nearest .* 2"),
        ("model.num_experts_per_tok=5", r"num_experts_per_tok = 5 .*num_experts = 4"),
        ("model.architecture=olmo", r"'olmo' is dense"),
        ("train.seq_len=5000", r"train.seq_len = 5000 exceeds .* = 4096"),
        ("train.seq_len=1", r"train.seq_len = 1"),
        ("optim.min_lr=1.0", r"optim.min_lr = 1.0 exceeds optim.lr"),
        ('recompute.modules=["moe", "moe"]', r"recompute.modules = .*moe.* names a module twice"),
        ('recompute.modules=["mlp"]', r"recompute.modules.0 = 'mlp': must be .*'norm'"),
        ("train.threads=100000", r"train.threads = 100000.* 1024"),
        ("resilience.x=1", r"unknown key resilience.x = 1; the keys of \[resilience\] are heart"),
        ("optim.loss_scale=1024", r"optim.loss_scale = 1024 has no meaning with .*'bf16'.*'fp16'"),
        (
            "optim.groups=[{weight_decay=0}]",
            r"optim.groups.0.pattern is missing; .* as optim.groups=\[\{pattern=VALUE\}\]$",
        ),
        (
            'optim.groups=[{patern="*"}]',
            r"unknown key optim.groups.0.patern = '\*'; did you mean optim.groups.0.pattern\?",
        ),
        ("train.epochs=3", r"unknown key train.epochs = 3; did you mean train.max_steps\?"),
        (f"optim.frozen={['x'] * 1001}", r"optim.frozen has 1,001 patterns"),
        (f"optim.frozen=['{'*' * 257}']", r"optim.frozen has 1 pattern of up to 257"),
        (
            'optim.groups=[{pattern="*", weight_deca=0}]',
            r"unknown key optim.groups.0.weight_deca = 0; did you mean optim.groups.0.weight_decay",
        ),
    ],
)
def test_wrong_override_is_refused_with_key_value_and_remedy(model_file, override, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(model_file, [override])
    assert "\n" not in str(caught.value) and str(model_file) not in str(caught.value)


def test_synonyms_belong_to_keys_and_lead_to_them():
    keys = {
        f"{name}.{key}"
        for name, field in Config.model_fields.items()
        for key in _section_type(field.annotation).model_fields
    }
    assert set(SYNONYMS) <= keys
    for key, names in SYNONYMS.items():
        for name in names.split():
            hint = _hint([*key.split(".")[:1], name], 1, Config)
            assert hint.startswith("did you mean") and key in hint, (key, name, hint)


def test_error_names_the_file_or_the_command_line_that_set_the_value(tmp_path, model_file):
    """If both a file and the command line set a key, the error names the command line."""
    run = tmp_path / "run.toml"
    run.write_text(f'base = "{model_file.name}"\n[optim]\nlr = -1.0\nlrr = 2.0\n')
    for overrides, message in (
        ([], rf"^{re.escape(str(run))}: optim.lr = -1.0"),
        (["optim.lr=-2"], r"^command line: optim.lr = -2:"),
        (["train.dtype=fp32"], rf"^{re.escape(str(run))}: optim.lr = -1.0"),
        (["optim.lr=1e-3"], rf"^{re.escape(str(run))}: unknown key optim.lrr"),
        (["optim.lr=1e-3", "optim.lrr=3"], r"^command line: unknown key optim.lrr = 3"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config(run, overrides)


FAST = {"train__deterministic": False}
COMPILED = FAST | {"train__compile": True}
BF16_GRADIENTS = {"train__dtype": "bf16", "optim__grad_dtype": "bf16"}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"train__global_batch_tokens": 100}, r"batch_tokens = 100 .* nearest multiple is 96"),
        ({"optim__warmup_steps": 21}, r"warmup_steps = 21 exceeds the 20 steps"),
        ({"train__stop_at_step": 21}, r"stop_at_step = 21"),
        (
            {"optim__schedule": "constant", "optim__decay_steps": 5},
            r"decay_steps = 5 has no meaning",
        ),
        ({"checkpoint__keep_models_every": 5}, r"keep_models_every = 5: all .* are kept anyway"),
        ({"optim__clip_norm": 0.0, "optim__clip_after_warmup": True}, r"clip_after_warmup"),
        (
            {"train__dtype": "fp16"},
            r"train.dtype = 'fp16'.* train.deterministic needs 'bf16' or 'fp32'",
        ),
        (
            {"train__dtype": "fp16", "train__deterministic": False, "optim__loss_scale": 1000.0},
            r"optim.loss_scale = 1000 must be a power of two, such as 1024",
        ),
        (
            {"train__dtype": "fp16", "train__deterministic": False, "optim__loss_scale": 0.5},
            r"optim.loss_scale = 0.5 is below optim.min_loss_scale = 1",
        ),
        ({"optim__grad_reduce_dtype": "bf16"}, r"grad_reduce_dtype = 'bf16' rounds gradients"),
        (
            {"model__aux_loss_form": "hf", "parallel__pp": 2},
            r"aux_loss_form = 'hf' needs all layers on one pipeline stage, .* 2 stages",
        ),
        ({"parallel__ep_dispatch": "alltoall"}, r"ep_dispatch = 'alltoall': .* 'allgather'"),
        (DENSE | {"recompute__modules": ["moe"]}, r"recompute.modules contains 'moe', .* 'block'"),
        (
            DENSE | {"recompute__modules": ["experts"]},
            r"recompute.modules contains 'experts', .* 'block'",
        ),
        (DENSE | {"model__router": "uniform"}, r"model.router = 'uniform': .* no router"),
        (BF16_GRADIENTS, r"optim.grad_dtype = 'bf16' .*train.deterministic needs 'fp32'"),
        (
            FAST | BF16_GRADIENTS | {"train__dtype": "fp32"},
            r"optim.grad_dtype = 'bf16' .*not 'fp32'; leave optim.grad_dtype at",
        ),
        ({"optim__cache_chunks": 3}, r"optim.cache_chunks = 3"),
        ({"optim__resident": "cache"}, r"optim.sharding = 'none'"),
        (
            COMPILED | {"optim__resident": "cache", "optim__sharding": "so"},
            r"train.compile = true",
        ),
        ({"train__compile": True}, r"train.deterministic needs train.compile = false"),
        (COMPILED | {"parallel__tp": 2}, r"and parallel.tp = 2: a block is compiled"),
        (COMPILED | {"parallel__ep": 4}, r"use parallel.ep = 1 or train.comp"),
        (COMPILED | {"data__document_mask": True}, r"use data.document_mask = false"),
        ({"kernels__grouped_gemm": "torch"}, r"train.deterministic needs 'loop'"),
        (DENSE | {"kernels__grouped_gemm": "loop"}, r"architecture 'olmo' has no experts"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        make_config(tiny_tree("d", "r", **change))


def test_missing_and_invalid_files_are_refused(tmp_path, model_file):
    with pytest.raises(ConfigError, match=r"modle.toml: no such .*did you mean .*model.toml\?"):
        load_config(tmp_path / "modle.toml")
    for content, line in ((b"[model\n", 1), (b"\n\nx = [1,\n2", 4), (b"# a\n# \xff\n", 2)):
        (tmp_path / "bad.toml").write_bytes(content)
        with pytest.raises(ConfigError, match=rf"bad.toml: not readable as TOML: .*at line {line}"):
            load_config(tmp_path / "bad.toml")
    (tmp_path / "a.toml").write_text('base = "b.toml"')
    (tmp_path / "b.toml").write_text('base = "a.toml"')
    with pytest.raises(ConfigError, match="inherits from itself"):
        load_config(tmp_path / "a.toml")
    for base, text in (("model = 5", "[model]\nnum_layers = 2"), ("[model]", "model = 5")):
        (tmp_path / "d.toml").write_text(base)
        (tmp_path / "e.toml").write_text(f'base = "d.toml"\n{text}')
        with pytest.raises(ConfigError, match="e.toml: model is a (section|value) here and a"):
            load_config(tmp_path / "e.toml")
    (tmp_path / "c.toml").write_text("base = 3")
    with pytest.raises(ConfigError, match="must be a file name"):
        load_config(tmp_path / "c.toml")


def test_file_without_a_model_is_refused(tmp_path):
    (tmp_path / "empty.toml").write_text("")
    with pytest.raises(ConfigError, match=r"model is missing"):
        load_config(tmp_path / "empty.toml")


def test_fields_of_all_sections_have_docstrings():
    from optimus.config import Config

    for name, section in Config.model_fields.items():
        for key, field in section.annotation.model_fields.items():
            assert field.description, f"{name}.{key} has no docstring"


@pytest.mark.parametrize(
    ("number", "near", "nearest"),
    [(12, 5, 4), (12, 7, 6), (12, 40, 12), (7, 3, 1), (2**63 - 1, 4, 1), (2**63 - 1, 2**62, 1)],
)
def test_the_nearest_divisor_of_any_number_takes_no_time(number, near, nearest):
    assert nearest_divisor(number, near) == nearest
