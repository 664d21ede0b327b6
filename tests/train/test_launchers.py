"""Runs of `optimus train` under cluster launchers. Their metrics equal the metrics of a run on one
process, and only one rank prints an error."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data_prep.test_slurm import needs_slurm, under_slurm
from tests.kit.ranks import pbs as fake_pbs
from tests.kit.ranks.processes import ROOT, install, mpiexec, started
from tests.kit.runs.results import metrics_of
from tests.kit.runs.tiny import tiny_tree
from tests.kit.runs.training import train_on
from tests.launch.test_spawn import write_config

PBS, SLURM = (ROOT / "scripts" / system / "train.sh" for system in ("pbs", "slurm"))
KINDS = ("openmpi", "mpich")
TWO_BY_TWO = ("parallel.pp=2", "parallel.dp=2")


@pytest.fixture(scope="module")
def config(rank_pool, tiny_data, tmp_path_factory) -> Path:
    """Train on one process with the run directory FOLDER/one. Return the path of the run's
    configuration file, FOLDER/run.toml."""
    base = tmp_path_factory.mktemp("launchers")
    tree = tiny_tree(tiny_data, base / "one", train__max_steps=3)
    train_on(rank_pool.run, 1, tree)
    return write_config(base / "run.toml", tree)


def train_by(launcher: list[str], config: Path, *settings: str, **more: str):
    command = [sys.executable, "-m", "optimus.cli", "train", str(config), *settings]
    return started([*launcher, *command], **more)


def our_lines(done: subprocess.CompletedProcess) -> list[str]:
    return [line for line in done.stderr.splitlines() if re.match(r"optimus:.* error: ", line)]


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


@pytest.mark.parametrize(("kind", "ranks"), [("openmpi", 4), ("mpich", 2)])
def test_ranks_of_mpiexec_train_to_the_same_bits(config, tmp_path, kind, ranks):
    """Ranks that mpiexec starts have the metrics of a run on one process. With Open MPI, ranks
    derive the rendezvous port from the name of the job. MPICH gives a job no name, so the test sets
    MASTER_PORT."""
    port = {"MASTER_PORT": free_port()} if kind == "mpich" else {}
    layout = TWO_BY_TWO[: ranks // 2]
    done = train_by(mpiexec(kind, ranks), config, f"train.run_dir={tmp_path}", *layout, **port)
    assert done.returncode == 0, done.stderr
    assert metrics_of(tmp_path) == metrics_of(config.parent / "one")


@pytest.mark.parametrize("kind", KINDS)
def test_configuration_error_is_printed_by_a_single_rank_of_mpiexec(config, tmp_path, kind):
    run = f"train.run_dir={tmp_path}"
    done = train_by(mpiexec(kind, 3), config, run, "parallel.pp=2")
    (line,) = our_lines(done)
    assert done.returncode == 2 and "world of 3 ranks; use a multiple of 2 ranks, such as 4" in line
    done = train_by(mpiexec(kind, 2), config, run, WORLD_SIZE="7")
    (line,) = our_lines(done)
    assert done.returncode == 2 and "WORLD_SIZE=7, but the launcher has set" in line
    done = train_by(mpiexec(kind, 2), config, run, "--nproc", "3")
    (line,) = our_lines(done)
    assert done.returncode == 2 and "--nproc 3, but a launcher started 2 ranks" in line


@pytest.mark.parametrize("setting", ["data.path=/nowhere", "model.nope=1", "train.run_dir=/proc/x"])
@pytest.mark.parametrize("kind", KINDS)
def test_error_of_all_ranks_is_printed_once(config, tmp_path, kind, setting):
    """All ranks find the same error. Only one rank must print the error, and all ranks must exit
    with status 2."""
    port = {"MASTER_PORT": free_port()}
    done = train_by(mpiexec(kind, 2), config, f"train.run_dir={tmp_path}", setting, **port)
    (line,) = our_lines(done)
    assert done.returncode == 2 and line.startswith("optimus: error: ")
    assert setting.partition("=")[2] in line or "nope" in line


@pytest.fixture
def optimus(tmp_path) -> Path:
    """Install `optimus` in a folder with fakes of qsub and of PALS's mpiexec. Return the path of
    `optimus`."""
    fake_pbs.install(tmp_path / "bin")
    return install(tmp_path / "bin" / "optimus", "optimus.cli")


def pbs(optimus: Path, config: Path, *settings: str, **more: str):
    """Run scripts/pbs/train.sh with 2 nodes and 2 ranks on each node. `settings` override the
    configuration, and `more` are further environment variables. Return the completed process."""
    command = [str(PBS), "--nodes", "2", "--ranks", "2", "--queue", "debug", "--account", "A"]
    path = f"{optimus.parent}:{os.environ['PATH']}"
    # The nodes of the fake PBS have no host names.
    environ = {"PATH": path, "OPTIMUS": str(optimus), "MASTER_ADDR": "127.0.0.1"} | more
    return started([*command, "--", str(config), *settings], **environ)


def test_pbs_job_trains_to_the_same_bits(optimus, config, tmp_path):
    run = f"train.run_dir={tmp_path / 'run'}"
    done = pbs(optimus, config, run, *TWO_BY_TWO, MASTER_PORT=free_port())
    assert done.returncode == 0, done.stderr
    assert metrics_of(tmp_path / "run") == metrics_of(config.parent / "one")


def test_pbs_job_that_cannot_start_prints_a_single_error(optimus, config, tmp_path):
    run = f"train.run_dir={tmp_path / 'run'}"
    done = pbs(optimus, config, run, "parallel.pp=8")
    (line,) = our_lines(done)
    assert done.returncode == 2 and "such as 8, or change the sizes" in line
    done = pbs(optimus, config, run, MASTER_ADDR="nowhere.invalid")
    lines = our_lines(done)  # one line of each rank that reached the error
    assert done.returncode == 2 and "nowhere.invalid is not a host" in lines[0]
    done = pbs(optimus, config, run, MASTER_PORT="99999")
    assert done.returncode == 2 and "MASTER_PORT=99999 is not a port" in our_lines(done)[0]


@pytest.fixture
def fake_optimus(tmp_path) -> Path:
    """Return the path of a fake of the program `optimus`. `optimus machine` is the real command.
    All other commands do nothing and exit with status 0."""
    real, program = install(tmp_path / "real", "optimus.cli"), tmp_path / "opti mus"
    program.write_text(f'#!/bin/bash\n[[ $1 != machine ]] || exec {real} "$@"\n')
    program.chmod(0o755)
    return program


def dry_run_of(program: Path, script: Path, *options: str, **more: str) -> list[str]:
    environ = os.environ | {"OPTIMUS": str(program), "PATH": "/usr/bin:/bin"} | more
    command = [str(script), "--dry-run", *options, "--", "a b.toml", "parallel.pp=2"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize(("script", "dry_run"), [(PBS, False), (SLURM, True)])
def test_job_script_refuses_a_run_that_would_fail(optimus, tiny_data, tmp_path, script, dry_run):
    """The job script must check the run for the job's number of ranks before it submits the job."""
    config = write_config(tmp_path / "a b.toml", tiny_tree(tiny_data, tmp_path / "run"))
    submitted = optimus.parent / "submitted"
    for name in ("qsub", "sbatch"):
        (optimus.parent / name).write_text(f"#!/bin/sh\ntouch {submitted}\n")
        (optimus.parent / name).chmod(0o755)
    environ = {"PATH": f"{optimus.parent}:{os.environ['PATH']}", "OPTIMUS": str(optimus)}
    command = [str(script), *["--dry-run"] * dry_run, "--nodes", "2", "--ranks", "3"]
    for setting, message in (
        ("optim.learning_rate=1", "unknown key optim.learning_rate"),
        ("parallel.pp=4", "the world of 6 ranks"),
        ("train.global_batch_tokens=0 data.path=/nowhere", "/nowhere"),
    ):
        done = started([*command, "--", str(config), *setting.split()], **environ)
        (line,) = done.stderr.splitlines()
        assert done.returncode == 2 and message in line and done.stdout == ""
    assert not submitted.exists() and not (tmp_path / "run").exists()
    skip = ["--skip-data-check", "--", str(config), "train.global_batch_tokens=0"]
    done = started([*command, *skip, "data.path=/nowhere"], **environ)
    assert done.returncode == 0, done.stderr
    assert "6 ranks (dp 6)" in done.stderr and submitted.exists() != dry_run


@pytest.mark.parametrize(("script", "command"), [(PBS, "qsub"), (SLURM, "sbatch")])
def test_submission_returns_the_status_of_its_command(fake_optimus, tmp_path, script, command):
    """The script writes the job to the standard input of a fake qsub or sbatch, which reads nothing
    and exits with status 0. The job is larger than the buffer of a pipe. The script must exit with
    status 0, the status of this command, and not with an error about the closed pipe."""
    (tmp_path / command).write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / command).chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OPTIMUS": str(fake_optimus)}
    settings = [f"data.path={'x' * 100_000}"]
    done = started([str(script), "--", "a.toml", *settings], **environ)
    assert (done.returncode, done.stderr) == (0, "")


def test_dry_run_of_pbs_prints_both_commands_and_runs_neither(fake_optimus, tmp_path):
    submit, *_, launch = dry_run_of(
        fake_optimus, PBS, "--nodes", "256", "--queue", "prod", "--account", "P"
    )
    assert (
        submit.startswith("qsub -v ")
        and "OPTIMUS\\," in submit
        and "select=256" in submit
        and "-q prod -A P" not in submit
    )
    for option in ("-A P", "-q prod", "filesystems=home:flare", "place=scatter", "-k doe"):
        assert option in submit
    for setting in (
        *("WORLD_SIZE=3072", "LOCAL_WORLD_SIZE=12", "-n 3072 --ppn 12", "TMPDIR=/tmp"),
        *("ZE_FLAT_DEVICE_HIERARCHY=FLAT", "CCL_PROCESS_LAUNCHER=pmix", "CCL_OP_SYNC=1"),
        *(
            "--cpu-bind=list:4-7:8-11:",
            f":76-79 {tmp_path}/opti\\ mus train a\\ b.toml parallel.pp=2",
        ),
    ):
        assert setting in launch, setting
    assert "CCL_OP_SYNC" not in dry_run_of(fake_optimus, PBS, "--nodes", "2")[-1]
    assert "CCL_KVS_MODE" not in dry_run_of(fake_optimus, PBS, CCL_KVS_MODE="pmi")[-1]
    assert "--cpu-bind=list:4-7:8-11 " in dry_run_of(fake_optimus, PBS, "--ranks", "2")[-1]
    hosts = tmp_path / "hosts"
    hosts.write_text("x41c5.hostmgmt2102.cm.aurora.alcf.anl.gov\nx42.else\n")
    launch = dry_run_of(fake_optimus, PBS, "--nodes", "2", PBS_NODEFILE=str(hosts))[-1]
    assert "MASTER_ADDR=x41c5.hsn.cm.aurora.alcf.anl.gov WORLD_SIZE=24 " in launch
    assert "MASTER_ADDR" not in dry_run_of(fake_optimus, PBS, MASTER_ADDR="a")[-1]
    assert "MASTER_ADDR=FIRST_NODE.hsn.cm.aurora" in dry_run_of(fake_optimus, PBS)[-1]
    plain = tmp_path / "plain.toml"
    plain.write_text("ranks_per_node = 3\n")
    options = ["--machine", str(plain)]
    launch = dry_run_of(fake_optimus, PBS, *options, PBS_NODEFILE=str(hosts))[-1]
    assert "MASTER_ADDR=x41c5.hostmgmt2102.cm.aurora.alcf.anl.gov WORLD_SIZE=3 " in launch
    assert "cpu-bind" not in launch
    bound = dry_run_of(fake_optimus, PBS, *options, "--cpu-bind", "none")[-1]
    assert "--cpu-bind=none" in bound


def test_dry_run_of_slurm_prints_both_commands_and_runs_neither(fake_optimus):
    options = ["--nodes", "4", "--ranks", "8", "--gpus", "8", "--cpus", "6", "--account", "P"]
    submit, *_, launch = dry_run_of(fake_optimus, SLURM, *options)
    for word in ("sbatch", "--nodes=4", "--ntasks-per-node=8", "--gpus-per-node=8", "--account=P"):
        assert word in submit
    assert launch.rstrip() == (
        "srun --nodes=4 --ntasks=32 --ntasks-per-node=8 --kill-on-bad-exit=1 --export=ALL "
        f"--cpus-per-task=6 --cpu-bind=cores {fake_optimus.parent}/opti\\ mus train a\\ b.toml "
        "parallel.pp=2"
    )


@pytest.mark.parametrize(
    ("script", "launcher", "words"),
    [
        (PBS, "mpiexec", ["-l select=5", "-W tolerate_node_failures=all", "-r n"]),
        (SLURM, "srun", ["--nodes=5", "--no-kill", "--no-requeue"]),
    ],
)
def test_dry_run_of_a_supervised_job_prints_the_chain(fake_optimus, script, launcher, words):
    options = ["--nodes", "4", "--ranks", "2", "--buffer-nodes", "1"]
    submit, *_, launch = dry_run_of(fake_optimus, script, *options, "--chain", "2")
    for word in words:
        assert word in submit
    assert f"launch a\\ b.toml parallel.pp=2 --launcher {launcher} --nodes 4 " in launch
    assert "--buffer-nodes 1 --ranks-per-node 2 " in launch
    assert "--chain\\ 1\\ --after\\ JOB_ID\\ " in launch and "--unless-ended" not in launch
    submit, *_, launch = dry_run_of(fake_optimus, script, *options, "--after", "7")
    assert "afterany:7" in submit and "--unless-ended" in launch
    assert "--next-job" not in launch  # the last job of a chain


def test_machine_file_can_turn_the_tolerance_of_node_failures_off(fake_optimus, tmp_path):
    (tmp_path / "m.toml").write_text("tolerate_node_failures = false\n")
    options = ["--buffer-nodes", "1", "--machine", str(tmp_path / "m.toml")]
    assert "tolerate_node_failures" not in dry_run_of(fake_optimus, PBS, *options)[0]


@pytest.mark.parametrize(
    ("script", "options", "message"),
    [
        (PBS, ["--queue", "prod", "--nodes", "2", "--", "a"], "takes 256 to 10624 nodes"),
        (PBS, ["--ranks", "0", "--", "a"], "--ranks: '0' is not a whole number above 0"),
        (PBS, ["--nodes", "2"], "no configuration; give it after --"),
        (SLURM, ["--cpus", "x", "--", "a"], "'x' is not a whole number above 0"),
        (SLURM, ["--queue", "x", "--", "a"], "unknown option --queue"),
        (SLURM, ["--nodes"], "--nodes needs a value"),
        (SLURM, ["--buffer-nodes", "x", "--", "a"], "--buffer-nodes x is not a whole number"),
        (SLURM, ["--chain", "2", "--", "a"], "add --buffer-nodes K"),
        (PBS, ["--buffer-nodes", "1", "--chain", "-1", "--", "a"], "--chain: '-1' is not"),
        (SLURM, ["--buffer-nodes", "1", "--cpus", "2", "--", "a"], "--cpus has no effect"),
        (PBS, ["--buffer-nodes", "1", "--cpu-bind", "x", "--", "a"], "--cpu-bind has no effect"),
        (PBS, ["--buffer-nodes", "1", "--nodes", "2", "--queue", "debug", "--", "a"], "not 3"),
        (PBS, ["--walltime", "90", "--", "a"], "--walltime '90' must be hours:minutes:seconds"),
        (
            PBS,
            ["--queue", "prod", "--nodes", "300", "--walltime", "13:00:00", "--", "a"],
            "takes jobs of 0:05:00 to 12:00:00 on 300 nodes",
        ),
        (
            PBS,
            ["--buffer-nodes", "0", "--chain", "1", "--queue", "debug", "--", "a"],
            "allows 1 job per user, but --chain needs 2",
        ),
        (PBS, ["--machine", "auror", "--", "a"], "no such machine; use one of a100-80, aurora"),
    ],
)
def test_job_script_refuses_wrong_options_in_a_line(fake_optimus, script, options, message):
    environ = os.environ | {"OPTIMUS": str(fake_optimus)}
    done = subprocess.run([str(script), *options], env=environ, capture_output=True, text=True)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("failures", "status", "expected"),
    [
        (["n2: tasks 2-3: Exited with exit code 2", "n1: task 1: Terminated"], 143, 2),
        (["n1: task 0: Exited with exit code 5", "n2: task 3: Exited with exit code 4"], 5, 4),
        (["n1: task 0: Exited with exit code 1", "n2: tasks 2,4: Terminated"], 143, 1),
        (["n1: task 0: Killed", "n2: tasks 2-3: Exited with exit code 1"], 137, 5),
        (["n1: task 0: Segmentation fault (core dumped)"], 139, 5),
        (["Node failure on n2"], 137, 5),
        (["n1: tasks 0-3: Exited with exit code 3"], 3, 3),
        ([], 0, 0),
    ],
)
def test_slurm_job_has_the_status_of_the_rank_that_failed(tmp_path, failures, status, expected):
    """A fake srun prints the messages of the real srun, and returns the highest exit status of all
    ranks. The job script must exit with the status of the rank that caused the failure. If the
    script receives SIGTERM, it must wait for srun and print the complete output of srun."""
    lines = "".join(f"echo 'srun: error: {failure}' >&2\n" for failure in failures)
    (tmp_path / "srun").write_text(
        f"#!/bin/bash\necho out\nkill -TERM $PPID\nsleep 0.2\n{lines}"
        f"printf 'last' >&2\nexit {status}\n"
    )
    (tmp_path / "srun").chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = started([str(SLURM), "--inside", "--", "a.toml"], **environ)
    assert done.returncode == expected and done.stdout == "out\n"
    assert done.stderr == "".join(f"srun: error: {failure}\n" for failure in failures) + "last\n"


@needs_slurm
def test_slurm_jobs_train_to_the_same_bits_and_print_their_errors(tmp_path):
    drill = [sys.executable, str(ROOT / "scripts" / "drills" / "train_slurm.py")]
    done = under_slurm(tmp_path, *drill)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bit for bit" in done.stdout and done.stdout.count("exit status 2: optimus:") == 2
    assert "exit status 5: optimus:" in done.stdout
