"""Chain of scheduler jobs: submits the job that continues a run after the present job.

This module does not import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping

from optimus.errors import one_line

_LIMIT_S = 120.0
"""Time limit in seconds for a command of the scheduler."""
_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS")
"""Environment variables of Slurm that are also valid outside of a job. They are passed to the
scheduler's commands. All other SLURM_ variables are removed."""


class Chain:
    """Submits and removes the job that continues a run after the present job.

    The next job starts after the end of the present job, even if the present job fails. The next
    job is submitted before ranks start, because the scheduler can end the present job at any time.
    """

    def __init__(self, command: str, environ: Mapping[str, str] = os.environ) -> None:
        """Store the arguments. The constructor starts no process.

        Args:
            command: Bash command that submits the next job. The last word of its output must be
                the name of the next job.
            environ: Environment variables of the present job.
        """
        self.command = command
        # The variables that Slurm sets in this job would change the request for the next job.
        self._environ = {
            k: v for k, v in environ.items() if not k.startswith("SLURM_") or k in _KEPT
        }
        self._remover = "scancel" if "SLURM_JOB_ID" in environ else "qdel"

    async def submit(self) -> str:
        """Submit the next job. Return its name. Raises OSError if the scheduler refuses the job."""
        output = (await self._run("bash", "-c", self.command)).split()
        if not output:
            raise OSError(
                "the command of --next-job does not print a job name; print it as the last word"
            )
        return output[-1].partition(";")[0]  # sbatch prints JOB;CLUSTER

    async def remove(self, job: str) -> None:
        """Remove a job from the queue. Raises OSError if the command fails."""
        await self._run(self._remover, job)

    async def _run(self, *command: str) -> str:
        """Run a command and return its standard output. Raises OSError if the command fails."""
        process = await asyncio.create_subprocess_exec(
            *command,
            env=self._environ,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(_LIMIT_S):
                output, errors = await process.communicate()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            raise OSError(f"{command[0]} does not answer within {_LIMIT_S:.0f} s") from None
        if process.returncode != 0:
            message = one_line(errors.decode("utf-8", "replace").strip() or "no message")
            raise OSError(f"exit status {process.returncode}: {message}")
        return output.decode("utf-8", "replace")
