"""scripts/bench/moe.py: the compared blocks compute the same results, and the reported sizes and
speeds are right."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import common
import moe
import moe_step
import pytest
import torch
import torch.nn.functional as F
from common import Absent
from moe import SHAPES, Case, make_case
from moe_peers import PEERS

from optimus.bench.meters import saved_bytes
from optimus.errors import OptimusError

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "model"
TINY = Case("tiny-fp32", "fp32", hidden=32, inner=16, experts=6, top_k=2, tokens=24)


def test_shapes_are_those_of_the_configurations():
    fields = ("hidden_size", "intermediate_size", "num_experts", "num_experts_per_tok")
    shapes = {}
    for path in CONFIGS.glob("mula-*.toml"):
        model = tomllib.loads(path.read_text())["model"]
        if "num_experts" in model:
            shapes[path.stem] = tuple(model[field] for field in fields)
    assert shapes == {name: shape for name, shape in SHAPES.items() if name != "small"}


@pytest.mark.parametrize("name", ["hf-grouped", "hf-eager", "three-grouped"])
def test_peer_computes_the_result_of_the_loop(name):
    device = torch.device("cpu")
    weights, x, grad = moe.make_tensors(TINY, device)
    try:
        peer = moe.PeerBlock(TINY, weights, PEERS[name])
    except Absent as reason:
        pytest.skip(str(reason))
    blocks = {"ours": moe.OurBlock(TINY, weights), name: peer}
    absent: dict[str, str] = {}
    errors, _ = moe._check(TINY, weights, blocks, x, grad, absent)
    assert not absent and max(errors.values()) < 1e-5


def test_wrong_block_of_ours_is_refused(monkeypatch):
    weights, x, grad = moe.make_tensors(TINY, torch.device("cpu"))
    ours = moe.OurBlock(TINY, weights)
    monkeypatch.setattr(ours.block.router, "normalise", True)
    with pytest.raises(OptimusError, match="tiny-fp32: the relative error of our block is"):
        moe._check(TINY, weights, {"ours": ours}, x, grad, {})


def test_peer_that_fails_is_reported():
    weights, x, grad = moe.make_tensors(TINY, torch.device("cpu"))
    broken = moe.PeerBlock(TINY, weights, PEERS["loop"])
    broken.top_k = 7  # the layer has 6 experts
    blocks, absent = {"ours": moe.OurBlock(TINY, weights), "broken": broken}, {}
    moe._check(TINY, weights, blocks, x, grad, absent)
    assert list(blocks) == ["ours"] and absent["broken"].startswith("failed: ")


def test_saved_bytes_are_counted_once_and_without_weights():
    layer = torch.nn.Linear(8, 8, bias=False)
    x = torch.randn(4, 8, requires_grad=True)
    assert saved_bytes(layer, x) == 4 * 8 * 4  # only x, for the gradient of the weight

    class Two(torch.nn.Module):
        def forward(self, x):
            y = x.exp()  # saves y
            return F.silu(y) * y  # saves y two more times, and silu(y)

    assert saved_bytes(Two(), x) == 2 * 4 * 8 * 4


def test_moe_prints_json_and_restores_threads(capsys, monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", (64, 32, 4, 2))
    before = torch.get_num_threads()
    arguments = ["--case", "tiny-fp32", "--tokens", "32", "--rounds", "2", "--threads", "1"]
    moe.main([*arguments, "--peers", "loop,liger", "--json"])
    assert torch.get_num_threads() == before
    (case,) = json.loads(capsys.readouterr().out)["cases"]
    assert case["tokens"] == 32 and case["threads"] == 1 and case["clock"] == "cpu"
    assert list(case["blocks"]) == ["ours", "loop"] and "GPU" in case["absent"]["liger"]
    ours, loop = case["blocks"]["ours"], case["blocks"]["loop"]
    assert ours["ours_is_faster"] == 1 and len(loop["forward_backward_s"]) == 2
    flops = 3 * 2 * (3 * 32 * 2 * 64 * 32 + 32 * 64 * 4)
    assert ours["tflops"] == pytest.approx(flops / ours["forward_backward_s"][0] / 1e12)
    assert 0 < ours["non_gemm_share"] < 1 and ours["saved_bytes_per_token"] >= 64 * 4


def test_a_case_that_does_not_fit_is_skipped(monkeypatch):
    monkeypatch.setattr(common, "free_bytes", lambda device: 10**9)
    result = moe.bench_moe(["mula-220b-a10b-bf16"], threads=(1,), rounds=1, device="cpu")
    assert "GB" in result["cases"][0]["skipped"]
    assert "skipped" in moe.format_result(result)


def test_flops_of_olmoe():
    case = make_case("mula-7b-a1b-bf16", 1, on_cpu=True)
    assert 3 * case.forward_flops == pytest.approx(302e6, rel=0.01)


def test_moe_step_exchanges_the_experts_of_a_model(capsys):
    model = ["--model", str(CONFIGS / "demo.toml"), "--layers", "1", "--batch", "1"]
    settings = ["--seq-len", "16", "--dtype", "fp32", "--device", "cpu", "--rounds", "1"]
    moe_step.main([*model, *settings, "--peers", "loop,liger", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert list(result["blocks"]) == ["ours", "loop"] and "GPU" in result["absent"]["liger"]
    assert result["blocks"]["ours"]["speed_up"] == 1 and result["blocks"]["loop"]["speed_up"] > 0
