"""Prediction of the memory and the step time of a run. A separate process makes the prediction
after the first updates, so that no rank waits for the prediction.

The first rank starts the process, because only `optimus launch` has other processes while ranks
train. The process has the lowest priority, and ends at the latest when the rank ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from optimus.errors import OptimusError, one_line
from optimus.launch.imports import without_collections
from optimus.launch.spawn import prepare_rank

_NICENESS = 19
"""The lowest priority."""
_LIMIT_S = 900.0
"""Seconds after which the process is killed. A prediction takes about five seconds of processor
time, but the ranks have priority over this process."""


class Prediction:
    """A process that predicts the memory and the step time of a run.

    Args:
        run_dir: The run directory, with config.toml and fit.json.

    Raises:
        OSError: The process cannot be started.
    """

    def __init__(self, run_dir: Path) -> None:
        # -P: the working directory, which another user may own, is not searched for modules.
        command = [sys.executable, "-P", "-m", "optimus.train.prediction"]
        self._process = subprocess.Popen(
            [*command, str(run_dir), str(os.getpid()), str(_NICENESS)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self._end = time.monotonic() + _LIMIT_S

    def result(self) -> dict[str, Any] | None:
        """Return the result of `predict`. Return None while the process runs. If the prediction
        failed, return a dict with only the key `problem`, whose value is an error message."""
        if self._process.poll() is None:
            if time.monotonic() < self._end:
                return None
            self.close()
            return {"problem": f"the prediction took more than {_LIMIT_S:.0f} s"}
        assert self._process.stdout is not None
        with self._process.stdout as output:
            try:
                return dict(json.loads(output.read()))
            except ValueError:
                status = self._process.returncode
                return {"problem": f"the process of the prediction ended with status {status}"}

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()


def main() -> None:
    """Print the result of `predict` as JSON. The arguments are the run directory, the process ID of
    the rank, and the niceness of this process."""
    run_dir, rank, niceness = sys.argv[1:]
    prepare_rank(int(rank))  # this process ends with the rank
    os.nice(int(niceness))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if memory is short, the kernel must end this process, not a rank
    logging.disable()
    try:
        with without_collections():
            from optimus.planner.against import predict

            result = predict(Path(run_dir))
    except OptimusError as error:
        result = {"problem": one_line(error)}
    except Exception as error:
        result = {"problem": f"a bug of Optimus: {type(error).__name__}: {one_line(error)}"}
    sys.stdout.write(json.dumps(result))


if __name__ == "__main__":
    main()
