"""What no Keras system can avoid: the transform and a shuffle, importing Keras in two processes, `fit` over RAM.

Keras on torch, whose optimizer averages the gradients of both processes by Gloo before it applies them. A batch is
taken out of tensors by `index_select`: `fit` with the arrays themselves takes as long or longer.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from multiprocessing import get_context
from typing import Any

import keras_work
import work
from ideal import seconds_of, shuffle_into_nothing


def from_memory(rank: int, port: int, rows: int, epochs: int) -> tuple[list[tuple[Any, Any]], float]:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(work.RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    import keras
    import torch
    import torch.distributed as dist

    adam = keras.optimizers.Adam(work.RATE)  # not a class of its own: Keras gives those no fused updates
    apply = adam.apply

    def apply_mean(gradients: Any, variables: Any = None) -> Any:
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat)
        flat /= work.RANKS
        parts = flat.split([gradient.numel() for gradient in gradients])
        return apply([part.view(one.shape) for part, one in zip(parts, gradients, strict=True)], variables)

    class Rows(keras.utils.PyDataset):
        def __len__(self) -> int:
            return -(-rows // work.BATCH)

        def __getitem__(self, number: int) -> tuple[Any, Any]:
            index = self.order[number]
            return x.index_select(0, index), y.index_select(0, index)

        def on_epoch_begin(self) -> None:
            self.order = torch.randperm(rows).split(work.BATCH)

    torch.set_num_threads(1)
    torch.manual_seed(rank)
    x = torch.rand(rows, work.WIDTH)
    y = (x[:, 0] * 3 + torch.sin(x[:, 1]) - x[:, 2] * x[:, 3]).reshape(-1, 1)
    keras.utils.set_random_seed(0)  # the same weights in both
    model = keras_work.make_model()
    adam.apply = apply_mean
    model.compile(adam, "mse")
    dist.init_process_group("gloo")
    dist.barrier()
    began = time.perf_counter()
    model.fit(Rows(), epochs=epochs, shuffle=False, verbose=0)
    seconds = time.perf_counter() - began
    layers = keras_work.layers_of(model)
    dist.destroy_process_group()
    return layers, seconds


def import_keras() -> None:
    """In as many processes at once as there are ranks: what none of them can do without."""
    all_ = [subprocess.Popen([sys.executable, "-c", "import keras"]) for _ in range(work.RANKS)]
    if sum(process.wait() for process in all_):
        raise RuntimeError("keras can't be imported")


def fit(frame: Any, epochs: int) -> work.Fitted:
    if os.environ.setdefault("KERAS_BACKEND", "torch") != "torch":
        raise RuntimeError("the ideal is measured on Keras's torch back end alone: leave it out by --only")
    rows = frame.count() // work.RANKS
    parts = {
        "etl and shuffle": seconds_of(lambda: shuffle_into_nothing(frame)),
        "import": seconds_of(import_keras),
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with get_context("spawn").Pool(work.RANKS) as pool:
        found = pool.starmap(from_memory, [(rank, port, rows, epochs) for rank in range(work.RANKS)])
    loop = max(seconds for _, seconds in found)
    seconds = sum(parts.values()) + loop
    return work.Fitted(found[0][0], loop, rows * work.RANKS * epochs, parts, seconds=seconds)


if __name__ == "__main__":
    sys.exit(work.main(fit, "keras", "torch", "pyarrow"))
