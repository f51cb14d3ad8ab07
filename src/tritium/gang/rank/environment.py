"""Prepare a rank for the user's function: framework, torchrun's variables, GPUs, network interface (rank)."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tritium.accelerators import GPU
from tritium.errors import WrongVersion
from tritium.frameworks.at_import import without_collections
from tritium.frameworks.framework import Framework
from tritium.gang.rank.network import interfaces
from tritium.gang.rank.world import World

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # From malloc.h, as Python has no names for them.
_VISIBLE = {GPU: ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), "npu": ("ASCEND_RT_VISIBLE_DEVICES",)}
"""The name of a resource in Spark → the variables by which its libraries see some devices only."""


def import_framework(framework: Framework | None, *, gpus: bool) -> None:
    """Prepare and import the framework, in a rank with or without GPUs. Raises WrongVersion where it is missing."""
    if framework is None:
        return
    try:
        framework.prepare(gpus=gpus)
        with without_collections():
            framework.load()
    except ImportError as error:
        raise WrongVersion(
            f"{framework.name} can't be imported on {socket.gethostname()} by {sys.executable}: {error}. "
            f"Install it there: {sys.executable} -m pip install {framework.install}",
            framework=framework.name,
        ) from error


def compare_versions(framework: Framework | None, world: World) -> None:
    """Raise WrongVersion, the same on every rank, where ranks have different versions of the framework."""
    if framework is None or world.size == 1 or not framework.modules:
        return
    package = framework.modules[0].partition(".")[0]
    version = str(getattr(sys.modules[package], "__version__", "?"))
    versions = world.gather(version)
    other = next((rank for rank, theirs in enumerate(versions) if theirs != versions[0]), None)
    if other is not None:
        hosts = world.peers[0].host, world.peers[other].host
        raise WrongVersion(
            f"Ranks have different versions of {package}: rank 0 on {hosts[0]} has {versions[0]}, rank {other} on "
            f"{hosts[1]} has {versions[other]}. Install the same one on every host: "
            f"pip install {package}=={versions[0]}",
            framework=framework.name,
        )


def prepare_environment(world: World, assignment: Mapping[str, Any]) -> None:
    """Set torchrun's variables, so that `torch.distributed.init_process_group()` works without arguments.

    Sets also which devices the libraries of their makers see, and the interface for Gloo and NCCL unless the user has
    set it.
    """
    os.environ.update(
        RANK=str(world.rank),
        WORLD_SIZE=str(world.size),
        LOCAL_RANK=str(world.local_rank),
        LOCAL_WORLD_SIZE=str(world.local_size),
        MASTER_ADDR=world.peers[0].address,
        MASTER_PORT=str(assignment["master_port"]),
    )
    if assignment["visible"]:
        _show_devices(assignment["resource"], assignment["visible"], assignment["sharers"])
    interface = interfaces().get(world.peers[world.rank].address.partition("%")[0])
    if interface is not None:
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", interface)


def _show_devices(resource: str, addresses: Sequence[str], sharers: int) -> None:
    """Have CUDA, ROCm or Ascend's library see these devices only; for other resources there is no such variable."""
    if resource == GPU and "CUDA_VISIBLE_DEVICES" not in os.environ:
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # The addresses are counted as by nvidia-smi.
    os.environ.update(dict.fromkeys(_VISIBLE.get(resource, ()), ",".join(addresses)))
    if resource == GPU and sharers > 1:  # By default each process of JAX takes 75 % of the memory, TensorFlow's all.
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{0.75 / sharers:.3f}")
        os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")


def keep_freed_memory() -> None:
    """Let the C library keep memory that a step frees for the next step, unless the user has set its limits (glibc).

    By itself the library returns memory to the system at each step, and gets it again page by page. These were 100 to
    400 pages of a small network's batch and activations, and took 3 to 5 % of the step. The first limit is the highest
    that the library itself chooses.
    """
    chosen = any(name in os.environ for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"))
    if sys.platform != "linux" or chosen:
        return
    set_limit = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_limit is not None:  # The C library musl lacks it.
        set_limit(_M_MMAP_THRESHOLD, 32 << 20)
        set_limit(_M_TRIM_THRESHOLD, 64 << 20)
