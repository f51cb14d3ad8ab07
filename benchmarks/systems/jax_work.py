"""The training loop of the JAX systems: work.py's MLP with optax's Adam, one device a process, rows split over all."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import work


def import_jax() -> None:
    """In as many processes at once as there are ranks: what none of them can do without."""
    all_ = [subprocess.Popen([sys.executable, "-c", "import jax, optax"]) for _ in range(work.RANKS)]
    if sum(process.wait() for process in all_):
        raise RuntimeError("jax can't be imported")


def train(
    epochs: int, batches: Callable[[int], Iterator[tuple[Any, Any, Any]]]
) -> tuple[list[tuple[Any, Any]], float, int]:
    """`batches(epoch)` gives global arrays x, y and weights. Returns the weights, the loop's seconds, and its rows."""
    import jax
    import jax.numpy as jnp
    import optax

    random = np.random.default_rng(0)
    widths = (work.WIDTH, 256, 256, 1)
    params = [
        (random.uniform(-1, 1, (n, m)).astype("float32") / np.sqrt(n), np.zeros(m, "float32"))
        for n, m in itertools.pairwise(widths)
    ]
    adam = optax.adam(work.RATE)
    state = adam.init(params)

    def loss_of(params: Any, x: Any, y: Any, weights: Any) -> Any:
        (first, a), (second, b), (third, c) = params
        hidden = jax.nn.relu(jax.nn.relu(x @ first + a) @ second + b)
        return jnp.sum(weights * ((hidden @ third + c)[:, 0] - y) ** 2) / jnp.sum(weights)

    @jax.jit
    def step(params: Any, state: Any, x: Any, y: Any, weights: Any) -> Any:
        gradient = jax.grad(loss_of)(params, x, y, weights)
        change, state = adam.update(gradient, state)
        return optax.apply_updates(params, change), state

    began, rows = time.perf_counter(), 0
    for epoch in range(epochs):
        for x, y, weights in batches(epoch):
            params, state = step(params, state, x, y, weights)
            rows += len(x) // work.RANKS
    jax.block_until_ready(params)
    seconds = time.perf_counter() - began
    return [(np.asarray(weight), np.asarray(bias)) for weight, bias in params], seconds, rows
