"""`optimus bench machine`: measures the rates of this machine for the planner.

All ranks run the same operation at the same time. The time of an operation on a rank is the median
over the runs on this rank. A rate is the rate of the slowest rank. Matrix products and attention
use the same library as in a training run.
"""

from __future__ import annotations

import itertools
import json
import math
import mmap
import os
import statistics
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from optimus import platform
from optimus.bench.links import bench_links
from optimus.bench.network import OPERATIONS, LevelRates, measure_network
from optimus.bench.rank_timer import RankTimer
from optimus.chunks.norm import squares_of
from optimus.config import make_config
from optimus.config.hardware import size_factor
from optimus.config.machine import Machine
from optimus.distributed.collectives import all_gather_objects
from optimus.distributed.mesh import Mesh
from optimus.distributed.world import World, end_run, end_world, start_world
from optimus.errors import ConfigError, OptimusError, counted, reason_of
from optimus.io import files
from optimus.launch.environment import LaunchEnv, available_cores
from optimus.model.init import initialise_
from optimus.model.transformer import Transformer
from optimus.peak import find_peak
from optimus.rank.operations import Exchange
from optimus.rank.profile import profile_work
from optimus.train.malloc_trim import private_bytes
from optimus_kernels import fastest_library

SOURCE = "optimus bench machine"
_STEADY = 0.7
"""If `steadiness` (see `bench_machine`) is below this number, the result warns that other programs
use the machine."""
_DISK_BYTES = 1 << 26
_CPU_BYTES, _DEVICE_BYTES = 1 << 26, 1 << 29
"""Size in bytes of a tensor that exceeds the caches: on a CPU, and on other devices. The rate of
the memory is measured with a tensor of this size. The largest buffer of a collective has the same
size."""


class Shape(NamedTuple):
    """Shape of a matrix product [rows, inner] x [inner, columns]."""

    rows: int
    inner: int
    columns: int

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.inner * self.columns


def shapes_for(device_type: str) -> tuple[Shape, ...]:
    """Return the shapes of the matrix products to measure. In a shape, all sizes are equal, or one
    size is much smaller than the other two, or one size is twice as large as the other two."""
    large = 1024 if device_type == "cpu" else 8192
    cubes = (Shape(size, size, size) for size in (large, large // 2, large // 4, large // 8))
    medium, short = large // 2, large // 16
    return (
        *cubes,
        Shape(short, medium, medium),
        Shape(medium, short, medium),
        Shape(medium, medium, short),
        Shape(large, medium, medium),
    )


def fit_products(peak: float, rates: Sequence[tuple[Shape, float]]) -> tuple[float, float]:
    """Fit the model of `optimus.config.hardware.Products` to measured rates.

    Args:
        peak: Upper limit of the FLOP/s of a product.
        rates: Pairs (shape of a product, measured FLOP/s).

    Returns:
        (`efficiency`, `half_size`) with the smallest sum of squared errors of log(rate).
        `efficiency` is below 1. The mean error of log(rate) is zero, as `Products` requires.
    """
    highest = math.log(0.999)

    def fitted(half: float) -> tuple[float, float]:
        logs = [
            math.log(rate / peak) + math.log(size_factor(half, *shape)) for shape, rate in rates
        ]
        share = statistics.fmean(logs)
        return sum((value - share) ** 2 for value in logs), share

    candidates = [0.01 * 1.1**step for step in range(150)]
    allowed = [size for size in candidates if fitted(size)[1] <= highest]
    half = min(allowed or candidates[:1], key=lambda size: fitted(size)[0])
    return math.exp(min(fitted(half)[1], highest)), half


def bench_machine(
    launch: LaunchEnv, device: str, threads: int, folder: Path
) -> dict[str, Any] | None:
    """Measure this machine. All ranks of the run must call this function.

    Args:
        launch: Rank of this process, world size and rendezvous address.
        device: Value of the setting `train.device`.
        threads: Value of the setting `train.threads`.
        folder: Folder on the disk to measure. Each rank writes a file to it.

    Returns:
        On rank 0, a dict for JSON. `machine` has the tables of a machine file. `network` has the
        rates of each collective by level of the network. `steadiness` is at most 1. On a CPU with
        one thread per rank, it is the processor time of rank 0 divided by the elapsed time. In all
        other cases, it is the highest median rate of an fp32 product divided by the highest rate of
        a single run. On all other ranks, None.

    Raises:
        RunEnded: A rank raised an OptimusError. Every rank raises RunEnded.
    """
    failure: OptimusError | None = None
    if launch.rank % launch.local_world_size != launch.local_rank:
        failure = ConfigError(
            f"rank {launch.rank} is local rank {launch.local_rank}, but the ranks of a node must "
            "have consecutive numbers; start the same number of ranks on each node, node by node"
        )
    world = start_world(launch, 300.0, device, failure)
    try:
        result = _measure(world, threads, folder)
    except Exception as error:
        raise end_run(error, launch, world.agreement, "benchmark") from error
    end_world()
    return result if launch.is_first else None


def _measure(world: World, threads: int, folder: Path) -> dict[str, Any]:
    local = world.launch.local_world_size
    threads = platform.set_threads(threads, False, local)
    bench = RankTimer(world, threads)
    day = time.strftime("%Y-%m-%d", time.gmtime())

    def figure(value: float) -> dict[str, Any]:
        return {"value": float(f"{value:.4g}"), "source": SOURCE, "date": day}

    times = {
        "bf16": _ProductTimes(bench, torch.bfloat16),
        "fp32": _ProductTimes(bench, torch.float32),
    }

    def add_round() -> None:
        for of_dtype in times.values():
            of_dtype.add_round()

    add_round()
    code = _product_code_bytes(bench)
    memory, launch_s = _memory_rate(bench), _launch_s(bench)
    activations, gradients = min(memory, _activations_rate(bench)), _gradients_rate(bench)
    new_memory = _new_memory_rate(bench)
    add_round()
    network = measure_network(bench, world, _tensor_bytes(world.device))
    add_round()
    products = {name: of_dtype.tables(figure) for name, of_dtype in times.items()}
    disk = bench.slowest(_disk_s(folder, world.rank))
    links = bench_links(world.device, threads)["links"]
    torch.set_num_threads(threads)
    rates = all_gather_objects(links, world.everyone, dict[str, float])
    best = max(product["flops"]["value"] for product in products["fp32"]["measured"])
    is_cpu = world.device.type == "cpu"
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    device_bytes = host_bytes / local if is_cpu else _accelerator_bytes(world.device)
    machine = {
        "ranks_per_node": local,
        "links": {
            **{name: float(f"{min(r[name] for r in rates):.4g}") for name in links},
            "flops": max(product["flops"]["value"] for product in products["bf16"]["measured"]),
            "flops_fp32": best,
            "memory": float(f"{memory:.4g}"),
        },
        "measured": {
            "device": platform.device_name(world.device),
            "cores": available_cores(),
            "threads": threads,
            "ranks": local,
            "nodes": world.size // local,
            "torch": torch.__version__,
            "date": day,
        },
        "device": {
            "name": platform.device_name(world.device),
            "memory_bytes": figure(device_bytes),
            "memory_achieved": figure(memory),
            "activations_achieved": figure(activations),
            "gradients_achieved": figure(min(memory, gradients)),
            **({} if new_memory is None else {"new_memory_achieved": figure(new_memory)}),
            **({} if code is None else {"product_code_bytes": figure(code)}),
            "launch_s": figure(launch_s),
            "threads": threads if is_cpu else 0,
            "products": products,
        },
        "levels": _level_tables(network, local, figure),
        "host_memory_bytes": figure(host_bytes),
        "storage": [{"name": "disk", "write": figure(world.size * _DISK_BYTES / disk)}],
    }
    machine = {key: value for key, value in machine.items() if value != []}
    Machine.model_validate(machine)
    steadiness = bench.processor_share
    if steadiness is None:
        steadiness = best / products["fp32"]["peak"]["value"]
    return {
        "machine": machine,
        "network": {name: level._asdict() for name, level in network.items()},
        "steadiness": min(1.0, steadiness),
    }


def _level_tables(
    network: Mapping[str, LevelRates], local: int, figure: Callable[[float], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the tables `levels` of a machine file, for nodes of `local` ranks."""
    # Rounding to four digits can lower the peak and the seconds of a message by 0.05 % each.
    margin = 1.0011
    return [
        {
            "name": name,
            "ranks": local if name == "node" else 0,
            "peak": figure(margin * max(_message_rates(level))),
            "achieved": figure(level.rates["all_reduce"]),
            "latency_s": figure(level.latency_s),
            "operations": {name: figure(level.rates[name]) for name in OPERATIONS[1:]},
            "messages": [m._asdict() | {"seconds": figure(m.seconds)} for m in level.messages],
        }
        for name, level in network.items()
    ]


def _accelerator_bytes(device: torch.device) -> int:
    """Return the bytes of memory of an accelerator."""
    return getattr(torch, device.type).get_device_properties(device).total_memory


def _message_rates(level: LevelRates) -> Iterator[float]:
    """Yield rates of a level of the network in bytes per second: first the rates of the collectives
    without latency, then the rate of each message."""
    yield from level.rates.values()
    yield from (message.num_bytes / message.seconds for message in level.messages)


class _ProductTimes:
    """Times of the products of all shapes in a dtype."""

    def __init__(self, bench: RankTimer, dtype: torch.dtype) -> None:
        self.bench, self.dtype = bench, dtype
        self.times: dict[Shape, list[float]] = {}
        """Seconds of each run on this rank, by shape. A run computes the three products of a
        layer."""

    def add_round(self) -> None:
        """Time the products of all shapes."""
        with fastest_library(torch.empty(0, dtype=self.dtype, device=self.bench.device)):
            for shape in shapes_for(self.bench.device.type):
                products = _layer_products(shape, self.dtype, self.bench.device)
                self.times.setdefault(shape, []).extend(self.bench.times(products))

    def tables(self, figure: Callable[[float], dict[str, Any]]) -> dict[str, Any]:
        """Return the table `products` of the machine file for `self.dtype`. Its key `attention` has
        the rates of attention, and `peak` is at least as large as each measured rate."""
        bench, device = self.bench, self.bench.device
        rates, fastest = [], 0.0
        for shape, times in self.times.items():
            seconds = bench.slowest(statistics.median(times))
            rates.append((shape, 3 * shape.flops / seconds))
            fastest = max(fastest, 3 * shape.flops / -bench.slowest(-min(times)))
        peak = fastest
        if device.type != "cpu" and self.dtype is torch.bfloat16:  # peak in the data sheet
            peak = max(peak, find_peak(device, self.dtype, "torch", lambda line: None).flops)
        with fastest_library(torch.empty(0, dtype=self.dtype, device=device)):
            attention = _attention_tables(bench, self.dtype, figure)
        both = ("forward", "backward")
        peak = max(peak, *(table[name]["value"] for table in attention for name in both))
        # Rates are rounded to four digits, and a rounded rate must not exceed the peak.
        peak *= 1.0005
        efficiency, half_size = fit_products(peak, rates)
        return {
            "peak": figure(peak),
            "efficiency": figure(efficiency),
            "half_size": figure(half_size),
            "measured": [shape._asdict() | {"flops": figure(rate)} for shape, rate in rates],
            "attention": attention,
        }


def _layer_products(shape: Shape, dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
    """Return a function that computes the three products of a linear layer in a training step: for
    the output, for the gradient of the input, and for the gradient of the weight. The three
    products have the same FLOPs. Libraries have different rates for the three products, because
    different operands are transposed. As in a step, the caches do not contain the operands, and
    each product writes a new tensor."""
    rows, inner, columns = shape
    number = _copies(inner * columns * dtype.itemsize, device)
    sizes = (rows, inner), (columns, inner), (rows, columns)
    layers = zip(
        *(torch.randn(number, *size, device=device).to(dtype) for size in sizes), strict=True
    )

    def products(x: Tensor, weight: Tensor, grad: Tensor) -> None:
        torch.mm(x, weight.t())
        torch.mm(grad, weight)
        torch.mm(grad.t(), x)

    return _in_turn([partial(products, *layer) for layer in layers])


def _in_turn(runs: Sequence[Callable[[], Any]]) -> Callable[[], None]:
    """Return a function that runs the next function in `runs` at each call. The function after the
    last one is the first one."""
    turns = itertools.cycle(runs)
    return lambda: next(turns)()


def _copies(size_bytes: int, device: torch.device) -> int:
    """Return how many tensors of `size_bytes` bytes are needed to exceed the caches, but at least 2
    and at most 256."""
    return max(2, min(256, _tensor_bytes(device) // size_bytes))


def _attention_tables(
    bench: RankTimer, dtype: torch.dtype, figure: Callable[[float], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the tables `attention` of a dtype, which contain the FLOP/s of forward and backward
    for several sequence lengths. In memory, the heads of a token are adjacent, as in
    `optimus.model.attention`."""
    device = bench.device
    shape, lengths = (32, 128), [1024, 2048, 4096, 8192]
    if device.type == "cpu":
        shape, lengths = (8, 64), [256, 512, 1024]
    tables = []
    for seq_len in lengths:
        query, key, value = (
            torch.randn(1, seq_len, *shape, device=device).to(dtype).requires_grad_()
            for _ in range(3)
        )
        grad = torch.randn(1, seq_len, *shape, device=device).to(dtype).transpose(1, 2)

        inputs = query, key, value
        q, k, v = (tensor.transpose(1, 2) for tensor in inputs)
        forward = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
        backward = partial(torch.autograd.grad, forward(), inputs, grad, retain_graph=True)
        forward_s, backward_s = bench.median(forward), bench.median(backward)
        flops = shape[0] * seq_len**2 * shape[1]
        tables.append(
            {
                "seq_len": seq_len,
                "head_size": shape[1],
                "forward": figure(2 * flops / forward_s),
                "backward": figure(5 * flops / backward_s),
            }
        )
    return tables


def _activations_rate(bench: RankTimer) -> float:
    """Return the rate of element-wise operations of a transformer, in bytes read and written per
    second: the mean rate of a multiplication, SiLU and LayerNorm that run one after the other."""
    is_cpu, width = bench.device.type == "cpu", 512
    size = (1 << 20) if is_cpu else (1 << 26)
    dtype = torch.float32 if is_cpu else torch.bfloat16
    number = _copies(size, bench.device)
    shape = number, size // dtype.itemsize // width, width
    tensors = torch.randn(shape, device=bench.device).to(dtype).unbind()
    pairs = zip(tensors, (*tensors[1:], tensors[0]), strict=True)
    runs = (
        [partial(torch.mul, a, b) for a, b in pairs],
        [partial(F.silu, a) for a in tensors],
        [partial(F.layer_norm, a, (width,)) for a in tensors],
    )
    return 7 * size / sum(bench.median(_in_turn(of_kind)) for of_kind in runs)


def _tensor_bytes(device: torch.device) -> int:
    return _CPU_BYTES if device.type == "cpu" else _DEVICE_BYTES


def _memory_rate(bench: RankTimer) -> float:
    """Return the bytes per second that a device reads and writes while it adds a large tensor to
    another large tensor."""
    length = _tensor_bytes(bench.device) // 4
    # The addition is in place, as in an optimizer. If the result were a separate tensor, a CPU
    # would also read the cache lines of this tensor before overwriting them.
    total, values = (torch.ones(length, device=bench.device) for _ in range(2))
    return 3 * 4 * length / bench.median(lambda: total.add_(values))


def _gradients_rate(bench: RankTimer) -> float:
    """Return the rate of passes over gradients, in bytes of gradients per second: the mean rate of
    the norm, of the check for values that are not finite, and of filling with zeros."""
    grads = torch.ones(_tensor_bytes(bench.device) // 4, device=bench.device)
    passes = partial(squares_of, grads, False), partial(torch.aminmax, grads), grads.zero_
    return len(passes) * grads.nbytes / sum(bench.median(run) for run in passes)


def _new_memory_rate(bench: RankTimer) -> float | None:
    """Return the bytes per second at which the operating system maps new memory for a process on a
    CPU. Return None for accelerators, and if malloc reuses freed memory."""
    if bench.device.type != "cpu":
        return None
    length = _CPU_BYTES // 4
    used = torch.ones(length)
    new_s = bench.median(lambda: torch.empty(length).fill_(1.0))
    used_s = bench.median(lambda: used.fill_(1.0))
    return 4 * length / (new_s - used_s) if new_s > 1.1 * used_s else None


def _product_code_bytes(bench: RankTimer) -> float | None:
    """Return the bytes by which this process grows when it computes a matrix product of a new
    shape. Return None for accelerators, and if the growth is unknown or less than a page."""
    if bench.device.type != "cpu":
        return None
    number, size = 32, 64  # number of shapes, and a small size of their tensors
    with fastest_library(torch.empty(0)):
        sizes = [(size + n, size, size) for n in range(2 * number)]
        operands = [(torch.ones(a, b), torch.ones(b, c), torch.ones(a, c)) for a, b, c in sizes]
        used = 0
        for index, (a, b, out) in enumerate(operands):
            if index == number:  # the first `number` products load the library
                platform.trim_heap()
                used = private_bytes()
            torch.mm(a, b, out=out)
        platform.trim_heap()
        growth = (private_bytes() - used) / number
    return growth if used and growth > mmap.PAGESIZE else None


def _launch_s(bench: RankTimer) -> float:
    """Return the seconds that the host needs to start an operation of a model: the time of the
    forward and backward of a tiny model, divided by the number of operations in the profile of this
    model."""
    device, size = bench.device, 16
    model = {
        "architecture": "olmo",
        "num_layers": 4,
        "hidden_size": size,
        "num_attention_heads": 1,
        "intermediate_size": size,
        "vocab_size": size,
    }
    config = make_config(
        {"model": model, "train": {"seq_len": size, "microbatch_size": 1, "dtype": "fp32"}}
    )
    work = profile_work(config, Mesh(1, 1, 1, 1), device.type == "cpu")
    segments = (work.embedding, *work.blocks, work.head)
    operations = [op for s in segments for op in (*s.forward, *s.backward)]
    launches = sum(op.launches for op in operations if not isinstance(op, Exchange))
    net = Transformer(config.model).to(device)
    initialise_(net, 0)
    tokens = torch.zeros(1, size, dtype=torch.int64, device=device)
    flushed = torch.zeros(_CPU_BYTES // 4 if device.type == "cpu" else 0)
    with fastest_library(torch.empty(0, device=device)):
        # Writing `flushed` before each run removes the host's code and data from the caches of a
        # CPU. In a step of a large model, the caches do not contain this code and data either.
        seconds = bench.median(lambda: net.losses(tokens).ce_sum.backward(), flushed.zero_)
    return seconds / launches


def _disk_s(folder: Path, rank: int) -> float:
    """Return the time that this rank takes to write _DISK_BYTES to the disk, in seconds."""
    path, data = folder / f".bench-machine-{os.getpid()}-{rank}", os.urandom(1 << 20)
    try:
        start = time.perf_counter()
        with path.open("wb") as file:
            for _ in range(_DISK_BYTES >> 20):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return time.perf_counter() - start
    except OSError as error:
        raise ConfigError(f"--dir {folder}: {reason_of(error)}; use another folder") from error
    finally:
        path.unlink(missing_ok=True)


def write_machine(result: dict[str, Any], path: Path) -> None:
    """Write the tables in `result` to a machine file. Raises ConfigError if the file cannot be
    written."""
    text = "\n".join(_toml_lines(result["machine"])) + "\n"
    assert tomllib.loads(text) == result["machine"]
    try:
        files.write_bytes(path, text.encode())
    except OSError as error:
        raise ConfigError(f"--out {path}: {reason_of(error)}; use another file") from error


def _toml_lines(machine: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a machine file. A `Figure` becomes an inline table."""
    tables = {"links", "measured", "device"}
    for key, value in machine.items():
        if key not in tables and not isinstance(value, list):
            yield f"{key} = {_toml(value)}"
    for name in ("links", "measured", "device"):
        yield from ("", f"[{name}]")
        for key, value in machine[name].items():
            if key != "products":
                yield f"{key} = {_toml(value)}"
    for dtype, products in machine["device"]["products"].items():
        yield from ("", f"[device.products.{dtype}]")
        lists = ("measured", "attention")
        yield from (f"{k} = {_toml(v)}" for k, v in products.items() if k not in lists)
        for name in lists:
            for measured in products[name]:
                yield from ("", f"[[device.products.{dtype}.{name}]]")
                yield from (f"{key} = {_toml(value)}" for key, value in measured.items())
    for name in ("levels", "storage"):
        for table in machine.get(name, []):
            yield from ("", f"[[{name}]]")
            yield from (f"{key} = {_toml(v)}" for key, v in table.items() if key != "messages")
            for message in table.get("messages", []):
                yield from ("", f"[[{name}.messages]]")
                yield from (f"{key} = {_toml(value)}" for key, value in message.items())


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(v)}" for key, v in value.items()) + " }"
    return json.dumps(value)  # the same syntax for these numbers and texts


def format_machine(result: dict[str, Any]) -> str:
    """Return the result of `bench_machine` as text, with one line per figure."""
    machine = result["machine"]
    measured, device = machine["measured"], machine["device"]
    nodes = counted(measured["nodes"], "node")
    lines = [
        f"{measured['device']}, {counted(measured['cores'], 'core')}, "
        f"{counted(measured['ranks'], 'rank')} of {counted(measured['threads'], 'thread')} on "
        f"{nodes}, torch {measured['torch']}, {measured['date']}"
    ]
    for dtype, products in device["products"].items():
        peak, share = products["peak"]["value"], products["efficiency"]["value"]
        half = products["half_size"]["value"]
        lines.append(
            f"{dtype} products: peak {peak / 1e12:.4g} TFLOP/s; very large products reach "
            f"{share:.0%} of the peak; a dimension of {half:.3g} halves this rate"
        )
        for product in products["measured"]:
            shape = f"{product['rows']} x {product['inner']} x {product['columns']}"
            lines.append(f"  {shape:<20} {product['flops']['value'] / 1e12:>9.4g} TFLOP/s")
        for attention in products["attention"]:
            rates = (attention[key]["value"] / 1e12 for key in ("forward", "backward"))
            texts = (f"{rate:.4g}" for rate in rates)
            lines.append(
                f"  attention of {attention['seq_len']:<6} {', '.join(texts)} TFLOP/s in forward "
                "and backward"
            )
    for name in ("activations", "gradients", "memory"):
        lines.append(f"{name}: {device[f'{name}_achieved']['value'] / 1e9:.4g} GB/s")
    if "product_code_bytes" in device:
        code = device["product_code_bytes"]["value"] / 1e3
        lines.append(f"memory for the code of each new shape of a product: {code:.4g} kB")
    if "new_memory_achieved" in device:
        new_memory = device["new_memory_achieved"]["value"] / 1e9
        lines.append(f"new memory: {new_memory:.4g} GB/s, in addition to the first write")
    lines.append(f"launch: {1e6 * device['launch_s']['value']:.3g} us for each operation")
    for name, level in result["network"].items():
        texts = (f"{key} {rate / 1e9:.3g} GB/s" for key, rate in level["rates"].items())
        latency_us = 1e6 * level["latency_s"]
        lines.append(f"{name}: {', '.join(texts)}, latency {latency_us:.3g} us for a ring step")
    for name in ("to_device", "to_host", "host_adam"):
        unit = "elements/s" if name == "host_adam" else "bytes/s"
        lines.append(f"{name}: {machine['links'][name]:.3g} {unit}")
    lines.append(f"disk: {machine['storage'][0]['write']['value'] / 1e9:.3g} GB/s")
    if result["steadiness"] < _STEADY:
        lines.append(
            f"warning: ranks reach only {result['steadiness']:.0%} of their speed, because other "
            "programs use this machine; measure again when the machine is idle"
        )
    return "\n".join(lines)


def ranks_to_measure(device_type: str) -> int:
    """Return the number of local ranks for a measurement: the number of accelerators or, on a CPU,
    2. The two ranks divide the cores of the CPU. If only one core is available, return 1."""
    if device_type == "cpu":
        return min(2, available_cores())
    return int(getattr(torch, device_type).device_count())
