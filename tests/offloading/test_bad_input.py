"""Models and arguments that `optimus.offload` refuses, each with one line that contains the
remedy."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import pytest
import torch
from torch import distributed, nn

import optimus
from optimus.errors import ConfigError
from optimus.offloading import optimizer as optimizer_module
from tests.offloading import models
from tests.offloading.models import assert_equal, weights


def layers(**changes) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
    for name, value in changes.items():
        setattr(model, name, value)
    return model


def with_parameter(parameter: nn.Parameter) -> nn.Module:
    model = layers()
    model[1].weight = parameter
    return model


def sharing_memory() -> nn.Module:
    model = layers()
    model[2].weight = nn.Parameter(model[0].weight.data)
    return model


def with_alias() -> nn.Module:
    model = layers()
    model[2].register_buffer("alias", model[0].weight.data)
    return model


def with_meta_buffer() -> nn.Module:
    model = layers()
    model[0].register_buffer("mask", torch.empty(3, device="meta"))
    return model


def with_gradient() -> nn.Module:
    model = layers()
    model(torch.ones(1, 32)).sum().backward()
    return model


def with_hook() -> nn.Module:
    model = layers()
    model[1].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return model


def dispatched() -> nn.Module:
    model = layers()
    model[1]._hf_hook = object()
    return model


class Int8Parameter(nn.Parameter):
    pass


def refused_models() -> dict:
    zeros = torch.zeros(32, 32)
    return {
        "not a module": (lambda: [1], "use a torch.nn.Module"),
        "quantized": (lambda: layers(is_quantized=True), "without quantization_config"),
        "quantized parameter": (
            lambda: with_parameter(Int8Parameter(zeros)),
            "parameter 1.weight is a Int8Parameter",
        ),
        "integers": (
            lambda: with_parameter(nn.Parameter(zeros.to(torch.int8), requires_grad=False)),
            "1.weight has the dtype torch.int8",
        ),
        "fp64": (lambda: layers().double(), "0.weight has the dtype torch.float64"),
        "device_map": (lambda: layers(hf_device_map={"": 0}), "load it without device_map"),
        "accelerate hook": (dispatched, "load it without device_map"),
        "DataParallel": (lambda: nn.DataParallel(layers()), "with model.module"),
        "frozen": (lambda: layers().requires_grad_(False), "no parameter requires a gradient"),
        "meta": (lambda: layers().to("meta"), "0.weight is on the meta device"),
        "shared memory": (sharing_memory, "parameters 0.weight and 2.weight share memory"),
        "scripted": (
            lambda: nn.Sequential(layers(), torch.jit.script(nn.Linear(32, 32))),
            "1 is compiled by torch.jit and has parameters",
        ),
        "meta buffer": (with_meta_buffer, "buffer 0.mask is on the meta device"),
        "buffer": (with_alias, "buffer 2.alias shares memory with parameter 0.weight"),
        "gradient": (with_gradient, "call model.zero_grad"),
        "optimizer in backward": (with_hook, "1.weight has gradient hooks"),
        "sparse": (
            lambda: nn.Sequential(nn.Embedding(8, 32, sparse=True), nn.Linear(32, 32)),
            "sparse=False",
        ),
    }


@pytest.mark.parametrize("case", refused_models())
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_model_is_refused_in_a_single_line(case):
    make, message = refused_models()[case]
    model = make()
    with pytest.raises(ConfigError, match=message) as error:
        optimus.offload(model, host_share=1.0)
    assert "\n" not in str(error.value)


def test_a_compiled_model_is_refused():
    model = layers()
    model[0].compile()
    for compiled in (model, torch.compile(layers())):
        with pytest.raises(ConfigError, match="without torch.compile"):
            optimus.offload(compiled)
    for share in (0.0, 1.0):
        model = layers()
        optimus.offload(model, host_share=share)
        with pytest.raises(ConfigError, match="use the model without torch.compile") as error:
            torch.compile(model, backend="eager")(torch.ones(1, 32))
        assert "\n" not in str(error.value)
        torch.compiler.reset()  # otherwise, code whose compilation failed runs uncompiled
        with pytest.raises(Exception, match="offloaded model does not support torch.compile; use"):
            torch.compile(model, backend="eager", fullgraph=True)(torch.ones(1, 32))
        with pytest.raises(ConfigError, match="does not support torch.func.grad") as error:
            torch.func.grad(lambda x, model=model: model(x).sum())(torch.ones(1, 32))
        assert "\n" not in str(error.value)
        model(torch.ones(1, 32)).sum().backward()


def test_distributed_data_parallel_is_refused(tmp_path):
    model = layers()
    model._ddp_params_and_buffers_to_ignore = ["2.bias"]
    optimizer = optimus.offload(model, host_share=1.0)
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        with pytest.raises(ConfigError, match="cannot be wrapped by DistributedDataParallel"):
            nn.parallel.DistributedDataParallel(model)
        optimizer.close()
        assert nn.parallel.DistributedDataParallel(model).parameters_to_ignore == {"2.bias"}
    finally:
        distributed.destroy_process_group()


ARGUMENTS = {
    "negative lr": ({"lr": -1.0}, "lr = -1.0 is out of range"),
    "lr NaN": ({"lr": math.nan}, "lr = nan is out of range"),
    "lr text": ({"lr": "1e-3"}, "lr = '1e-3' is not a number"),
    "betas": ({"betas": (0.9, 1.0)}, r"betas = \(0.9, 1.0\): use two numbers"),
    "one beta": ({"betas": (0.9,)}, "use two numbers"),
    "eps": ({"eps": math.inf}, "eps = inf"),
    "weight_decay": ({"weight_decay": -0.1}, "weight_decay = -0.1"),
    "clip_norm": ({"clip_norm": 0.0}, "clip_norm = 0 would train nothing"),
    "host_share": ({"host_share": 1.5}, "host_share = 1.5 is out of range.* to 1"),
    "both": ({"host_share": 1.0, "device_memory": "1GB"}, "use only one of these arguments"),
    "no size": ({"device_memory": "lots"}, "device_memory = 'lots': use a size"),
    "unit": ({"device_memory": "20 parsecs"}, "use a size"),
    "negative size": ({"device_memory": -5}, "from 1 byte"),
    "zero": ({"device_memory": "0GB"}, "use a size such as"),
    "absurd size": ({"device_memory": "99999TB"}, "from 1 byte to 1000 TB"),
    "true": ({"device_memory": True}, "use a size"),
    "one byte": ({"device_memory": 1}, "too small by .* bytes for the segment '0'"),
    "cache": ({"host_share": 1.0, "cache_chunks": -1}, "cache_chunks = -1"),
    "chunk_length": ({"host_share": 1.0, "chunk_length": 2**50}, "chunk_length"),
    "part of a chunk": ({"host_share": 1.0, "cache_chunks": 1.5}, "1.5 is not an integer"),
    "part of an element": ({"chunk_length": 7.5}, "chunk_length = 7.5 is not an integer"),
    "meta": ({"device": "meta"}, "device = 'meta': cannot train on this device; use 'cpu'"),
    "early": (
        {"host_share": 0.0, "early_adam": "on"},
        "early_adam = 'on' has no effect, because all states are on the device",
    ),
    "device": ({"device": "abacus"}, "device = 'abacus'"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_argument_is_refused_in_a_single_line_and_the_model_is_unchanged(case):
    arguments, message = ARGUMENTS[case]
    model = layers()
    before = weights(model)
    with pytest.raises(ConfigError, match=message) as error:
        optimus.offload(model, **arguments)
    assert "\n" not in str(error.value)
    assert_equal(weights(model), before)
    optimus.offload(model, host_share=1.0)  # the refusal has not changed the model


def test_a_bad_state_dict_is_refused_and_changes_nothing():
    optimizer = optimus.offload(layers(), host_share=1.0, lr=torch.tensor(0.25))
    assert optimizer.param_groups[0]["lr"] == 0.25
    layer = optimizer._offloaded._module[0]
    layer(torch.ones(1, 32)).sum().backward()
    optimizer.step()
    good = copy.deepcopy(optimizer.state_dict())
    group = good["param_groups"][0]
    bad = [
        ({}, ValueError, "no 'state'"),
        ({"state": {}}, ValueError, "no 'param_groups'"),
        ({**good, "state": {0: {}}}, ValueError, "0.weight has no step"),
        ({**good, "state": {0: {"step": 1}}}, ValueError, "0.weight has no exp_avg"),
        ({**good, "state": {0: {**good["state"][0], "step": -1}}}, ValueError, "step = -1"),
        ({**good, "state": {0: {**good["state"][0], "step": None}}}, ValueError, "step = None"),
        ({**good, "state": {0: {**good["state"][0], "exp_avg": 0}}}, ValueError, "not a tensor"),
        ({"state": {}, "param_groups": [{"lr": 1.0}]}, ValueError, "groups of"),
        ({"state": {}, "param_groups": [{**group, "lr": -1.0}]}, ConfigError, "'lr'. = -1.0"),
    ]
    for state_dict, kind, message in bad:
        with pytest.raises(kind, match=message):
            optimizer.load_state_dict(state_dict)
        now = optimizer.state_dict()
        assert now["param_groups"] == good["param_groups"]
        assert now["state"].keys() == good["state"].keys()
        for number, state in good["state"].items():
            assert_equal(now["state"][number], state)


def test_too_small_a_cache_is_refused_with_the_smallest():
    model = models.gpt2()
    with pytest.raises(ConfigError, match="needs 3 chunks at once; use 3 or more"):
        optimus.offload(model, host_share=1.0, cache_chunks=2, chunk_length=8000)
    optimus.offload(model, host_share=1.0, cache_chunks=3, chunk_length=8000)


def test_the_refusal_of_a_memory_names_the_smallest_that_suffices():
    model = layers()
    with pytest.raises(ConfigError, match="use [0-9,]+ bytes or more") as error:
        optimus.offload(model, device_memory=100)
    least = int(str(error.value).split("use ")[-1].split(" bytes")[0].replace(",", ""))
    with pytest.raises(ConfigError, match="too small by 1 bytes"):
        optimus.offload(copy.deepcopy(model), device_memory=least - 1)
    optimus.offload(model, device_memory=least)


def test_more_states_than_host_memory_are_refused_with_the_missing_bytes(monkeypatch):
    """The states need 59,136 bytes of host memory: 16 bytes for each element of three chunks of
    1,056 elements, and two buffers for the fp32 gradients of a chunk. Unless `host_memory` is set,
    a quarter of the 78,846 usable bytes is reserved for Python."""
    monkeypatch.setattr(optimizer_module, "usable_memory", lambda: 78_846)
    model = layers()
    with pytest.raises(ConfigError, match="need 59,136 bytes of host memory, 1 byte more"):
        optimus.offload(model, host_share=1.0)
    optimus.offload(layers(), host_share=1.0, host_memory=59_136)
    optimus.offload(model, host_share=0.0)


def group_cases(model: nn.Module) -> dict:
    parameters = list(model.parameters())
    return {
        "missing": ([{"params": parameters[1:]}], "1 parameter, such as 0.weight, require"),
        "twice": ([{"params": parameters}, {"params": parameters[:1]}], "0.weight is in two"),
        "foreign": ([*parameters, nn.Parameter(torch.ones(1))], "not a parameter of the model"),
        "amsgrad": ([{"params": parameters, "amsgrad": True}], "amsgrad.* is not supported"),
        "lr": ([{"params": parameters, "lr": -1.0}], r"param_groups\[0\]\['lr'\] = -1.0"),
        "names": (list(model.named_parameters()), "use parameters without their names"),
    }


@pytest.mark.parametrize("case", group_cases(layers()))
def test_groups_are_refused(case):
    model = layers()
    groups, message = group_cases(model)[case]
    with pytest.raises(ConfigError, match=message):
        optimus.offload(model, groups, host_share=1.0)
    optimus.offload(model, host_share=1.0)


@dataclass
class Result:
    loss: torch.Tensor


@pytest.mark.parametrize("output", [None, iter([]), Result], ids=["None", "iterator", "class"])
def test_an_output_without_tensors_is_refused(output):
    class Text(nn.Linear):
        def forward(self, x: torch.Tensor):
            self.kept = super().forward(x)
            return output

    model = nn.Sequential(Text(32, 32), nn.Linear(32, 32))
    optimus.offload(model, host_share=1.0)
    with pytest.raises(ConfigError, match="Text returns a .*, in which no tensor"):
        model(torch.ones(1, 32))


@pytest.mark.parametrize("clears", [True, False])
@pytest.mark.parametrize(
    ("case", "share"), [("method", 0.0), ("method", 1.0), ("list", 0.0), ("list", 1.0)]
)
def test_a_gradient_from_outside_of_a_module_is_refused(case, share, clears):
    """A parameter gets a gradient that does not come through the output of its module. In the case
    "method", a function uses the weight without a call of the module. In the case "list", the loss
    uses a tensor that the module has kept, not the output of the module."""

    class First(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.kept = super().forward(x)
            return x

    model = nn.ModuleList([First(32, 32), nn.Linear(32, 32)])
    optimizer = optimus.offload(model, host_share=share)
    optimizer.zero_grad(set_to_none=clears)
    x = torch.ones(1, 32)
    segment = "0" if (case, share) == ("method", 1.0) else "its module"
    with pytest.raises(ConfigError, match=f"outside of the forward of {segment}[,;]"):
        if case == "method":
            torch.nn.functional.linear(x, model[0].weight).sum().backward()
        else:
            model[0](x)
            model[0].kept.sum().backward()
