"""Every framework under `launch` on a GPU: the cases of tests/frameworks learn there what one process learns."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import tritium as tr
from cases import case_of
from frameworks.test_contract import alone, table
from gpu.gpus import MARKS, ON_GPU

pytestmark = MARKS
# In float32, as on a CPU, and not in TF32.
EXACT = {"JAX_DEFAULT_MATMUL_PRECISION": "highest", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def frame() -> pd.DataFrame:
    x, y = table()
    return pd.DataFrame({"x": list(x.astype("float32")), "y": y.astype("float32")})


@pytest.mark.parametrize("name", ["torch", "jax", "keras_torch", "keras_jax", "lightning", "huggingface"])
def test_it_learns_on_a_gpu_what_one_process_learns(name: str) -> None:
    case = case_of("frameworks", name)
    settings = {**ON_GPU, "framework": case.FRAMEWORK, "env": {**case.ENV, **EXACT}, "data": {"train": frame()}}
    (found,) = tr.launch(case.train, args=(lambda step: None,), **settings)
    assert (found["rank"], found["size"]) == (0, 1)
    np.testing.assert_allclose(found["weights"], alone(), rtol=1e-4, atol=1e-5)


def test_jax_computes_on_the_gpu() -> None:
    case_of("frameworks", "jax")

    def where() -> tuple[str, str]:
        import jax

        shard = tr.world().shard("train")
        batch = next(iter(next(shard.jax(1, batch_size=64))))
        return jax.devices()[0].platform, next(iter(batch["x"].devices())).platform

    settings = {**ON_GPU, "framework": "jax", "env": EXACT, "data": {"train": frame()}}
    assert tr.launch(where, **settings) == [("gpu", "gpu")]


def test_horovod_s_collectives_and_optimizer_on_cuda_tensors() -> None:
    def train() -> tuple[list[float], str, float]:
        import tritium.compat  # noqa: F401 - horovod
        import horovod.torch as hvd  # isort: skip
        import torch

        hvd.init()
        torch.cuda.set_device(hvd.local_rank())
        summed = hvd.allreduce(torch.ones(4, device="cuda"), op=hvd.Sum, name="ones")
        net = torch.nn.Linear(3, 1).cuda()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), net.named_parameters())
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        x = torch.randn(64, 3, device="cuda")
        loss = torch.tensor(0.0)
        for _ in range(200):
            optimizer.zero_grad()
            loss = ((net(x) - x.sum(1, keepdim=True)) ** 2).mean()
            loss.backward()
            optimizer.step()
        return summed.tolist(), str(summed.device), float(loss)

    ((ones, device, loss),) = tr.launch(train, framework="torch", **ON_GPU)
    assert (ones, device) == ([1.0] * 4, "cuda:0")
    assert loss < 1e-3
