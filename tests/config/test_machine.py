"""Tests of definitions of machines: strict reading, limits of queues, variables and addresses."""

from __future__ import annotations

import pytest

from optimus.cli import main
from optimus.config.machine import FOLDER, Machine, load_machine, parse_walltime, shell_settings
from optimus.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank_per_node = 12", "unknown key rank_per_node = 12; did you mean ranks_per_node?"),
        ("ranks_per_node = '12'", "ranks_per_node = '12': it should be a valid integer"),
        ("ranks_per_node = 0", "ranks_per_node = 0: "),
        ("mpi_ranks = 1", "mpi_ranks = 1: it should be a valid boolean"),
        ("heartbeat_s = 0.0", "heartbeat_s = 0.0: "),
        ("cpu_bind = ['4-7', 'x']", "cpu_bind.1 = 'x': must be a list of CPU core"),
        ("agent_options = 'none'", "agent_options = 'none': must be a list in brackets"),
        ("queues = [{ name = 'a', nodes = [1, 2] }]", "queues.0.walltime is missing; give it in"),
        ("[[queues]]\nname = 'a'\nnodes = [1]\nwalltime = ['0:05:00', '1:00:00']", "list of 2"),
        (
            "[[queues]]\nname = 'a'\nnodes = [1, 2]\nwalltime = ['5', '1:00:00']",
            "queues.0.walltime",
        ),
        ("[[environment]]\nvariables = { A = 1 }", "environment.0.variables.A = 1: "),
        ("[[environment]]\nvariables = { 'A B' = '1' }", "cannot be an environment variable"),
        ("[[environment]]\nvariable = { A = '1' }", "did you mean environment.0.variables?"),
        ("ranks_per_node = ", "not readable as TOML"),
        ("host_group = '(x'", "is not a regular expression"),
        ("host_group = 'x.*'", "has no group in parentheses"),
    ],
)
def test_wrong_file_is_refused_in_a_line(tmp_path, capsys, text, message):
    path = tmp_path / "m.toml"
    path.write_text(text)
    assert main(["machine", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and str(path) in line


def test_unknown_machine_is_refused_with_the_known_names(tmp_path):
    with pytest.raises(ConfigError, match="no such machine; use one of a100-80, aurora, "):
        load_machine("auror")
    with pytest.raises(ConfigError, match="no such configuration file"):
        load_machine(str(tmp_path / "absent.toml"))


def test_aurora_has_the_limits_of_its_queues():
    aurora = load_machine("aurora")
    for queue, nodes, walltime in (
        ("debug", 2, "1:00:00"),
        ("prod", 256, "12:00:00"),
        ("prod", 1999, "18:00:00"),
        ("prod", 10624, "24:00:00"),
        ("capacity", 16, "168:00:00"),
        ("R123", 5, "200:00:00"),  # the limits of a reservation are not checked
    ):
        aurora.check_job(queue, nodes, walltime)
    for queue, nodes, walltime, message in (
        ("debug", 3, "1:00:00", "takes 1 to 2 nodes, not 3"),
        ("prod", 255, "1:00:00", "takes 256 to 10624 nodes"),
        ("prod", 1024, "12:00:01", "to 12:00:00 on 1,024 nodes"),
        ("prod", 256, "0:04:59", "takes jobs of 0:05:00"),
        ("prod", 256, "12h", "must be hours:minutes:seconds"),
    ):
        with pytest.raises(ConfigError, match=message):
            aurora.check_job(queue, nodes, walltime)
    aurora.check_job("capacity", 2, "1:00:00", jobs=2)
    with pytest.raises(ConfigError, match="allows 1 job per user"):
        aurora.check_job("debug", 2, "1:00:00", jobs=2)


def test_each_value_of_aurora_has_a_source_with_a_date():
    """In aurora.toml, empty lines separate blocks of values. Each block has a source and a date, in
    a comment or in the keys `source` and `date`. Blocks of queues are not checked."""
    blocks = (FOLDER / "aurora.toml").read_text().split("\n\n")
    for block in blocks[1:]:
        # Values of the hardware have no such comment, but required keys for the source and the
        # date.
        if "=" in block and not block.startswith("[[queues]]") and 'source = "' not in block:
            assert "20" in block.partition("#")[2], block
    text = "\n".join(blocks)
    assert text.count("2026-") >= 10


def test_variables_apply_to_unset_variables_and_to_numbers_of_nodes():
    aurora = load_machine("aurora")
    small = aurora.variables(255, {"CCL_KVS_MODE": "pmi", "TMPDIR": "/long"})
    assert small["ZE_FLAT_DEVICE_HIERARCHY"] == "FLAT" and small["TMPDIR"] == "/tmp"
    assert "CCL_KVS_MODE" not in small and "CCL_OP_SYNC" not in small
    assert aurora.variables(256, {})["CCL_OP_SYNC"] == "1"


def test_binding_and_address():
    aurora = load_machine("aurora")
    assert aurora.bind_option(2) == "--cpu-bind=list:4-7:8-11"
    assert aurora.bind_option(13) == "--cpu-bind=depth"
    assert Machine().bind_option(2) == ""
    assert aurora.address("x4.host.cm.aurora.alcf.anl.gov") == "x4.hsn.cm.aurora.alcf.anl.gov"
    assert aurora.address("x4") == "x4.hsn.cm.aurora.alcf.anl.gov"
    assert Machine().address("x4.host.org") == "x4.host.org"


def test_shell_settings_are_quoted(tmp_path):
    path = tmp_path / "m.toml"
    path.write_text('[[environment]]\nvariables = { A = "x\'; echo $B" }\n')
    settings = shell_settings(load_machine(str(path)), 1, 0, {"MASTER_ADDR": "a"})
    assert "environment=('A=x'\"'\"'; echo $B')" in settings and "ranks=1\n" in settings
    (tmp_path / "empty").write_text("")
    with pytest.raises(ConfigError, match="PBS_NODEFILE"):
        shell_settings(Machine(), 1, 0, {"PBS_NODEFILE": str(tmp_path / "empty")})


def test_walltime_is_hours_minutes_seconds():
    assert parse_walltime("168:00:01") == 604801
    for text in ("1:60:00", "10:00", "1:00:00:00", "-1:00:00", ""):
        with pytest.raises(ValueError, match="hours:minutes:seconds"):
            parse_walltime(text)
