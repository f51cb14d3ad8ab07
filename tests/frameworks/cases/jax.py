"""JAX: one jitted step over global arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tritium as tr

FRAMEWORK, ENV, PACKAGES = "jax", {}, ("jax",)  # type: ignore[var-annotated]


def train(on_step: Callable[[int], None]) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    def loss(w: Any, x: Any, y: Any, weights: Any) -> Any:
        return jnp.sum(weights * (x @ w[:-1] + w[-1] - y) ** 2) / jnp.sum(weights)

    @jax.jit
    def step(w: Any, *batch: Any) -> Any:
        return w - 0.1 * jax.grad(loss)(w, *batch)

    w = jnp.zeros(5)
    shard = tr.world().shard("train")
    for epoch in shard.jax(20, batch_size=max(shard.counts)):
        for batch in epoch:
            on_step(epoch.number)
            w = step(w, batch["x"], batch["y"], batch.weights)
    return {"rank": jax.process_index(), "size": jax.process_count(), "weights": w.tolist()}
