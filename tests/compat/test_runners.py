"""HorovodRunner, horovod.run, TorchDistributor and MirroredStrategyRunner, on the driver."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from tritium.errors import BadSetting, NotEnoughSlots

pytestmark = [pytest.mark.timeout(300)]


@pytest.fixture
def compat() -> Any:
    """Return the module, which makes names importable for the time of a test."""
    return importlib.import_module("tritium.compat")


def test_horovod_runner_returns_what_rank_0_returns(compat: Any, capfd: pytest.CaptureFixture[str]) -> None:
    def main(factor: float) -> Any:
        import horovod.torch as hvd
        import torch
        from sparkdl.horovod import log_to_driver

        hvd.init()
        print(f"printed by {hvd.rank()}")
        total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
        if hvd.rank() == 0:
            log_to_driver(f"the total is {total}")
        return hvd.rank(), total * factor

    assert compat.HorovodRunner(np=-2).run(main, factor=3.0) == (0, 6.0)
    out = "".join(capfd.readouterr())
    assert "the total is 2.0" in out
    assert "printed by" not in out
    assert compat.HorovodRunner(np=-2, driver_log_verbosity="all").run(main, factor=1.0) == (0, 2.0)
    out = "".join(capfd.readouterr())
    assert "printed by 0" in out
    assert "printed by 1" in out


def test_horovod_run_returns_what_all_return(compat: Any) -> None:
    def main(a: int, b: int = 0) -> Any:
        import horovod.torch as hvd

        hvd.init()
        return hvd.rank(), hvd.size(), a + b

    horovod_run = importlib.import_module("horovod").run
    assert horovod_run(main, args=(1,), kwargs={"b": 2}, np=2) == [(0, 2, 3), (1, 2, 3)]
    with pytest.raises(BadSetting, match=r"horovod.run\(hosts=…\): its ranks are processes of this machine"):
        horovod_run(main, args=(1,), hosts="a:1,b:1")


def test_torch_distributor_runs_a_function_and_a_script(compat: Any, tmp_path: Path) -> None:
    def main(a: int, b: int = 0) -> Any:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        return dist.get_rank(), dist.get_world_size(), a + b

    assert compat.TorchDistributor(2, local_mode=True, use_gpu=False).run(main, 1, b=2) == (0, 2, 3)
    assert compat.TorchDistributor(numProcesses=1, localMode=True, useGpu=False).run(main, 4) == (0, 1, 4)
    script = tmp_path / "train.py"
    script.write_text(f"import os, sys\nopen({str(tmp_path)!r} + '/' + os.environ['RANK'], 'w').write(sys.argv[1])\n")
    assert compat.TorchDistributor(2, True, False).run(str(script), 0.1) is None
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["0.1", "0.1"]
    with pytest.raises(BadSetting, match="a script takes no keyword arguments"):
        compat.TorchDistributor(1, True, False).run(str(script), lr=0.1)


def test_mirrored_strategy_runner_calls_the_function_in_the_scope(compat: Any) -> None:
    def main(lr: float) -> Any:
        import tensorflow as tf

        strategy = tf.distribute.get_strategy()
        return type(strategy).__name__, strategy.num_replicas_in_sync, lr

    runner = compat.MirroredStrategyRunner(num_slots=2, local_mode=True, use_gpu=False)
    assert runner.run(main, lr=0.5) == ("CollectiveAllReduceStrategy", 2, 0.5)
    own = compat.MirroredStrategyRunner(num_slots=1, local_mode=True, use_gpu=False, use_custom_strategy=True)
    assert own.run(main, lr=0.5) == ("_DefaultDistributionStrategy", 1, 0.5)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda c: c.HorovodRunner(np="2"), "np='2'): it must be a whole number"),
        (lambda c: c.HorovodRunner(np=-1, driver_log_verbosity="none"), 'choose "all" or "log_callback_only"'),
        (lambda c: c.MirroredStrategyRunner(num_slots=0), "num_slots=0 must be a whole number of at least 1."),
        (lambda c: c.MirroredStrategyRunner(num_slots=1, gpu_resource_name="npu"), 'by the name "gpu"'),
        (lambda c: c.TorchDistributor(0), "num_processes=0 must be a whole number of at least 1."),
    ],
    ids=["np", "verbosity", "slots", "resource", "processes"],
)
def test_wrong_arguments_are_refused(compat: Any, make: Any, says: str) -> None:
    with pytest.raises(BadSetting) as caught:
        make(compat)
    assert says in str(caught.value)


def test_gpus_that_are_not_there_are_named(compat: Any) -> None:
    with pytest.raises((BadSetting, NotEnoughSlots), match="GPU"):
        compat.TorchDistributor(1).run(print)
