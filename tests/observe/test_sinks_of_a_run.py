"""Test of the log and the TensorBoard files of a run on two pipeline ranks."""

from __future__ import annotations

import re

import pytest

from optimus.observe.metrics import read_json_lines
from tests.kit.runs.tiny import tiny_tree
from tests.kit.runs.training import printed_by


def test_actions_traffic_start_up_and_load_reach_the_sinks(ranks, tiny_data, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = {"parallel__pp": 2, "train__max_steps": 3, "observe__tensorboard": True}
    settings |= {"observe__step_components": True}
    tree = tiny_tree(tiny_data, tmp_path, **settings)
    printed, of_rank_1 = ranks(2, printed_by, tree, start_world=False, timeout_s=120)
    assert not of_rank_1
    assert re.search(
        r"^optimus: start-up .* first update [\d.]+ s; processor time ", printed, re.MULTILINE
    )
    (payload,) = re.findall(
        r"^optimus: communication of rank 0 in one update: (.*)", printed, re.MULTILINE
    )
    log = dict(re.findall(r"([\w ]+) ([\d,]+) bytes", payload))
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    for step, line in enumerate(read_json_lines(tmp_path / "metrics.jsonl")):
        scalars = {tag: events.Scalars(tag)[step] for tag in events.Tags()["scalars"]
                   if not tag.startswith("eval/")}  # fmt: skip
        assert {scalar.step for scalar in scalars.values()} == {line["step"]}
        kinds = {tag.partition("/")[2] for tag in scalars if tag.startswith("pipeline_s/")}
        assert {"F", "B", "OPT_STEP", "wait"} <= kinds
        spent = sum(scalars[f"pipeline_s/{kind}"].value for kind in kinds)
        assert 0 < spent <= line["step_time_s"]
        names = "compute_s", "bubble_s", "optimizer_s", "other_s"
        components = [*(line[name] for name in names), *line["exposed_s"].values()]
        assert min(components) > 0 and line["exposed_s"].keys() == {"pp", "all ranks"}
        assert sum(components) == pytest.approx(line["step_time_s"], rel=1e-9)
        assert scalars["train/exposed_s/pp"].value == pytest.approx(line["exposed_s"]["pp"])
        assert scalars["traffic_bytes/pp"].value == int(log["pp"].replace(",", ""))
        highest = max(scalars[f"expert_load/layer_{layer}/max"].value for layer in (0, 1))
        assert abs(highest - line["expert_load_max"]) < 1e-6
