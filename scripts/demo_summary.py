"""Print the losses of the demo and the paths of its results.

    python scripts/demo_summary.py DEMO

DEMO is the directory in which scripts/demo.sh ran the demo.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from optimus.checkpoint.store import newest_valid
from optimus.observe.metrics import read_json_lines


def main(demo: Path) -> None:
    stats = subprocess.run(
        ["optimus-data", "stats", str(demo / "data"), "--json"],
        check=True,
        stdout=subprocess.PIPE,
    )
    baselines = json.loads(stats.stdout)
    held_out = read_json_lines(demo / "run" / "eval.jsonl")[-1]
    unigram = baselines["unigram_entropy"]
    newest = newest_valid(demo / "run")
    assert newest is not None, f"no valid checkpoint in {demo / 'run'}; run make demo again"
    print(
        f"""
held-out loss of the model           {held_out["loss"]:.3f} nats per token (step {held_out["step"]})
held-out loss of an add-one bigram   {baselines["held_out"]["bigram_loss"]:.3f} nats per token
unigram entropy of training data     {unigram:.3f} nats per token
The model is {unigram - held_out["loss"]:.2f} nats per token below the unigram entropy

loss curve       {demo / "run" / "report.png"}
metrics          {demo / "run" / "metrics.jsonl"}, {demo / "run" / "eval.jsonl"}
TensorBoard      tensorboard --logdir {demo / "run" / "tb"}
checkpoint       {newest.path}
tokens           {demo / "data"}"""
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
