from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from optimus.cli import main as optimus
from optimus.config import load_config, make_config
from optimus.config.machine import load_machine
from optimus.distributed.mesh import Coordinate, make_mesh
from optimus.planner.machine_plan import plan_on_machine
from optimus.planner.memory import rank_memory
from optimus.planner.plan import format_plan, plan
from tests.kit.runs.tiny import tiny_tree

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def test_a_bare_file_of_the_largest_model_is_planned():
    result = plan(load_config(CONFIGS / "model" / "mula-220b-a10b.toml"))
    assert result["total_params"] == 220_205_681_664
    assert result["active_params"] == 10_020_719_616
    assert "flops_per_token" not in result
    assert json.loads(json.dumps(result)) == result
    assert "220,205,681,664" in format_plan(result)


def test_sequence_parallel_without_seq_len_is_planned():
    settings = ["parallel.tp=2", "parallel.sequence_parallel=true"]
    assert plan(load_config(CONFIGS / "model" / "olmo-1b.toml", settings))["world"] == 2


def test_memory_is_that_of_the_fullest_rank():
    result = plan(load_config(CONFIGS / "model" / "olmo-1b.toml", ["parallel.pp=2"]))
    totals = [rank["total"] for rank in result["ranks"]]
    assert result["memory"]["total"] == max(totals) > min(totals)


def test_the_paper_s_recipe_for_7b():
    config = load_config(CONFIGS / "run" / "mula-7b-a1b.toml")
    result = plan(config)
    assert result["tokens"] == pytest.approx(4e12, rel=1e-5)
    # 6 FLOPs for each active parameter except the embedding; 12 L D S for attention scores.
    weights = 6 * (1_282_017_280 - 50304 * 2048)
    assert result["flops_per_token"] == pytest.approx(weights + 12 * 16 * 2048 * 2048, rel=1e-3)
    assert result["flops_per_step"] == result["flops_per_token"] * 6_291_456
    text = format_plan(result)
    assert "6,291,456 tokens" in text and "GiB" in text


def test_tied_embeddings_have_two_gradients():
    config = load_config(CONFIGS / "model" / "olmo-1b.toml")
    memory = plan(config)["memory"]
    assert memory["tied"] == 4 * 50304 * 2048
    assert memory["gradients"] == pytest.approx(4 * 1_176_764_416, rel=0.01)  # padding


@pytest.mark.parametrize("name", ["mula-1b", "mula-7b-a1b"])
def test_recipes_of_the_paper(name):
    """The settings of the recipes equal those in section 2.1 of the Optimus paper."""
    config = load_config(CONFIGS / "run" / f"{name}.toml")
    train, optim = config.train, config.optim
    assert (train.seq_len, train.global_batch_tokens, train.dtype) == (2048, 6_291_456, "bf16")
    assert (optim.lr, optim.min_lr, optim.warmup_steps) == (4e-4, 4e-5, 2500)
    assert (optim.schedule, optim.betas, optim.eps) == ("cosine", (0.9, 0.99), 1e-8)
    assert (optim.weight_decay, optim.clip_norm, optim.clip_after_warmup) == (0.1, 1.0, True)
    assert optim.grad_reduce_dtype == "bf16"
    assert (config.model.aux_loss_coef, config.model.z_loss_coef) == (0.01, 0.001)
    assert (train.max_steps - 1) * train.global_batch_tokens < 4e12
    assert train.max_steps * train.global_batch_tokens >= 4e12


def test_plan_on_a_machine_has_activations_and_the_time_of_a_step(capsys):
    config = str(CONFIGS / "run" / "mula-20b-a2b.toml")
    assert optimus(["plan", config, "--machine", "aurora", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    (kind,) = result["kinds"]
    assert (kind["stage"], kind["layers"], kind["pp"]) == ("only", "MoE", [0])
    sizes = [kind[key] for key in ("states", "gathered", "activations", "temporary")]
    assert kind["states"] == result["memory"]["total"] and min(sizes[2:]) > 0
    assert sum(sizes) == kind["total"] == result["needed"] < result["device_bytes"]
    assert result["device_bytes"] == 68_700_000_000
    step = result["step"]
    exposed = sum(step["exposed_s"].values())
    total = step["compute_s"] + exposed + step["bubble_s"] + step["optimizer_s"]
    assert step["step_s"] == pytest.approx(total)


def test_kinds_of_ranks_have_the_memory_of_their_fullest_rank():
    """The four stages have 3, 4, 3 and 2 layers, and the first layer of the model is dense. The
    plan has three kinds of ranks. The kind "middle" has the memory of the fuller of its two
    stages."""
    settings = {
        "model__num_layers": 12,
        "model__num_experts": [0] + 11 * [4],
        "parallel__pp": 4,
        "parallel__stage_layers": [3, 4, 3, 2],
    }
    config = make_config(tiny_tree("d", "r", **settings))
    mesh = make_mesh(config.parallel)
    kinds = plan_on_machine(config, mesh, "h200")["kinds"]
    named = [(kind["stage"], kind["layers"], kind["pp"]) for kind in kinds]
    assert named == [
        ("first", "MoE and dense", (0,)),
        ("middle", "MoE", (1, 2)),
        ("last", "MoE", (3,)),
    ]
    totals = [rank_memory(config, mesh, Coordinate(pp, 0, 0, 0), 8).device for pp in range(4)]
    assert totals[1] != totals[2]
    assert [kind["total"] for kind in kinds] == [totals[0], max(totals[1:3]), totals[3]]


def test_states_larger_than_the_device_are_refused(capsys):
    config = str(CONFIGS / "run" / "mula-7b-a1b.toml")
    large = ["parallel.dp=1", "optim.sharding=none", "train.global_batch_tokens=8192"]
    assert optimus(["plan", config, "--machine", "h100", *large]) == 2
    printed = capsys.readouterr()
    assert "it does not fit" in printed.out
    assert printed.err.startswith("optimus: error: --machine h100: the model states of a rank need")


def host_memory_of_rank(name):
    """Return the limit of host memory in bytes for the states of a rank on the machine `name`: 95 %
    of the rank's share of the host memory, minus 2 GiB."""
    machine = load_machine(name)
    assert machine.host_memory_bytes is not None
    share = int(machine.host_memory_bytes.value) // machine.ranks_per_node
    return share - (2 << 30) - share // 20


def test_plan_prints_the_automatic_placement(tmp_path, capsys):
    config = str(CONFIGS / "run" / "mula-7b-a1b.toml")
    links = tmp_path / "links.toml"
    links.write_text("[links]\nto_device = 5e10\nto_host = 5e10\nhost_adam = 5e9\nflops = 4e14\n")
    auto = ["parallel.dp=1", "optim.sharding=none", "train.global_batch_tokens=8192"]
    auto += ["offload.mode=auto", f"offload.links={links}", "offload.device_memory=40GB"]
    assert optimus(["plan", config, "--machine", "h100", *auto]) == 0
    text = capsys.readouterr().out
    assert "of the chunks on the host" in text and "a step takes" in text
    assert "with all states on the device, a rank needs 156.6 GB; " in text
    assert "in host memory in addition" in text and "exposed offloading" in text
    assert "2,000,000,000 bytes, 1.86 GiB of the device memory, for the allocator's" in text
    assert "bytes by tier" in text
    # A rank has enough host memory for early updates.
    table = {line[:34].strip(): line.split() for line in text.splitlines()}
    on_host = int(table["in host memory in addition"][5].replace(",", ""))
    share = host_memory_of_rank("h100") / 1e9
    assert f", {on_host / 1e9:.4g} GB of {share:.4g} GB of host memory; a step takes" in text
    assert int(table["early updates"][-2].replace(",", "")) > 0
    assert int(table["total"][-2].replace(",", "")) == on_host
    least = text.split("smallest offload.device_memory")[1].split()[0].replace(",", "")
    auto[-1] = f"offload.device_memory={int(least) - 1}"
    assert optimus(["plan", config, "--machine", "h100", *auto, "--json"]) == 2
    out, error = capsys.readouterr()
    assert json.loads(out) == {"missing": {"device": 1}}
    assert "1 byte more than now; set a larger offload.device_memory, " in error
    # The microbatch has one sequence, and nothing is missing in host memory.
    assert "microbatch_size" not in error and "offload.disk" not in error


def test_the_placement_has_the_step_time_of_the_plan(capsys):
    """The line about the automatic placement has the step time of the plan. This step is faster
    than the step of a manual placement with a larger cache, because gathers and reductions of
    gradients take longer than copies between device and host."""
    command = ["plan", str(CONFIGS / "run" / "mula-7b-a1b.toml"), "--machine", "h200", "--nodes"]
    command += ["8", "offload.device_memory=20GB", "train.global_batch_tokens=1048576"]
    assert optimus([*command, "offload.mode=auto"]) == 0
    text = capsys.readouterr().out
    step_s = text.split("step on h200")[1].split()[0]
    assert f"; a step takes {step_s} s, the shortest predicted time of the compared" in text
    assert "% of offload.device_memory\n" in text and "of the device of h200" not in text
    manual = ["offload.mode=manual", "offload.host_share=1", "optim.cache_chunks=14", "--json"]
    assert optimus([*command, *manual]) == 0
    result = json.loads(capsys.readouterr().out)
    assert float(step_s) < result["step"]["step_s"]
    assert result["limited_by"] == "offload.device_memory"


def test_plan_without_a_machine_checks_the_limits_of_offloading(tmp_path, capsys):
    config = str(CONFIGS / "run" / "mula-7b-a1b.toml")
    manual = ["offload.mode=manual", "offload.host_share=1", "offload.host_memory=10"]
    assert optimus(["plan", config, *manual, "--json"]) == 2
    out, error = capsys.readouterr()
    least = int(error.split("offload.host_memory must be at least ")[1].split()[0].replace(",", ""))
    assert json.loads(out) == {"missing": {"host": least - 10}}
    assert optimus(["plan", config, *manual[:2]]) == 0
    assert "in host memory in addition" in capsys.readouterr().out
    assert optimus(["plan", config, "offload.mode=auto"]) == 0
    assert "offload.mode = 'auto' needs --machine NAME" in capsys.readouterr().out


def test_plan_without_a_machine_uses_that_of_the_run(capsys):
    command = ["plan", str(CONFIGS / "run" / "demo.toml"), "--json", "train.machine=h200"]
    assert optimus(command) == 0
    of_run = json.loads(capsys.readouterr().out)
    assert optimus([*command, "--machine", "h200"]) == 0
    assert json.loads(capsys.readouterr().out) == of_run
    assert of_run["step"]["machine"] == "h200"


def test_plan_prints_the_manual_placement_and_its_smallest_limits(capsys):
    """The plan prints the smallest limits of device and host memory with which the placement fits.
    With the smallest limit of host memory, no space is left for early updates. With one byte of
    device memory less, the plan is refused."""
    command = ["plan", str(CONFIGS / "run" / "demo.toml"), "--machine", "h200", "--json"]
    command += ["offload.mode=manual", "offload.host_share=0.5"]
    assert optimus(command) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["step"]["offload_s"] > 0
    (least,), (placement,) = result["smallest"], result["placements"]
    on_host = sum(result["memory"]["tiers"]["host"].values())
    share = host_memory_of_rank("h200") / 1e9
    assert f", {on_host / 1e9:.4g} GB of {share:.4g} GB of host memory" in placement
    early = result["memory"]["tiers"]["host"]["early"]
    assert least["host"] == on_host - early < on_host
    limits = [f"offload.device_memory={least['device']}", f"offload.host_memory={least['host']}"]
    assert optimus([*command, *limits]) == 0
    capped = json.loads(capsys.readouterr().out)
    assert capped["smallest"] == [least] and capped["device_bytes"] == least["device"]
    limits[0] = f"offload.device_memory={least['device'] - 1}"
    assert optimus([*command, *limits]) == 2
    out, error = capsys.readouterr()
    assert json.loads(out) == {"missing": {"device": 1}}
    assert "1 byte more than now; set a larger offload.device_memory" in error


def test_the_first_plan_of_a_process_has_the_memory_of_the_second():
    """The first operation under a torch dispatch mode imports a module. If this import happened
    during a profile, it would keep tensors of the profile alive (134 MB for Mula-1B), and the first
    plan would have more memory."""
    code = (
        "from optimus.config import load_config; from optimus.planner.allocation import allocate;"
        "from optimus.planner.plan import plan;"
        f"config = load_config({str(CONFIGS / 'run' / 'mula-1b.toml')!r}, []);"
        "plans = [plan(config, allocate('aurora', None, None)) for _ in range(2)];"
        "assert plans[0] == plans[1], [plan['kinds'] for plan in plans]"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
