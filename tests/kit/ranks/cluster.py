"""A PBS with hosts that can die: replacements of qsub, qdel, qstat, pbsnodes and PALS's mpiexec.

The replacements follow the manual pages of PALS and of OpenPBS (qsub(1B), qdel(1B), qstat(1B),
pbsnodes(8B)). This applies to the options, the output, the exit statuses, and the behaviour at the
end of a host or a job. Unknown options are errors. `Cluster` is the server. All hosts are emulated
on this machine: the environment variable FAKE_HOST of a process is the name of its host, and the
process is killed when this host is turned off. Job scripts start real processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

HOST = "FAKE_HOST"
SERVER = "pbs"
RESOURCES = {"walltime", "place", "select", "filesystems"}
_KILL_S = 30.0
"""Time between SIGTERM and SIGKILL at the end of the walltime (kill_delay of PBS)."""
_POLL_S = 0.05
_LIMIT_MESSAGE = "qsub: would exceed queue generic's per-user limit of jobs in 'Q' state"

Record = dict[str, Any]


class Cluster:
    """The server of a PBS, which runs jobs on hosts. A `Cluster` is a context manager.

    Args:
        folder: An empty folder for the programs and the state.
        hosts: Number of hosts.
    """

    def __init__(self, folder: Path, hosts: int) -> None:
        self.folder, self.bin = folder, folder / "bin"
        for name in ("bin", "jobs", "up"):
            (folder / name).mkdir(parents=True)
        self.hosts = [f"x{number}" for number in range(hosts)]
        for host in self.hosts:
            (folder / "up" / host).touch()
        for name in PROGRAMS:
            words = shlex.join([sys.executable, str(Path(__file__).resolve()), str(folder), name])
            (self.bin / name).write_text(f'#!/bin/bash\nexec {words} "$@"\n')
            (self.bin / name).chmod(0o755)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._term_at: dict[str, float] = {}
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Cluster:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        self._thread.join()
        for job in _jobs(self.folder):
            _kill_all("PBS_JOBID", job["id"])

    # -- Methods for tests ------------------------------------------------------------------------

    def limit_queued_jobs(self, number: int | None) -> None:
        """Set the maximum number of queued jobs. qsub refuses further jobs. None: no limit."""
        path = self.folder / "limit"
        path.unlink(missing_ok=True)
        if number is not None:
            path.write_text(str(number))

    def kill_host(self, host: str) -> None:
        """Turn a host off: all of its processes die, and the host stays down."""
        (self.folder / "up" / host).unlink()
        _kill_all(HOST, host)

    def delete_job(self, number: int) -> None:
        """Delete a job as qdel does: its processes receive SIGTERM, and later SIGKILL."""
        assert qdel(self.folder, [f"{number}.{SERVER}"]) == 0

    def job(self, number: int) -> Record:
        """Return the record of a job. Its key `state` is Q (queued), R (running) or F
        (finished)."""
        return _read(self.folder / "jobs" / f"{number}.json")

    def jobs(self) -> list[Record]:
        return _jobs(self.folder)

    def output(self, number: int) -> str:
        """Return the output of a job so far."""
        path = self.folder / "jobs" / f"{number}.out"
        return path.read_text() if path.exists() else ""

    def wait_until_idle(self, within_s: float) -> None:
        """Wait until no job is queued or runs. Raises AssertionError after `within_s`."""
        end = time.monotonic() + within_s
        while any(job["state"] != "F" for job in self.jobs()):
            assert time.monotonic() < end, [(j["id"], j["state"]) for j in self.jobs()]
            time.sleep(_POLL_S)

    # -- The server -------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._ends.wait(_POLL_S):
            for job in _jobs(self.folder):
                if job["state"] == "R":
                    self._watch(job)
            for job in _jobs(self.folder):
                if job["state"] == "Q":
                    self._start(job)

    def _start(self, job: Record) -> None:
        """Start a job if its dependency is met and enough hosts are free."""
        before = job["afterany"] and self.job(int(job["afterany"].partition(".")[0]))
        if before and before["state"] != "F":
            return
        if before and not before["hosts"]:  # that job was deleted before it ran
            _write(self.folder, job | {"state": "F"})
            return
        jobs = _jobs(self.folder)
        busy = {host for other in jobs if other["state"] == "R" for host in other["hosts"]}
        free = [host for host in self.hosts if self._is_up(host) and host not in busy]
        if len(free) < job["select"]:
            return
        job |= {"state": "R", "hosts": free[: job["select"]], "start": time.time()}
        base = self.folder / "jobs" / job["id"].partition(".")[0]
        nodes = base.with_suffix(".nodes")
        nodes.write_text("".join(f"{host}\n" for host in job["hosts"]))
        environ = job["environ"] | {
            "PBS_JOBID": job["id"],
            "PBS_NODEFILE": str(nodes),
            "PBS_ENVIRONMENT": "PBS_BATCH",
            HOST: job["hosts"][0],
        }
        with open(base.with_suffix(".out"), "ab") as out:
            self._processes[job["id"]] = subprocess.Popen(
                ["bash", str(base.with_suffix(".sh"))],
                cwd=os.environ.get("HOME", "/"),
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        _write(self.folder, job)

    def _watch(self, job: Record) -> None:
        """End a job whose script has ended, whose hosts have died, or whose time is over."""
        down = [host for host in job["hosts"] if not self._is_up(host)]
        status = self._processes[job["id"]].poll()
        if job["hosts"][0] in down:
            status = None  # the exit status of a script on a dead host is not known
        is_over = time.time() > job["start"] + job["walltime"] or job.get("deleted", False)
        if is_over and job["id"] not in self._term_at:
            self._term_at[job["id"]] = time.time()
            _kill_all("PBS_JOBID", job["id"], signal.SIGTERM)
        is_killed = is_over and time.time() > self._term_at[job["id"]] + _KILL_S
        is_lost = job["hosts"][0] in down or (down and not job["tolerates"])
        if status is None and not is_lost and not is_killed:
            return
        _kill_all("PBS_JOBID", job["id"])
        self._processes.pop(job["id"]).wait()
        state = "Q" if is_lost and job["rerunnable"] and not is_over else "F"
        _write(self.folder, job | {"state": state, "status": status})

    def _is_up(self, host: str) -> bool:
        return (self.folder / "up" / host).exists()


def _processes_with(name: str, value: str) -> Iterator[psutil.Process]:
    """Yield the processes whose environment variable `name` has the value `value`."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(name) == value:
                yield process


def _kill_all(name: str, value: str, number: int = signal.SIGKILL) -> None:
    """Send the signal `number` to all processes whose environment variable `name` has the value
    `value`. If the signal is SIGKILL, repeat it until all of these processes have ended."""
    while processes := list(_processes_with(name, value)):
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)
        if number != signal.SIGKILL:
            return
        psutil.wait_procs(processes, timeout=0.2)
        if all(not p.is_running() or p.status() == psutil.STATUS_ZOMBIE for p in processes):
            return


def _read(path: Path) -> Record:
    return json.loads(path.read_text())


def _jobs(folder: Path) -> list[Record]:
    return [_read(path) for path in sorted((folder / "jobs").glob("*.json"))]


def _write(folder: Path, job: Record) -> None:
    path = folder / "jobs" / f"{job['id'].partition('.')[0]}.json"
    temporary = path.with_suffix(f".{threading.get_ident()}")
    temporary.write_text(json.dumps(job))
    temporary.replace(path)


# -- Programs -------------------------------------------------------------------------------------


def qsub(folder: Path, argv: Sequence[str]) -> int:
    """Read a script from standard input, queue it and print the name of the job."""
    parser = argparse.ArgumentParser(prog="qsub", allow_abbrev=False)
    parser.add_argument("-r", choices=("y", "n"), default="y")
    parser.add_argument("-v", default="")
    for option in ("-N", "-k", "-j", "-A", "-q"):
        parser.add_argument(option)
    for option in ("-l", "-W"):
        parser.add_argument(option, action="append", default=[])
    args = parser.parse_args(argv)
    resources = dict(resource.split("=", 1) for resource in args.l)
    attributes = dict(attribute.split("=", 1) for attribute in args.W)
    if unknown := resources.keys() - RESOURCES:
        parser.error(f"Unknown resource: {sorted(unknown)}")
    if unknown := attributes.keys() - {"depend", "tolerate_node_failures"}:
        parser.error(f"illegal -W value: {sorted(unknown)}")
    tolerates = attributes.get("tolerate_node_failures", "none")
    if tolerates not in ("none", "all", "job_start"):
        parser.error(f"illegal -W value: tolerate_node_failures={tolerates}")
    depend = attributes.get("depend", "")
    jobs = _jobs(folder)
    if depend:
        match = re.fullmatch(r"afterany:(\d+\.pbs)", depend)
        if match is None or match[1] not in {job["id"] for job in jobs}:
            print("qsub: Illegal attribute or resource value depend", file=sys.stderr)
            return 1
    limit = folder / "limit"
    queued = sum(job["state"] == "Q" for job in jobs)
    if limit.exists() and queued >= int(limit.read_text()):
        print(_LIMIT_MESSAGE, file=sys.stderr)
        return 38
    hours, minutes, seconds = map(int, resources.get("walltime", "1:00:00").split(":"))
    number = len(jobs) + 1
    home = os.environ.get("HOME", "/")
    job = {
        "id": f"{number}.{SERVER}",
        "state": "Q",
        "argv": list(argv),
        "select": int(resources.get("select", "1")),
        "walltime": 3600 * hours + 60 * minutes + seconds,
        "afterany": depend.partition(":")[2],
        "tolerates": tolerates == "all",
        "rerunnable": args.r == "y",
        "hosts": [],
        "environ": {name: os.environ[name] for name in args.v.split(",") if name}
        | {"HOME": home, "PBS_O_WORKDIR": os.getcwd()},
    }
    (folder / "jobs" / f"{number}.sh").write_text(sys.stdin.read())
    _write(folder, job)
    print(job["id"])
    return 0


def qdel(folder: Path, argv: Sequence[str]) -> int:
    """Delete queued or running jobs."""
    parser = argparse.ArgumentParser(prog="qdel", allow_abbrev=False)
    parser.add_argument("jobs", nargs="+")
    status = 0
    for name in parser.parse_args(argv).jobs:
        job = next((job for job in _jobs(folder) if job["id"] == name), None)
        if job is None or job["state"] == "F":
            print(f"qdel: Unknown Job Id {name}", file=sys.stderr)
            status = 153
        else:
            changed = {"state": "F"} if job["state"] == "Q" else {"deleted": True}
            _write(folder, job | changed)
    return status


def qstat(folder: Path, argv: Sequence[str]) -> int:
    """Print a job in the format JSON."""
    parser = argparse.ArgumentParser(prog="qstat", allow_abbrev=False)
    parser.add_argument("-f", action="store_true", required=True)
    parser.add_argument("-F", choices=("json",), required=True)
    parser.add_argument("job")
    name = parser.parse_args(argv).job
    job = next((job for job in _jobs(folder) if job["id"] == name), None)
    if job is None or job["state"] == "F":
        print(f"qstat: Unknown Job Id {name}", file=sys.stderr)
        return 153
    minutes, seconds = divmod(job["walltime"], 60)
    attributes = {
        "Job_Name": "optimus",
        "job_state": job["state"],
        "server": SERVER,
        "Rerunable": "True" if job["rerunnable"] else "False",
        "Resource_List": {
            "nodect": job["select"],
            "place": "scatter",
            "select": str(job["select"]),
            "walltime": f"{minutes // 60:02d}:{minutes % 60:02d}:{seconds:02d}",
        },
        "Variable_List": {key: job["environ"][key] for key in ("HOME", "PBS_O_WORKDIR")},
    }
    if job["state"] == "R":
        attributes["stime"] = time.strftime("%a %b %d %H:%M:%S %Y", time.localtime(job["start"]))
    answer = {"timestamp": int(time.time()), "pbs_version": "23.06.06", "pbs_server": SERVER}
    print(json.dumps(answer | {"Jobs": {name: attributes}}, indent=4))
    return 0


def pbsnodes(folder: Path, argv: Sequence[str]) -> int:
    """Print the names of the hosts that are down, one name per line."""
    parser = argparse.ArgumentParser(prog="pbsnodes", allow_abbrev=False)
    parser.add_argument("-l", action="store_true", required=True)
    parser.parse_args(argv)
    known = {host for job in _jobs(folder) for host in job["hosts"]}
    for host in sorted(known):
        if not (folder / "up" / host).exists():
            print(f"{host:<20} down")
    return 0


def mpiexec(folder: Path, argv: Sequence[str]) -> int:
    """Start ranks on hosts of the job. If a rank fails or a host dies, the application ends."""
    parser = argparse.ArgumentParser(prog="mpiexec", allow_abbrev=False)
    parser.add_argument("--envall", action="store_true")
    parser.add_argument("--line-buffer", action="store_true")
    parser.add_argument("-n", type=int, required=True)
    parser.add_argument("-ppn", "--ppn", type=int, required=True)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--hosts")
    where.add_argument("--hostfile", type=Path)
    parser.add_argument("--cpu-bind", default="")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args(argv)
    hosts = args.hosts.split(",") if args.hosts else args.hostfile.read_text().split()
    allocated = Path(os.environ["PBS_NODEFILE"]).read_text().split()
    if unknown := set(hosts) - set(allocated):
        print(f"mpiexec: {sorted(unknown)} are not hosts of the job", file=sys.stderr)
        return 1

    def is_down(host: str) -> bool:
        return not (folder / "up" / host).exists()

    if args.n > len(hosts) * args.ppn or any(map(is_down, hosts)):
        print(f"mpiexec: launch failed on {', '.join(filter(is_down, hosts))}", file=sys.stderr)
        return 255
    ranks: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, frame: object) -> None:
        for process in ranks:
            process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, pass_on)
    for rank in range(args.n):
        variables = {"PALS_RANKID": rank, "PALS_LOCAL_RANKID": rank % args.ppn, "PMI_RANK": rank}
        variables |= {"PALS_NODEID": rank // args.ppn, HOST: hosts[rank // args.ppn]}
        environ = os.environ | {name: str(value) for name, value in variables.items()}
        ranks.append(subprocess.Popen(args.command, env=environ, start_new_session=True))
    while any(process.poll() is None for process in ranks):
        failed = any(process.poll() for process in ranks)
        if failed or any(map(is_down, hosts)):
            for process in ranks:
                process.kill()
        time.sleep(_POLL_S)
    status = next((status for process in ranks if (status := process.wait())), 0)
    return status if status >= 0 else 128 - status


PROGRAMS = {program.__name__: program for program in (qsub, qdel, qstat, pbsnodes, mpiexec)}


if __name__ == "__main__":
    sys.exit(PROGRAMS[sys.argv[2]](Path(sys.argv[1]), sys.argv[3:]))
