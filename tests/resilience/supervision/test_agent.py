"""Tests of the agent of a node, and of the warm process from which the agent forks ranks."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from typing import Any

import psutil
import pytest

from optimus.errors import ConfigError
from optimus.resilience.supervision.agent import Agent, _Rank, parse_address
from optimus.resilience.supervision.messages import Signal, Start
from optimus.resilience.supervision.warm_process import ForkedProcess, WarmProcess
from tests.kit.faults.supervised import write_config


def test_warm_process_survives_sigterm_and_its_ranks_do_not(tiny_data, tmp_path):
    """Slurm sends SIGTERM to all processes of a job. The warm process, from which an agent forks
    ranks, must ignore SIGTERM. A forked rank must end."""

    async def statuses() -> list[int | None]:
        warm = WarmProcess()
        await warm.start({})
        assert await warm.wait_until_ready(60.0)
        warm._process.send_signal(signal.SIGTERM)
        config = write_config(tmp_path, tiny_data, "run")
        variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
        rank = await warm.fork({**os.environ, **variables}, ["train", str(config)])
        rank_process = psutil.Process(rank.pid)
        await asyncio.sleep(0.3)  # the rank waits for another rank
        rank_process.terminate()
        async with asyncio.timeout(10.0):
            status = await rank.wait()
        ended = warm._process.returncode
        await warm.end()
        return [status, ended]

    assert asyncio.run(statuses()) == [-signal.SIGTERM, None]


def test_report_takes_many_short_lines_quickly(tmp_path):
    """An agent must collect the lines for a report in less than 0.5 s, because an agent that is
    busy for seconds counts as lost."""
    agent = Agent(tmp_path, "a", tmp_path)
    agent.lines.extend(["x"] * 10_000 + ["y" * 16_000] * 20)
    start = time.process_time()
    first, second = agent._take_lines(), agent._take_lines()
    assert time.process_time() - start < 0.5
    assert len(first) == 10_006 and len(second) == 7 and len(agent.lines) == 7


@pytest.mark.parametrize(
    "content", [b"", b"[" * 60_000, b"{}", b'{"hosts": 5, "port": 1}', b'{"hosts": [], "port": 0}']
)
def test_damaged_address_is_refused(content):
    with pytest.raises(ConfigError, match=r"address\.json"):
        parse_address(content)
    assert parse_address(b'{"hosts": ["10.0.0.1"], "port": 5}') == (["10.0.0.1"], 5)


def test_stop_signal_reaches_a_rank_that_starts_later(tmp_path, monkeypatch):
    async def run() -> int:
        agent = Agent(tmp_path, "a", tmp_path)

        async def start_process(environ: Any, arguments: Any) -> Any:
            await agent._obey(channel, Signal(number=signal.SIGTERM))
            return await asyncio.create_subprocess_exec(
                *("sleep", "60"), stdout=subprocess.PIPE, start_new_session=True
            )

        async def nothing() -> None:
            pass

        channel: Any = None
        monkeypatch.setattr(agent, "_check_supervisor", nothing)
        monkeypatch.setattr(agent, "_start_process", start_process)
        start = Start(
            attempt=1, ranks=(0,), arguments=(), workspace="w", job_end=None, mpiexec_s=None,
            variables={},
        )  # fmt: skip
        await agent._obey(channel, start)
        assert agent.starting is not None
        await agent.starting
        async with asyncio.timeout(10.0):
            return await agent.ranks[0].process.wait()

    assert asyncio.run(run()) == -signal.SIGTERM


def test_agent_keeps_the_hash_of_its_files(tmp_path, monkeypatch):
    agent = Agent(tmp_path, "a", tmp_path)
    monkeypatch.setattr("optimus.resilience.supervision.agent.hash_code", lambda: "changed")
    assert agent._hello().code == agent.code != Agent(tmp_path, "a", tmp_path)._hello().code


def test_agent_kills_no_process_that_has_the_number_of_an_ended_rank(tmp_path):
    async def run() -> int | None:
        other = await asyncio.create_subprocess_exec("sleep", "60", start_new_session=True)
        ended = ForkedProcess(asyncio.StreamReader())
        ended.pid = other.pid
        ended.end(0)
        agent = Agent(tmp_path, "a", tmp_path)
        agent.ranks = {0: _Rank(0, ended, tmp_path / "page", status=0)}
        await agent._kill()
        await asyncio.sleep(0.2)
        status = other.returncode
        if status is None:
            other.kill()
        await other.wait()
        return status

    assert asyncio.run(run()) is None
