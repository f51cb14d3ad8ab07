"""JAX: connect the ranks as its processes, on GPUs or CPUs (rank)."""

from __future__ import annotations

import functools
import importlib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tritium.frameworks.framework import Framework, Place, own_devices
from tritium.frameworks.ports import held_ports, without_proxy

_PATIENCE_SECONDS = 24 * 3600  # JAX's own 100 s would end ranks that Tritium lets wait, see `stall_timeout`.


@dataclass(frozen=True, kw_only=True)
class JAX(Framework):
    """JAX: the ranks are its processes, by `jax.distributed.initialize`; `jax.devices()` are those of all ranks."""

    name = "jax"
    modules = ("jax",)
    covers = ("flax", "optax", "equinox", "orbax")
    install = "jax"
    float32 = True
    secondary = re.compile(r"Error: [A-Z_]+: .*(Gloo .* failed|coordination service|NCCL operation)", re.S)
    aborts = re.compile("JAX distributed service detected fatal errors")

    def run(self, place: Place, function: Callable[[], Any]) -> Any:
        """Call the function between `jax.distributed.initialize` and the end of all ranks.

        JAX's exit handler calls `jax.distributed.shutdown`, which waits for all processes: a rank leaves when every
        rank has returned.
        """
        jax: Any = sys.modules["jax"]
        gpus = place.device.startswith("cuda")
        if jax.config.jax_platforms is None and (gpus or place.device == "cpu"):  # JAX_PLATFORMS is not set.
            # "cuda" is an error where JAX finds no GPU, while by default it would use the CPU.
            jax.config.update("jax_platforms", "cuda,cpu" if gpus else "cpu")
        initialize = jax.distributed.initialize

        def connected(*args: Any, **settings: Any) -> None:
            if args or settings:
                initialize(*args, **settings)

        jax.distributed.initialize = connected  # A program's own call without arguments has nothing left to do.
        if place.size == 1:
            return function()
        _gloo_at(place.peers[place.rank].address)
        with held_ports(place) as addresses:
            without_proxy(place)
            if "jax_check_proxy_envs" in jax.config.values:  # JAX < 0.8 lacks this setting and its warning.
                jax.config.update("jax_check_proxy_envs", False)
            initialize(
                addresses[0],
                place.size,
                place.rank,
                local_device_ids=list(own_devices(place)) if gpus else None,
                coordinator_bind_address=addresses[0],
                cluster_detection_method="deactivate",  # Else variables of SLURM or Kubernetes count, too.
                heartbeat_timeout_seconds=_PATIENCE_SECONDS,
                shutdown_timeout_seconds=_PATIENCE_SECONDS,
            )
            jax.devices()  # The first use waits for all ranks, for 2 minutes only, so it comes before the function.
            return function()


def _gloo_at(address: str) -> None:
    """Let JAX's Gloo listen at `address`; by default it takes that of the host's name, often 127.0.1.1."""
    native: Any = getattr(importlib.import_module("jax._src.xla_bridge"), "_jax", None)
    if hasattr(native, "make_gloo_tcp_collectives"):
        native.make_gloo_tcp_collectives = functools.partial(native.make_gloo_tcp_collectives, hostname=address)
