"""Read TOML files and command-line overrides into a validated, frozen `Config`."""

from __future__ import annotations

import contextlib
import copy
import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from optimus.config.checks import check
from optimus.config.sections import Config
from optimus.errors import ConfigError, one_line
from optimus.io.files import read_regular

Tree = dict[str, Any]
_MAX_FILES = 50
"""Maximum number of files of a configuration, including all `base` files."""
_MAX_BYTES, _MAX_DOTS = 1 << 20, 100
"""Maximum size of a configuration file in bytes, and maximum number of dots in each line."""

SYNONYMS: dict[str, str] = {
    "model.num_layers": "n_layer n_layers num_hidden_layers layers depth",
    "model.hidden_size": "hidden_dim d_model n_embd embed_dim model_dim dim width",
    "model.num_attention_heads": "n_head n_heads num_heads heads",
    "model.num_key_value_heads": "n_kv_heads num_kv_heads num_query_groups",
    "model.head_dim": "kv_channels head_size",
    "model.intermediate_size": "ffn_dim ffn_hidden_size d_ff mlp_dim moe_intermediate_size "
    "moe_ffn_hidden_size expert_hidden_size",
    "model.num_experts": "n_experts num_local_experts n_routed_experts moe_num_experts experts",
    "model.num_experts_per_tok": "top_k topk moe_top_k router_topk moe_router_topk "
    "experts_per_token num_experts_per_token",
    "model.vocab_size": "n_vocab padded_vocab_size",
    "model.tie_embeddings": "tie_word_embeddings tied_embeddings weight_tying",
    "model.norm_eps": "rms_norm_eps layer_norm_eps layernorm_epsilon",
    "model.rope_theta": "rope_base rotary_base",
    "model.max_position_embeddings": "max_context",
    "model.init_std": "initializer_range init_method_std",
    "model.aux_loss_coef": "router_aux_loss_coef moe_aux_loss_coeff moe_loss_weight",
    "model.z_loss_coef": "router_z_loss_coef moe_z_loss_coeff moe_zloss_weight",
    "data.path": "data_path data_dir train_data dataset dataset_path",
    "data.eval_path": "eval_data val_data val_path validation_path",
    "parallel.tp": "tensor_parallel tensor_parallel_size tensor_model_parallel_size tp_size "
    "tp_degree tensor_parallel_degree",
    "parallel.pp": "pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size pp_size "
    "pp_degree pipeline_parallel_degree",
    "parallel.ep": "expert_parallel expert_parallel_size expert_model_parallel_size ep_size "
    "ep_degree expert_parallel_degree",
    "parallel.dp": "data_parallel data_parallel_size dp_size dp_degree dp_replicate "
    "data_parallel_replicate_degree",
    "train.run_dir": "output_dir out_dir save_dir save_folder log_dir checkpoint_dir dump_folder",
    "train.max_steps": "steps num_steps total_steps training_steps num_train_steps max_iters "
    "train_iters epochs num_epochs num_train_epochs max_epochs",
    "train.seed": "random_seed",
    "train.seq_len": "seq_length sequence_length context context_length block_size max_seq_len "
    "max_sequence_length",
    "train.global_batch_tokens": "batch_size global_batch_size train_batch_size total_batch_size "
    "batch_tokens gradient_accumulation_steps grad_accum_steps",
    "train.microbatch_size": "batch_size micro_batch_size device_batch_size local_batch_size "
    "per_device_train_batch_size",
    "train.dtype": "precision mixed_precision param_dtype bf16 fp16",
    "train.compile": "torch_compile compile_model",
    "train.threads": "num_threads omp_num_threads",
    "train.eval_interval": "eval_every eval_steps eval_freq val_interval",
    "optim.lr": "learning_rate peak_lr max_lr base_lr",
    "optim.min_lr": "min_learning_rate lr_min final_lr",
    "optim.warmup_steps": "warmup num_warmup_steps warmup_iters lr_warmup_steps lr_warmup_iters",
    "optim.decay_steps": "lr_decay_steps lr_decay_iters",
    "optim.schedule": "scheduler lr_schedule lr_scheduler lr_scheduler_type lr_decay_style",
    "optim.betas": "beta1 beta2 adam_beta1 adam_beta2",
    "optim.eps": "epsilon adam_eps adam_epsilon",
    "optim.weight_decay": "wd",
    "optim.clip_norm": "grad_clip clip_grad grad_norm_clip max_grad_norm gradient_clipping",
    "optim.sharding": "zero zero_stage zero1 fsdp use_distributed_optimizer",
    "recompute.modules": "activation_checkpointing gradient_checkpointing recompute_granularity",
    "checkpoint.interval": "save_interval save_every save_steps checkpoint_interval ckpt_interval",
    "checkpoint.load": "load_path resume resume_from restore_from load_from",
    "observe.log_interval": "log_every log_freq log_steps logging_steps",
}
"""Names of each setting in Hugging Face, Megatron-LM, torchtitan and nanoGPT, separated by spaces.
If an unknown key is one of these names, the error message suggests the setting."""


def load_config(path: str | os.PathLike, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file and its `base` files, apply overrides, and return a validated configuration.

    Args:
        path: The TOML file.
        overrides: Settings `section.key=value`, which take precedence over the files.

    Raises:
        ConfigError: The configuration is invalid. The message names the key, the value and the
            remedy.
    """
    tree = read_tree(Path(path))
    overridden = [_apply_override(tree, override) for override in overrides]
    return make_config(tree, str(path), overridden)


def load_saved_config(path: str | os.PathLike) -> Config:
    """Read the config.toml of a checkpoint and return its validated configuration.

    The key `base` is refused, because its value could be the path of any file on this machine.

    Raises:
        ConfigError: The configuration is invalid or has the key `base`.
    """
    tables = _read_toml(Path(path))
    if "base" in tables:
        raise ConfigError(
            f"{path}: base = {tables['base']!r}: a checkpoint has no base files; remove this key"
        )
    return make_config(tables, str(path))


def make_config(
    tree: Mapping[str, Any],
    source: str = "configuration",
    overridden: Sequence[Sequence[str]] = (),
) -> Config:
    """Validate nested dicts of plain values and return the configuration.

    Args:
        tree: Dict of sections by name. Each section is a dict of values by key.
        source: Origin of the values for error messages, such as a file name.
        overridden: Key paths of the values from the command line, such as `["train", "seed"]`.
            Errors in these values name the command line instead of `source`.

    Raises:
        ConfigError: The configuration is invalid. The message names the key, the value and the
            remedy.
    """
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        wrong = [str(key) for key in error.errors(include_url=False)[0]["loc"]]
        is_override = any(
            all(a == b for a, b in zip(wrong, path, strict=False)) for path in overridden
        )
        raise ConfigError(
            f"{'command line' if is_override else source}: {explain(error)}"
        ) from None
    for key, value in _leaves(config.model_dump()):
        text = value if isinstance(value, str) else ""
        unencodable = any("\ud800" <= character <= "\udfff" for character in text)
        if unencodable or "\0" in text:
            problem = "is not UTF-8 text" if unencodable else "contains a NUL character"
            raise ConfigError(f"{key} = {text!r} {problem}; use another value")
    check(config)
    return config


def _leaves(value: Any, location: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each element of nested mappings, lists and tuples."""
    if isinstance(value, (Mapping, list, tuple)):
        for key, element in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _leaves(element, f"{location}.{key}" if location else str(key))
    else:
        yield location, value


def read_tree(path: Path) -> Tree:
    """Return the tables of a TOML file, merged with the tables of its base files.

    The value of the key `base` is one or more base files, with paths relative to the directory of
    the file. A file takes precedence over its base files, and a base file takes precedence over
    earlier base files in the list.

    Raises:
        ConfigError: A file is missing or not readable as TOML, a file inherits from itself, or
            there are more than `_MAX_FILES` files.
    """
    return _read_tree(path, (), {})


def _read_tree(path: Path, children: tuple[Path, ...], trees: dict[Path, Tree]) -> Tree:
    """Implement `read_tree` by recursion over base files.

    Args:
        path: The TOML file.
        children: Files that led to `path`. The key `base` of each file names the next file, and
            the key `base` of the last file names `path`.
        trees: Results for the files that have been read, by path.
    """
    path = path.resolve()
    if path in children:
        raise ConfigError(
            f"{path}: the file inherits from itself; remove this file from the key 'base' in "
            f"{children[-1]}"
        )
    # Without the cache, 25 files that each name the next file twice would take 2^25 reads.
    if path in trees:
        return copy.deepcopy(trees[path])
    if len(children) + len(trees) >= _MAX_FILES:
        raise ConfigError(
            f"{path}: the key 'base' leads to more than {_MAX_FILES} files; merge some of them"
        )
    tables = _read_toml(path)
    bases = tables.pop("base", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ConfigError(f"{path}: base = {bases!r} must be a file name or a list of file names")
    tree: Tree = {}
    for base in bases:
        _merge(tree, _read_tree(path.parent / base, (*children, path), trees), path.parent / base)
    trees[path] = copy.deepcopy(_merge(tree, tables, path))
    return tree


def _read_toml(path: Path) -> Tree:
    content = b""
    try:
        content = read_regular(path, _MAX_BYTES)
        return _parse_toml(content.decode("utf-8"))
    except FileNotFoundError:
        names = []
        with contextlib.suppress(OSError):
            names = [entry.name for entry in path.parent.iterdir() if entry.suffix == ".toml"]
        near = difflib.get_close_matches(path.name, names, n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise ConfigError(f"{path}: no such configuration file{hint}") from None
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; give the path of a readable TOML file"
        ) from None
    except ValueError as error:
        reason = one_line(error)
        if isinstance(error, UnicodeDecodeError):
            line = content.count(b"\n", 0, error.start) + 1
            reason = f"not UTF-8 text (at line {line})"
        end = f"(at line {len(content.splitlines())}, the end of the file)"
        reason = reason.replace("(at end of document)", end)
        raise ConfigError(f"{path}: not readable as TOML: {reason}") from None


def _parse_toml(text: str) -> Tree:
    """Return the tables of a TOML text. Raises ValueError if the text is invalid."""
    # The time of tomllib is quadratic in the number of dots in a key: 10,000 dots take 2 s.
    if any(line.count(".") > _MAX_DOTS for line in text.splitlines()):
        raise ValueError(f"a line has more than {_MAX_DOTS} dots; no setting has such a name")
    try:
        tree = tomllib.loads(text)
        for _, value in _leaves(tree):
            if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:  # the range of TOML
                # Without the value: Python refuses to print integers of more than 4,300 digits.
                raise ValueError("an integer has more than 64 bits")
    except RecursionError:
        raise ValueError("values are nested too deeply") from None
    return tree


def dump_toml(config: Config) -> str:
    """Return the configuration as TOML text. `load_config` reads an equal configuration from it."""
    lines: list[str] = []
    for name, section in config.model_dump(exclude_none=True).items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {_toml_value(value)}" for key, value in section.items()]
        lines.append("")
    return "\n".join(lines)


def explain(error: ValidationError, root: type[BaseModel] = Config) -> str:
    """Return the message for the first error of a validation, as `key = value: problem; remedy`.

    Args:
        error: The error, from pydantic.
        root: The pydantic model whose validation failed. The message suggests names of its keys.
    """
    errors = error.errors(include_url=False)
    table = errors[0]["loc"][:-1]
    # A misspelt required key gives two errors: the key is missing, and the misspelling is unknown.
    # Report the unknown key, since it is the key that the file contains.
    unknown = (e for e in errors if e["type"] == "extra_forbidden" and e["loc"][:-1] == table)
    first = next(unknown, errors[0]) if errors[0]["type"] == "missing" else errors[0]
    location = [str(key) for key in first["loc"]]
    key = ".".join(location)
    if first["type"] == "extra_forbidden":
        value, hint = first["input"], _hint(location, first["input"], root)
        if len(location) == 1 and isinstance(value, dict) and value:  # an unknown section
            name, value = next(iter(value.items()))
            key = f"{key}.{name}"
        return f"unknown key {key} = {value!r}; {hint}"
    if first["type"] == "missing" and location[-1].isdigit():  # an element of a tuple
        section = root
        for name in location[:-2]:
            if name.isdigit():  # the index of a table in a list of tables
                continue
            section = _section_type(section.model_fields[name].annotation)
        annotation: Any = section.model_fields[location[-2]].annotation
        key, length = ".".join(location[:-1]), len(annotation.__args__)
        return f"{key} = {list(first['input'])!r}: must be a list of {length} values"
    if first["type"] == "missing":
        override = f"{key}=VALUE"
        if location[-2:-1] and location[-2].isdigit():  # a table in a list of tables
            override = f"{'.'.join(location[:-2])}=[{{{location[-1]}=VALUE}}]"
        where = f" or as {override}" if root is Config else ""
        return f"{key} is missing; give it in the file{where}"
    value = first["input"]
    has_table = isinstance(value, dict) or (isinstance(value, list) and dict in map(type, value))
    if first["type"] == "value_error" and has_table:
        return f"{key}: {_reason(first)}"  # the reason names the wrong key and value of the table
    return f"{key} = {first['input']!r}: {_reason(first)}"


def _reason(error: Mapping[str, Any]) -> str:
    if error["type"] == "literal_error":
        expected = error["ctx"]["expected"]
        choices = [choice.strip("' ") for choice in expected.replace(" or ", ",").split(",")]
        near = difflib.get_close_matches(str(error["input"]), choices, n=1, cutoff=0.5)
        return f"must be {expected}" + (f"; did you mean {near[0]!r}?" if near else "")
    if error["type"] == "value_error":  # raised by a validator of optimus.config.sections
        return str(error["ctx"]["error"])
    if error["type"] in ("tuple_type", "list_type"):
        return "must be a list in brackets, such as [VALUE, VALUE]"
    if error["type"] == "too_long":
        return f"must be a list of {error['ctx']['max_length']} values"
    message = error["msg"][0].lower() + error["msg"][1:]
    return message.replace("input should", "it should")


def _hint(location: Sequence[str], value: Any, root: type[BaseModel]) -> str:
    """Return a hint for an unknown key: similar keys or, if there are none, all keys of the
    section.

    Args:
        location: Path of the unknown key, such as `["optim", "lrr"]`.
        value: Value of the unknown key; a dict if the key is an unknown section.
        root: The pydantic model that contains the section. Keys in `SYNONYMS` are suggested only if
            `root` is `Config`.
    """
    section = root
    for key in location[:-1]:
        if not key.isdigit():  # the index of a table in a list of tables
            section = _section_type(section.model_fields[key].annotation)
    wrong, names = location[-1], list(section.model_fields)
    prefix = ".".join(location[:-1])

    def in_section(cutoff: float) -> list[str]:
        return [".".join([*location[:-1], name]) for name in _nearest(wrong, names, cutoff)]

    candidates: list[str] = []
    if root is Config and len(location) == 1 and isinstance(value, dict):  # an unknown section
        for name in value:  # for eval.interval, look for eval_interval, then for interval
            candidates += _synonymous(f"{wrong}_{name}", "") or _synonymous(name, wrong)
    elif root is Config and len(location) == 2:
        candidates = _synonymous(wrong, prefix) or in_section(0.85)
        if not candidates:  # a misspelt synonym, or a misspelt key of another section
            for name in _nearest(wrong, _KEYS | _SYNONYM_WORDS, 0.85):
                candidates = _synonymous(name, prefix)
    candidates = candidates or in_section(0.6)
    if candidates:
        return f"did you mean {' or '.join(candidates)}?"
    return f"the keys of {f'[{prefix}]' if prefix else 'the file'} are {', '.join(names)}"


def _synonymous(wrong: str, section: str) -> list[str]:
    """Return the settings that an unknown key may mean, with their sections, such as `optim.lr`.

    `wrong` is the unknown key. The result contains the settings of any section that have this name.
    If there are none, the result contains the settings that have this name as a synonym. If some
    settings of the result are in `section`, the settings of other sections are left out.
    """
    wrong = wrong.lower().replace("-", "_")
    same = [
        f"{name}.{wrong}"
        for name, field in Config.model_fields.items()
        if wrong in _section_type(field.annotation).model_fields
    ]
    keys = same or [key for key, names in SYNONYMS.items() if wrong in names.split()]
    return [key for key in keys if key.startswith(f"{section}.")] or keys


def _nearest(wrong: str, names: Iterable[str], cutoff: float) -> list[str]:
    """Return a list with the name in `names` that is most similar to `wrong`.

    Return an empty list if the similarity of the most similar name is less than `cutoff`, a number
    from 0 to 1.
    """
    plain = {re.sub("[-_]", "", name): name for name in names}
    wrong = re.sub("[-_]", "", wrong.lower())
    return [plain[name] for name in difflib.get_close_matches(wrong, plain, n=1, cutoff=cutoff)]


def _section_type(annotation: Any) -> type[BaseModel]:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    raise AssertionError(f"{annotation} is not a section")


_SYNONYM_WORDS = {word for words in SYNONYMS.values() for word in words.split()}
_KEYS = {
    name
    for field in Config.model_fields.values()
    for name in _section_type(field.annotation).model_fields
}


def _apply_override(tree: Tree, override: str) -> list[str]:
    """Set the value of an override `section.key=value` in `tree`. Return the key path, such as
    `["optim", "lr"]`."""
    key, equals, text = override.partition("=")
    location = key.strip().split(".")
    if not equals or len(location) < 2 or not all(location):
        near = [location[0], *_nearest(location[0], _KEYS | _SYNONYM_WORDS, 0.85)]
        candidates = [_synonymous(name, "") for name in near] if len(location) == 1 else []
        keys = next(filter(None, candidates), [])
        hint = f"; did you mean {' or '.join(keys)}?" if keys else ""
        raise ConfigError(f"override {override!r} is not of the form section.key=value{hint}")
    table: Any = tree
    for name in location[:-1]:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise ConfigError(f"override {override!r}: {name} is a value, not a section")
    table[location[-1]] = _parse_value(key.strip(), text.strip())
    return location


def _parse_value(key: str, text: str) -> Any:
    """Parse `text`, the value of an override, as TOML. If it is not TOML, return `text` itself.

    Raises:
        ConfigError: `text` starts like a list, a table or a quoted string, but is not TOML.
    """
    try:
        return _parse_toml(f"value = {text}")["value"]
    except (ValueError, KeyError) as error:
        closing = {"[": "]", "{": "}", '"': '"', "'": "'"}.get(text[:1])
        if closing is None:
            return text
        if not text.endswith(closing) or len(text) == 1:
            problem = (
                f"the closing {closing} is missing; add it, and quote the override for the shell"
            )
        else:
            reason = re.sub(r" \(at [^)]*\)$", "", one_line(error))
            problem = f"not readable as TOML: {reason}; separate values by commas, quote text"
        raise ConfigError(f"command line: {key} = {text}: {problem}") from None


def _merge(tree: Tree, over: Mapping[str, Any], path: Path, section: str = "") -> Tree:
    """Merge the tables of a file into `tree`, and return `tree`.

    Args:
        tree: Tables of the files that were read before, which this function changes in place.
        over: Tables of the file `path`, which take precedence.
        path: The file, for messages.
        section: Prefix of the keys in messages.

    Raises:
        ConfigError: A key is a section in `tree` and a value in `over`, or the reverse.
    """
    for key, value in over.items():
        is_section = isinstance(value, Mapping)
        if key in tree and is_section != isinstance(tree[key], dict):
            kind, before = ("section", "value") if is_section else ("value", "section")
            raise ConfigError(
                f"{path}: {section}{key} is a {kind} here and a {before} in another file of the "
                "configuration; make it a section in all files, or a value in all files"
            )
        if is_section and key in tree:
            _merge(tree[key], value, path, f"{section}{key}.")
        else:
            tree[key] = value
    return tree


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON and TOML have the same escapes, but TOML also requires an escape for DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_toml_value(v)}" for key, v in value.items()) + "}"
    return repr(value)
