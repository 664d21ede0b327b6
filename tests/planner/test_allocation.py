"""Tests of `optimus plan` for a number of nodes of a machine, or for a list of hosts."""

from __future__ import annotations

import errno
import json
import os

import pytest

from optimus.cli import main
from optimus.config import load_config
from optimus.config.machine import load_machine
from optimus.errors import ConfigError
from optimus.planner.allocation import Allocation, allocate, read_hosts
from optimus.planner.plan import format_plan, plan
from tests.planner.test_plan import CONFIGS

RUN = CONFIGS / "run" / "mula-7b-a1b.toml"


def test_nodes_set_the_world_of_a_run_without_dp():
    config = load_config(RUN)
    result = plan(config, allocate("aurora", 32, None))
    assert result["world"] == 384 and result["mesh"]["dp"] == 384
    assert (result["machine"], result["nodes"], result["ranks_per_node"]) == ("aurora", 32, 12)
    assert not result["is_one_replica"]
    assert (
        result["memory"]["total"] == plan(load_config(RUN, ["parallel.dp=384"]))["memory"]["total"]
    )
    assert "32 nodes of aurora, 12 ranks each" in format_plan(result)


def test_a_plan_of_a_single_replica_says_so():
    result = plan(load_config(RUN))
    assert result["world"] == 1 and result["is_one_replica"]
    assert "parallel.dp = 0: one replica; --machine NAME --nodes N" in format_plan(result)
    with_dp = plan(load_config(RUN, ["parallel.dp=4"]))
    assert not with_dp["is_one_replica"] and "one replica" not in format_plan(with_dp)


def test_a_machine_without_nodes_counts_the_nodes_of_the_mesh():
    config = load_config(CONFIGS / "run" / "mula-220b-a10b.toml")
    assert plan(config, allocate("aurora", None, None))["nodes"] == 256
    smaller = load_config(
        CONFIGS / "run" / "mula-220b-a10b.toml", ["parallel.dp=1", "parallel.ep=3"]
    )
    assert plan(smaller, allocate("aurora", None, None))["nodes"] == 2  # uses 24 of 24 ranks


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nodes", "4"], "--nodes 4 needs the number of ranks on a node; add --machine NAME"),
        (["--machine", "aurora", "--nodes", "0"], "--nodes 0 must be at least 1"),
        (["--machine", "aurora", "--nodes", "20000"], "jobs of 1 to 10,624 nodes"),
        (["--machine", "nowhere"], "no such machine; use one of"),
        (["--machine", "aurora", "--nodes", "33"], "train.global_batch_tokens = 6291456 is not"),
        (["--machine", "aurora", "--nodes", "32", "parallel.dp=5"], "needs a world of 5 ranks"),
    ],
)
def test_impossible_nodes_are_a_single_line_and_status_2(options, message, capsys):
    assert main(["plan", str(RUN), *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_plan_of_nodes_prints_a_json_object(capsys):
    assert main(["plan", str(RUN), "--machine", "aurora", "--nodes", "32", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["world"] == 384


def test_hosts_are_read_once_in_order(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("b\nb\na\n\na\n")
    assert read_hosts(str(file)) == ("b", "a")
    assert allocate("aurora", None, str(file)) == Allocation(
        "aurora", 12, 2, ("b", "a"), load_machine("aurora").host_group
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n", "has no host"),
        ("a b\n", "'a b' is not a single host"),
        ("a\nb\na\n", "a occurs twice; write each host once"),
        ("a\na.site.org\n", "a.site.org is the same host as a; write"),
        ("a.site.org\nb\na\n", "a is the same host as a.site.org"),
    ],
)
def test_files_that_are_no_list_of_hosts_are_refused(text, message, tmp_path):
    file = tmp_path / "hosts"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_hosts(str(file))
    with pytest.raises(ConfigError, match="/none: No such file or directory; give a text file"):
        read_hosts(str(tmp_path / "none"))


def test_number_of_hosts_must_be_that_of_the_nodes(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("a\nb\n")
    with pytest.raises(ConfigError, match="has 2 hosts, but --nodes is 3"):
        allocate("aurora", 3, str(file))
    with pytest.raises(ConfigError, match="cannot|No such file"):
        read_hosts(str(tmp_path / "absent"))


@pytest.mark.parametrize(
    "options",
    [
        ["--hosts", "HOSTS", "--write-hosts"],
        ["--nodes", "1", "--search", "--write"],
        ["--nodes", "1", "--search", "--out"],
        ["--nodes", "1", "--trace"],
        ["--nodes", "1", "--picture"],
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_plan(
    options, tmp_path, capsys, monkeypatch
):
    def refuse(*args):
        raise AssertionError("the plan began")

    file = tmp_path / "file"
    file.write_text("x4000c0s0b0n0\n")
    options = [str(file) if option == "HOSTS" else option for option in options]
    monkeypatch.setattr("optimus.planner.allocation.allocate", refuse)
    path = file / "inner" / "output"
    assert main(["plan", str(RUN), "--machine", "aurora", *options, str(path)]) == 2
    error = capsys.readouterr().err
    assert f"{options[-1]} {path}: " in error and "; use another" in error
    assert error.count("\n") == 1


def test_a_full_file_system_is_a_single_line_with_the_option_and_status_2(
    tmp_path, capsys, monkeypatch
):
    def refuse(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / ".temporary"))

    (tmp_path / "hosts").write_text("x4000c0s0b0n0\nx4000c0s0b0n1\n")
    monkeypatch.setattr("optimus.planner.commands.write_bytes", refuse)
    options = ["--hosts", str(tmp_path / "hosts"), "--write-hosts", str(tmp_path / "written")]
    assert main(["plan", str(RUN), "--machine", "aurora", *options]) == 2
    error = capsys.readouterr().err
    assert f"--write-hosts {tmp_path / 'written'}: No space left on device; use another" in error
    assert ".temporary" not in error and error.count("\n") == 1
