from __future__ import annotations

import argparse
import fcntl
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import data_prep.cli.commands
import optimus.cli
from optimus.cli import main
from optimus.train.run_dir import RunDirectory
from tests.kit.ranks.processes import ROOT
from tests.kit.runs.tiny import tiny_tree
from tests.kit.runs.training import train_on
from tests.launch.test_spawn import write_config


@pytest.fixture(scope="module")
def run_dir(rank_pool, tiny_data, tmp_path_factory):
    path = tmp_path_factory.mktemp("cli") / "run"
    settings = {"train__max_steps": 4, "train__eval_instances": 0}
    train_on(rank_pool.run, 1, tiny_tree(tiny_data, path, **settings))
    return path


def test_help_imports_no_torch():
    code = (
        "import sys; from optimus.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    )
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield `parser` and the parsers of all its commands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from parsers(command)


@pytest.mark.parametrize(
    "program", [optimus.cli, data_prep.cli.commands], ids=["optimus", "optimus-data"]
)
def test_commands_and_options_have_help(program):
    found_parsers = list(parsers(program._parser()))
    assert len(found_parsers) > 10
    for parser in found_parsers:
        assert parser.description and parser.format_help(), parser.prog
        for action in parser._actions:
            assert action.help or action.choices, f"{parser.prog}: {action.dest}"


@pytest.mark.parametrize(
    "arguments",
    [[], ["trian"], ["train"], ["train", "x.toml", "--nprocs", "2"], ["report", "a", "b=c"]],
)
def test_wrong_usage_ends_in_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2


def test_user_error_is_a_single_line_and_status_2(capsys, tmp_path):
    assert main(["train", str(tmp_path / "absent.toml")]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("optimus: error: ") and errors.count("\n") == 1


def test_overrides_may_follow_options(tiny_data, tmp_path, capsys):
    config = write_config(tmp_path / "c.toml", tiny_tree(tiny_data, tmp_path / "run"))
    assert main(["train", str(config), "--nproc", "2", "optim.lrr=1"]) == 2
    assert "did you mean optim.lr?" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "bench step"])
def test_nproc_below_1_is_refused(command, tiny_data, tmp_path, capsys):
    config = write_config(tmp_path / "c.toml", tiny_tree(tiny_data, tmp_path / "run"))
    assert main([*command.split(), str(config), "--nproc", "0"]) == 2
    error = capsys.readouterr().err
    assert "--nproc 0 must be at least 1; leave --nproc out" in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


WAIT = "[print(1, flush=True), *(time.sleep(0.1) for _ in range(600))]"
"""Expression that waits for a signal. A signal that arrives directly before the system call of a
sleep does not end the sleep, so each sleep is short."""


def run_process(main: str, *arguments: str, **options) -> subprocess.Popen:
    """Start the command `optimus` in a process, and return the process. The Python expression
    `main` is evaluated instead of the call of `cli.main`, and gives the exit status."""
    code = f"import sys, time, optimus.cli as cli; cli.main = lambda: {main}; cli.process()"
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, text=True, stderr=subprocess.PIPE, **options)


def test_a_path_that_is_no_text_is_printed_with_escapes():
    process = run_process(r"print('\udcff') or 0", stdout=subprocess.PIPE)
    assert process.communicate(timeout=30) == ("\\udcff\n", "") and process.returncode == 0
    code = r"""
import sys, data_prep.cli as cli
cli._main = lambda argv: print("\udcff") or 0
sys.exit(cli.main())"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("\\udcff\n", "", 0)


@pytest.mark.parametrize(
    ("number", "label", "status"),
    [(signal.SIGINT, "Ctrl-C", 130), (signal.SIGTERM, "SIGTERM", 3), (signal.SIGHUP, "SIGHUP", 3)],
)
def test_signal_before_the_first_step_ends_training_with_a_single_line(number, label, status):
    process = run_process(WAIT, "train", stdout=subprocess.PIPE)
    assert process.stdout.readline() == "1\n"
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == status
    assert errors == (
        f"optimus: stopped before the first step ({label}); run the same command again to start\n"
    )


def test_sigterm_ends_other_commands_with_a_single_line():
    process = run_process(WAIT, "eval", stdout=subprocess.PIPE)
    assert process.stdout.readline() == "1\n"
    process.terminate()
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (130, "optimus: ended by SIGTERM\n")


def test_ctrl_c_during_imports_ends_the_command_without_a_traceback():
    code = """
import os, signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "optimus.errors":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
from optimus.__main__ import main
main()"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_ctrl_c_ends_a_command_even_if_an_import_ignores_exceptions():
    """The handler of Ctrl-C must end the process without an exception, because an import could
    ignore the exception. While the handler prints "interrupted", a second Ctrl-C arrives. The
    second Ctrl-C must have no effect."""
    code = """
import logging, os, signal
handler = logging.Handler()
handler.emit = lambda record: os.kill(os.getpid(), signal.SIGINT)
logging.getLogger("optimus").handlers.insert(0, handler)
try:
    os.kill(os.getpid(), signal.SIGINT)
except BaseException:
    pass"""
    process = run_process(f"exec({code!r}, {{}})", "eval")
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (130, "optimus: interrupted\n")


@pytest.mark.parametrize("command", ["convert to-hf", "checkpoint export"])
def test_ctrl_c_while_a_command_writes_removes_its_files(run_dir, tmp_path, command):
    code = """
import os, signal
from optimus import cli
from optimus.checkpoint import convert
convert._copy_sidecars = lambda *_: os.kill(os.getpid(), signal.SIGINT)
cli.process()"""
    words = [sys.executable, "-c", code, *command.split(), str(run_dir), str(tmp_path / "out")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "optimus: interrupted\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_reader_of_results_that_leaves_is_no_error(unbuffered):
    reader, writer = os.pipe()
    os.close(reader)
    environ = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    process = run_process("print(1) or 0", "plan", stdout=writer, env=environ)
    os.close(writer)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["train", "--help"],
        ["plan", "configs/model/demo.toml"],
        ["plan", "configs/model/demo.toml", "--json", "parallel.pp=2", "parallel.tp=2"],
        ["plan", "configs/run/mula-1b.toml", "--machine", "aurora"],
        ["machine", "aurora"],
        ["kernels", "status"],
        ["doctor"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_closed_pipe_ends_a_command_without_an_error(words, unbuffered):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "optimus", *words]
    environ = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, env=environ)
    os.close(writer)
    # If the write of argparse fails at once, argparse ignores the error.
    assert done.returncode == 141 or ("--help" in words and unbuffered and done.returncode == 0)
    assert done.stderr == b""


def test_training_names_slow_imports_before_they_start(tiny_data, tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit(7)")
    config = write_config(tmp_path / "c.toml", tiny_tree(tiny_data, tmp_path / "run"))
    path = os.pathsep.join([str(tmp_path), os.getcwd(), *sys.path])
    command = [sys.executable, "-m", "optimus.cli", "train", str(config)]
    environ = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (7, "optimus: importing torch\n")


def test_terminal_shows_a_line_at_once(tmp_path):
    terminal, inside = os.openpty()
    command = [sys.executable, "-m", "optimus.cli", "train", str(tmp_path / "absent.toml")]
    done = subprocess.run(command, stderr=inside, timeout=60)
    os.close(inside)
    assert done.returncode == 2
    assert os.read(terminal, 1000).startswith(b"optimus: starting train\r\n")
    os.close(terminal)


@pytest.mark.parametrize(("number", "start"), [(signal.SIGINT, b"\r\n"), (signal.SIGTERM, b"")])
def test_line_of_an_interrupt_starts_after_the_shown_key(number, start):
    """A terminal shows the key ^C at the cursor, for example at the end of a progress bar, so the
    message must start on a new line. SIGTERM shows no key."""
    script = (
        "from optimus.observe.log import set_up_logging; set_up_logging()\n"
        f"from optimus.launch.signals import report_interrupt; report_interrupt({int(number)})"
    )
    terminal, inside = os.openpty()
    subprocess.run([sys.executable, "-c", script], stderr=inside, timeout=60, check=True)
    os.close(inside)
    text = b"interrupted" if number == signal.SIGINT else b"ended by SIGTERM"
    assert os.read(terminal, 1000) == start + b"optimus: " + text + b"\r\n"
    os.close(terminal)


@pytest.mark.parametrize("flush", [False, True])
def test_output_that_nobody_reads_does_not_block(monkeypatch, flush):
    """No process reads the pipe, so the pipe becomes full. `_Stderr` must drop the lines that do
    not fit. When the pipe has space again, `_Stderr` must print the number of dropped lines."""
    monkeypatch.setattr(optimus.cli, "_STALL_S", 0.2)
    reader, writer = os.pipe()
    with open(writer, "w") as stream, open(reader, "rb", buffering=0) as other:
        size = fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
        error, start = optimus.cli._Stderr(stream), time.monotonic()
        for _ in range(100):
            print("x" * (size // 8), file=error, flush=flush)
        assert time.monotonic() - start < 10 * optimus.cli._STALL_S  # one wait for all lines
        shown = other.read(size).count(b"\n")
        print("again", file=error)
        dropped = f"optimus: nobody read the output, and {100 - shown} lines were dropped here"
        assert other.read(size) == f"{dropped}\nagain\n".encode()


def test_note_about_a_single_dropped_line_starts_a_line(monkeypatch):
    monkeypatch.setattr(optimus.cli, "_STALL_S", 0.05)
    reader, writer = os.pipe()
    with open(writer, "w") as stream, open(reader, "rb", buffering=0) as other:
        size = fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
        error = optimus.cli._Stderr(stream)
        print("x" * (size + 100), file=error)  # the first part fits
        assert other.read(size) == b"x" * size
        print("next", file=error)
        note = "optimus: nobody read the output, and 1 line was dropped here"
        assert other.read(size) == f"\n{note}\nnext\n".encode()


def test_signal_handler_prints_while_a_line_waits_for_its_reader(monkeypatch):
    monkeypatch.setattr(optimus.cli, "_STALL_S", 0.5)
    reader, writer = os.pipe()
    with open(writer, "w") as stream, open(reader, "rb", buffering=0):
        size = fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
        os.write(writer, b"x" * size)  # now it is full
        error, handled = optimus.cli._Stderr(stream), []

        def handle(number: int, frame: object) -> None:
            print("stopping", file=error)
            handled.append(number)

        before = signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        try:
            print("step 1", file=error)
        finally:
            signal.signal(signal.SIGALRM, before)
        assert handled == [signal.SIGALRM]


@pytest.mark.parametrize(("variables", "spin_count"), [({}, "0"), ({"GOMP_SPINCOUNT": "7"}, "7")])
def test_threads_that_wait_sleep_unless_the_user_chose(monkeypatch, variables, spin_count):
    """Threads that wait must sleep (spin count 0) unless the user sets GOMP_SPINCOUNT."""
    torch_directory = Path(importlib.util.find_spec("torch").origin).parent
    library = next(torch_directory.glob("lib/libgomp*"), None)
    if library is None:
        pytest.skip("this torch does not bring GNU's OpenMP")
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    # OMP_DISPLAY_ENV makes GNU's OpenMP print its settings.
    environ = os.environ | {"OMP_DISPLAY_ENV": "verbose"} | variables
    process = run_process(f"__import__('ctypes').CDLL('{library}') and 0", env=environ)
    _, errors = process.communicate(timeout=60)
    assert f"GOMP_SPINCOUNT = '{spin_count}'" in errors


def test_plan_prints_a_json_object(capsys):
    assert main(["plan", "configs/model/mula-7b-a1b.toml", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["total_params"], result["active_params"]) == (6_919_161_856, 1_282_017_280)


def test_plan_resolved_prints_the_plan_of_the_next_run(run_dir, capsys):
    config = str(run_dir / "config.toml")
    assert main(["plan", config, "--resolved", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    steps = result["settings"]["train.max_steps"]
    assert (result["world"], result["mesh"]["dp"]) == (1, 1)
    assert (result["start"]["step"], result["start"]["path"]) == (
        steps,
        str(run_dir / "checkpoints" / f"step-{steps:08d}"),
    )
    batch = result["batch"]
    assert batch["tokens"] == batch["instances"] * batch["seq_len"]
    assert result["start"]["tokens"] == steps * batch["tokens"]
    assert result["data"]["training"]["seq_len"] == batch["seq_len"]
    assert set(result["measured"]) <= set(result["settings"])
    text = resolved(capsys, run_dir, *AUTO)
    assert "kernels.grouped_gemm  loop (as in the checkpoint)\n" in text
    assert "kernels.backend       measured at start\n" in text and f"step {steps:,} from" in text
    assert "changed" in text and "train.deterministic = False" in text
    tree = json.loads(resolved(capsys, run_dir, *AUTO, "--json"))
    assert tree["from_checkpoint"] == ["kernels.grouped_gemm"]
    assert tree["settings"]["kernels.grouped_gemm"] == "loop"
    text = resolved(capsys, run_dir, *AUTO, f"train.run_dir={run_dir}/new")
    assert "kernels.grouped_gemm  measured at start" in text


AUTO = ["kernels.backend=auto", "kernels.grouped_gemm=auto", "train.deterministic=false"]


def resolved(capsys, run_dir: Path, *arguments: str) -> str:
    """Return the standard output of `optimus plan --resolved` for the configuration of the run in
    `run_dir`."""
    assert main(["plan", str(run_dir / "config.toml"), "--resolved", *arguments]) == 0
    return capsys.readouterr().out


def test_plan_resolved_has_the_backend_of_the_environment(run_dir, monkeypatch, capsys):
    monkeypatch.setenv("OPTIMUS_KERNELS", "torch")
    for setting in ("kernels.backend=cpu", "kernels.backend=auto"):
        tree = json.loads(resolved(capsys, run_dir, setting, "--json"))
        assert tree["settings"]["kernels.backend"] == "torch"
    monkeypatch.setenv("OPTIMUS_KERNELS", "fast")
    assert main(["plan", str(run_dir / "config.toml"), "--resolved"]) == 2
    assert "OPTIMUS_KERNELS='fast': unknown backend; use one of auto" in capsys.readouterr().err


def test_plan_resolved_refuses_as_a_run_does(run_dir, capsys):
    command = ["plan", str(run_dir / "config.toml"), "--resolved"]
    assert main([*command, f"train.run_dir={run_dir}/new", 'optim.frozen=["nonsense.*"]']) == 2
    assert "nonsense" in capsys.readouterr().err
    locked = RunDirectory(run_dir)
    assert main(command) == 2
    assert "is in use by another run" in capsys.readouterr().err
    del locked


def test_eval_generate_and_report(run_dir, tiny_data, capsys):
    assert main(["eval", str(run_dir), str(tiny_data / "eval"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    recorded = json.loads((run_dir / "eval.jsonl").read_text().splitlines()[-1])
    assert result["loss"] == pytest.approx(recorded["loss"], abs=1e-6)
    assert result["tokens"] == recorded["tokens"]
    assert main(["generate", str(run_dir), "--prompt", "abc", "--tokens", "5"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("abc") and len(first) > 4
    assert main(["generate", str(run_dir), "--prompt", "abc", "--tokens", "5"]) == 0
    assert capsys.readouterr().out == first
    assert main(["generate", str(run_dir), "--prompt", "\udcff"]) == 2  # the byte 0xff
    assert "--prompt is not UTF-8 text" in capsys.readouterr().err
    assert main(["report", str(run_dir)]) == 0
    assert "4 steps" in capsys.readouterr().out


@pytest.mark.parametrize("program", ["generate", "inspect"])
def test_terminal_gets_no_escapes_of_a_text(program, monkeypatch, capsys):
    text = "a\x1b]0;title\x07\nb"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    if program == "generate":
        monkeypatch.setattr("optimus.evaluate.continue_text", lambda *_, **__: text)
        assert main(["generate", "checkpoint", "--prompt", "a"]) == 0
    else:
        value = {"shard": 0, "row": 0, "epoch": 0, "sources": [], "text": text}
        monkeypatch.setattr("data_prep.dataset.describe.inspect", lambda *_: value)
        monkeypatch.setattr(data_prep.cli.commands, "_existing", lambda path: path)
        assert data_prep.cli.commands.run_command(["inspect", "data", "0"]) == 0
    assert capsys.readouterr().out.endswith("a\\x1b]0;title\\x07\nb\n")


def test_report_replaces_a_link_and_obeys_no_file_of_the_working_directory(tmp_path, monkeypatch):
    line = {"step": 1, "loss": 2.0, "grad_norm": 1.0, "tokens": 8, "step_time_s": 1.0}
    run_dir, victim = tmp_path / "run", tmp_path / "victim"
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text(json.dumps(line | {"tokens_per_s": 8.0}) + "\n")
    (run_dir / "report.png").symlink_to(victim)
    (tmp_path / "matplotlibrc").write_bytes(b"text.usetex: True\n\xff is not UTF-8\n")
    victim.write_text("kept")
    code = (
        "import sys; from optimus.cli import main; sys.argv[0] = 'optimus'\n"
        "code = main(['report', 'run']); import matplotlib\n"
        "assert not matplotlib.rcParams['text.usetex']; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, timeout=120)
    assert done.returncode == 0
    assert victim.read_text() == "kept" and not (run_dir / "report.png").is_symlink()


@pytest.mark.parametrize(
    "command", [["eval", "/nowhere", "d"], ["generate", "/nowhere", "--prompt", "x"]]
)
def test_absent_checkpoint_is_a_single_line(command, capsys):
    assert main(command) == 2
    assert "/nowhere: no such checkpoint" in capsys.readouterr().err


def test_missing_kernels_are_a_single_line_in_eval(run_dir, tiny_data, monkeypatch, capsys):
    monkeypatch.setenv("OPTIMUS_KERNELS", "sycl")
    from optimus_kernels import backend

    monkeypatch.setattr(backend, "_active", {})
    assert main(["eval", str(run_dir), str(tiny_data / "eval")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "OPTIMUS_KERNELS = sycl" in err and "use cpu or torch" in err


def test_bench_step_runs(tiny_data, tmp_path, capsys):
    config = write_config(tmp_path / "c.toml", tiny_tree(tiny_data, tmp_path / "run"))
    assert main(["bench", "step", str(config), "--steps", "3", "--json"]) == 0
    assert 0.1 < json.loads(capsys.readouterr().out)["cpu_ratio_median"] < 10


def test_convert_keeps_scaled_rotary_embeddings_and_dtypes(run_dir, tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    import optimus

    hf, ours, again = (tmp_path / name for name in ("hf", "ours", "again"))
    assert main(["convert", "to-hf", str(run_dir), str(hf)]) == 0
    config = json.loads((hf / "config.json").read_text())
    config["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}
    config.pop("rope_parameters", None)
    (hf / "config.json").write_text(json.dumps(config))
    tensors = load_file(hf / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].bfloat16()
    save_file(tensors, hf / "model.safetensors", metadata={"format": "pt"})
    save_file({"x": torch.zeros(1, dtype=torch.float16)}, hf / "adapter_model.safetensors")
    assert main(["convert", "from-hf", str(hf), str(ours)]) == 0
    assert main(["convert", "to-hf", str(ours), str(again)]) == 0
    assert main(["convert", "to-hf", str(ours), str(again)]) == 2, "it exists already"
    back = load_file(again / "model.safetensors")
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype is tensor.dtype and torch.equal(back[name], tensor), name
    tokens = torch.arange(8).unsqueeze(0)
    logits, converted, unscaled = (
        optimus.load_model(path)(tokens) for path in (ours, again, run_dir)
    )
    assert torch.equal(logits, converted) and not torch.equal(logits, unscaled)
