"""Functions that choose a rank's device, collective backend and number of threads, and functions
that allocate and limit host and device memory."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import mmap
import os
import resource
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from optimus.errors import ConfigError, counted, one_line
from optimus.launch.environment import available_cores, usable_memory

_IPEX = "intel_extension_for_pytorch"


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype for a value of `train.dtype`."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


def pick_device(local_rank: int, wanted: str = "auto") -> torch.device:
    """Return the device of this rank and make it torch's current device.

    Args:
        local_rank: Number of this rank on its node, used as the device index.
        wanted: Device type. "auto" selects the first available type of xpu, cuda and cpu.

    Raises:
        ConfigError: torch finds no device of the type, or none with the index `local_rank`.
    """
    kinds = ("xpu", "cuda", "cpu") if wanted == "auto" else (wanted,)
    for kind in kinds:
        if kind == "cpu":
            return torch.device("cpu")
        module = getattr(torch, kind, None)
        if module is None or not module.is_available():
            continue
        count = module.device_count()
        if local_rank >= count:
            raise ConfigError(
                f"local rank {local_rank} has no {kind} device: torch finds {count} on this node; "
                "start only one rank per device, or set train.device=cpu"
            )
        device = torch.device(kind, local_rank)
        module.set_device(device)
        return device
    raise ConfigError(
        f"train.device = {wanted!r}: torch finds no {wanted} device; set train.device=cpu"
    )


def collective_backend(device: torch.device) -> str:
    """Return the torch.distributed backend for a device: xccl, ccl, nccl or gloo.

    Raises:
        ConfigError: No collective backend for xpu devices is installed, or its import fails.
    """
    if device.type == "cuda":
        return "nccl"
    if device.type == "xpu":
        distributed = torch.distributed
        if getattr(distributed, "is_xccl_available", lambda: False)():
            return "xccl"
        if importlib.util.find_spec("oneccl_bindings_for_pytorch"):
            try:  # the import registers the backend
                importlib.import_module("oneccl_bindings_for_pytorch")
            except (ImportError, OSError) as error:
                raise ConfigError(
                    "cannot import oneccl_bindings_for_pytorch with this torch: "
                    f"{one_line(error)}; install the bindings for torch {torch.__version__}, "
                    "or a torch with xccl"
                ) from None
            return "ccl"
        raise ConfigError(
            "no collective backend for Intel GPUs: this torch has no xccl and "
            "oneccl_bindings_for_pytorch is not installed; install one of them"
        )
    return "gloo"


def device_of_backend(backend: str) -> torch.device:
    """Return the device on which a collective backend such as nccl requires its tensors."""
    kinds = {"nccl": "cuda", "xccl": "xpu", "ccl": "xpu"}
    return torch.device(kinds.get(backend, "cpu"))


def import_ipex() -> str:
    """Import Intel's extension for PyTorch (IPEX), unless OPTIMUS_IPEX is 0.

    Returns:
        The version of IPEX, or a phrase with the reason why it is not imported.
    """
    if os.environ.get("OPTIMUS_IPEX") == "0":
        return "left out by OPTIMUS_IPEX=0"
    if not importlib.util.find_spec(_IPEX):
        return "absent"
    try:
        return importlib.import_module(_IPEX).__version__
    except (ImportError, RuntimeError, OSError, AttributeError, SystemExit) as error:
        return f"does not import with torch {torch.__version__}: {one_line(error)}"


def check_compile(compile_blocks: bool) -> None:
    """Raise ConfigError if `compile_blocks`, the value of `train.compile`, is True and this process
    uses or will import IPEX."""
    # In compiled code, IPEX's layer_norm for CPUs has no gradient.
    wanted = os.environ.get("OPTIMUS_IPEX") != "0" and importlib.util.find_spec(_IPEX) is not None
    if compile_blocks and (wanted or _IPEX in sys.modules):
        raise ConfigError(
            "train.compile = true gives wrong gradients with intel-extension-for-pytorch; set "
            "OPTIMUS_IPEX=0 in the environment, or train.compile = false"
        )


def use_private_compile_cache() -> None:
    """Make torch.compile store its libraries in a folder that only this user can write.

    Another user could put libraries into torch's default folder. If the user has set
    TORCHINDUCTOR_CACHE_DIR, the folder that it names is used instead.

    Raises:
        ConfigError: Other users can replace folders in the temporary directory.
    """
    if not os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(_private_folder())
    inductor = importlib.import_module("torch._inductor.config")  # reads TORCHINDUCTOR_CACHE_DIR
    # torch stores precompiled headers in its default folder even if another folder is set.
    if hasattr(inductor, "cpp_cache_precompile_headers"):
        setattr(inductor, "cpp_cache_precompile_headers", False)  # noqa: B010, unknown to torch 2.8


def _private_folder() -> Path:
    parent = Path(tempfile.gettempdir()).resolve()
    for folder in (parent, *parent.parents):
        status = folder.stat()
        is_shared = bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
        is_sticky = bool(status.st_mode & stat.S_ISVTX)
        if status.st_uid not in (0, os.geteuid()) or (is_shared and not is_sticky):
            raise ConfigError(
                f"train.compile = true: other users can replace folders in {folder}; set TMPDIR, "
                "or TORCHINDUCTOR_CACHE_DIR, to a directory that only you can write"
            )
    path = parent / f"optimus-compile-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        path = Path(tempfile.mkdtemp(prefix=f"{path.name}-"))  # exists, but is not private
    return path


def num_threads(threads: int, deterministic: bool, local_world_size: int) -> int:
    """Return the number of intra-op threads of a rank.

    Args:
        threads: `train.threads`. If it is 0, the number of threads is 1 if `deterministic` is True,
            else the value of OMP_NUM_THREADS, else the number of available cores /
            `local_world_size`.
        deterministic: `train.deterministic`.
        local_world_size: Number of ranks on this node.
    """
    if threads == 0 and deterministic:
        threads = 1
    if threads == 0:  # OMP_NUM_THREADS may be a list, one number per nesting level
        text = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
        threads = int(text) if text.isdecimal() else 0
    return threads or max(1, available_cores() // local_world_size)


def set_threads(threads: int, deterministic: bool, local_world_size: int) -> int:
    """Set the number of intra-op threads of torch in this process, and return it. Arguments as for
    `num_threads`."""
    threads = num_threads(threads, deterministic, local_world_size)
    torch.set_num_threads(threads)
    return threads


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all submitted operations."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)


_locked_pages: dict[int, mmap.mmap] = {}
"""Memory that CUDA has page-locked, by its address. The memory stays mapped until it is unlocked,
because CUDA would treat other memory at the same address as page-locked."""


def host_zeros(length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a 1-D tensor of zeros in host memory. Copies between this tensor and `device` can be
    asynchronous.

    For an accelerator, the memory is page-locked until `free_host` or the end of the process. On
    CUDA, exactly the pages of the tensor are locked, whereas torch's allocator rounds up to a power
    of two.

    Raises:
        ConfigError: The memory cannot be locked.
    """
    if device.type == "cpu" or length == 0:
        return torch.zeros(length, dtype=dtype)
    size = length * dtype.itemsize
    try:
        if device.type != "cuda":
            return torch.zeros(length, dtype=dtype, pin_memory=True)
        pages = mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)  # filled with zeros
        flat = torch.frombuffer(pages, dtype=dtype)[:length]
        runtime: Any = torch.cuda.cudart()
        torch.cuda.check_error(runtime.cudaHostRegister(flat.data_ptr(), len(pages), 0))
        _locked_pages[flat.data_ptr()] = pages
        return flat
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"the host cannot lock {counted(size, 'byte')} of memory ({one_line(error)}); "
            "offload fewer states, or set checkpoint.async_save = false, "
            f"{_raise_limit(size)}or request more memory for the job"
        ) from error


def free_host(flat: torch.Tensor) -> None:
    """Unlock the memory of a tensor that `host_zeros` returned. All copies from and to the tensor
    must be complete. The tensor keeps its values. The memory is freed when the last reference to
    the tensor is deleted.

    Only memory that CUDA has page-locked needs this call. For other tensors, the call has no
    effect, and torch's allocator frees or reuses their memory.
    """
    if flat.data_ptr() in _locked_pages:
        runtime: Any = torch.cuda.cudart()
        torch.cuda.check_error(runtime.cudaHostUnregister(flat.data_ptr()))
        del _locked_pages[flat.data_ptr()]


def trim_heap() -> None:
    """Return free memory of glibc's heap to the operating system. A call takes up to a tenth of a
    second. Without glibc, the call has no effect."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _raise_limit(size: int) -> str:
    """Return a phrase that asks the user to raise the limit of locked memory, if `size` more bytes
    exceed the limit of this process. Otherwise return ""."""
    # A run is refused only if locking fails, not if the limit is exceeded: NVIDIA's driver locks
    # pages without regard to the limit (os_lock_user_pages of its kernel module).
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    needed = size + sum(len(pages) for pages in _locked_pages.values())
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return ""
    return (
        f"or raise the limit of locked memory by {counted(needed - soft, 'byte')} (ulimit -l "
        f"{-(-needed // 1024)}), "
    )


def device_memory(device: torch.device) -> int:
    """Return the size in bytes of an accelerator's memory. For a CPU, return the size of the memory
    that this process can use."""
    if device.type == "cpu":
        return usable_memory()
    return getattr(torch, device.type).mem_get_info(device)[1]


def limit_device_memory(device: torch.device, size: int) -> None:
    """Make allocations on an accelerator fail if torch would use more than `size` bytes. The call
    has no effect on a CPU or on an accelerator for which torch cannot set a limit."""
    limit = getattr(getattr(torch, device.type), "set_per_process_memory_fraction", None)
    if device.type != "cpu" and limit is not None:
        limit(min(1.0, size / device_memory(device)), device)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process in bytes: on an accelerator, the memory of tensors; on
    a CPU, the resident memory of the process."""
    if device.type != "cpu":
        return getattr(torch, device.type).max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def device_name(device: torch.device) -> str:
    """Return the name of the accelerator or processor."""
    if device.type in ("cuda", "xpu"):
        return getattr(torch, device.type).get_device_name(device)
    cores = Path("/proc/cpuinfo")
    if device.type == "cpu" and cores.exists():
        for line in cores.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return str(device)


def best_of(times: int, run: Callable[[], Any], device: torch.device) -> float:
    """Call `run` `times` times. Return the wall-clock seconds of the fastest call."""
    best = float("inf")
    for _ in range(times):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best
