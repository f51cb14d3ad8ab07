"""Lightning in a gang: what Trainer and Fabric find, refuse, show and keep."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import tritium as tr
from machines import Cable, Machine, can_make_hosts, hosts, order_for, serving
from tritium.frameworks.lightning import Lightning, NodeLayout
from tritium.gang.rank.other_launchers import Elsewhere
from tritium.gang.rank.peers import Peer
from tritium.gang.rank.world import World

pytestmark = pytest.mark.skipif(
    find_spec("lightning") is None, reason="needs lightning: pip install tritium[lightning]"
)
FRAME = pd.DataFrame({"x": np.arange(103, dtype="float32") / 103, "y": np.arange(103, dtype="float32") / 50})


def run(fn: Any, ranks: int = 2, **settings: Any) -> list[Any]:
    quiet = {"on": "driver", "progress": False, "output": "none", "retries": 0, "framework": "lightning"}
    return tr.launch(fn, ranks=ranks, **{**quiet, **settings})


def regression(on_step: Any = None) -> Any:
    import lightning
    import torch

    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            if on_step is not None:
                on_step(self, batch)
            return torch.nn.functional.mse_loss(self.linear(batch["x"][:, None])[:, 0], batch["y"])

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("validation", self.linear(batch["x"][:, None]).mean(), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    return Regression()


def test_a_retry_resumes_from_lightnings_checkpoint_in_the_run_directory(tmp_path: Path) -> None:
    """One gang, as each takes seconds: what a bare Trainer finds, what it shows, and what a retry continues from."""

    def train() -> dict[str, Any]:
        import lightning

        world, seen = tr.world(), []

        def on_step(module: Any, batch: Any) -> None:
            seen.append((module.current_epoch, batch["x"].tolist()))
            killed = Path(world.run_dir, "killed")
            if world.rank == 1 and module.current_epoch == 2 and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)

        trainer = lightning.Trainer(max_epochs=4, log_every_n_steps=1)
        loaders = world.shard("train").loader(batch_size=10), world.shard("validation").loader(batch_size=20)
        trainer.fit(regression(on_step), *loaders, ckpt_path="last")
        kind = type(trainer.strategy.cluster_environment).__name__
        rows = world.shard("train").report()[-1]
        return {"seen": seen, "kind": kind, "size": trainer.world_size, "root": trainer.default_root_dir, "rows": rows}

    data = {"train": FRAME, "validation": FRAME}
    found = run(train, data=data, retries=1, run_dir=str(tmp_path))
    assert tmp_path.joinpath("killed").exists()
    for each in found:
        assert (each["kind"], each["size"]) == ("TritiumEnvironment", 2)
        assert each["root"] == f"{tmp_path}/lightning"
        assert [epoch for epoch, _ in each["seen"]] == [2] * 6 + [3] * 6  # of the second attempt
        assert each["rows"]["epoch"] == 3  # the shard continued with Lightning's epoch
    for epoch in (2, 3):  # every row exactly once, over both ranks
        rows = [x for each in found for number, xs in each["seen"] if number == epoch for x in xs]
        assert sorted(rows) == pytest.approx(FRAME["x"])
    assert tmp_path.joinpath("lightning", "checkpoints", "last.ckpt").exists()
    logs = [tmp_path.joinpath("logs", f"rank-{rank}.log").read_text() for rank in range(2)]
    assert "Epoch 3/3" in logs[0]
    assert "Epoch" not in logs[1]
    assert "num_workers" not in logs[0]
    assert "IterableDataset" not in logs[0]


def test_arguments_that_contradict_the_gang_are_refused_and_those_that_agree_are_taken() -> None:
    def train() -> tuple[list[str], list[int]]:
        import lightning
        import pytorch_lightning
        from lightning.pytorch.plugins.environments import LightningEnvironment

        agree: list[dict[str, Any]] = [{"devices": 2}, {"devices": "auto"}, {"devices": -1}, {"strategy": "ddp"}, {}]
        makers = [lightning.Trainer, lightning.Fabric, pytorch_lightning.Trainer]
        sizes = [maker(**arguments).world_size for maker in makers for arguments in agree]
        alone = lightning.Trainer(devices=1, plugins=LightningEnvironment(), logger=False)
        contradict = [{"devices": 4}, {"devices": 1}, {"devices": "0,1,2"}, {"num_nodes": 3}, {"strategy": "ddp_spawn"}]
        errors = []
        for arguments in contradict:
            for maker in makers[:2]:
                try:
                    maker(**arguments)
                except tr.errors.BadSetting as error:
                    errors.append(str(error))
        return errors, [*sizes, alone.world_size]

    for errors, sizes in run(train):
        assert sizes == [2] * 15 + [1]
        assert len(errors) == 10
        assert "devices=4 and num_nodes=1 ask for 4 processes, and this gang has 2 ranks" in errors[0]
        assert "ranks=4" in errors[1]
        assert "devices=1 and num_nodes=1 ask for 1 processes" in errors[2]
        assert "ask for 3 processes" in errors[4]
        assert "num_nodes=3 asks for ranks on 3 hosts, and this gang has its 2 on 1" in errors[6]
        assert "strategy='ddp_spawn' starts processes of its own" in errors[8]


@pytest.mark.parametrize(
    ("ranks_per_host", "devices", "expected"),
    [
        ([2, 2], "cpu", [(2, 0, 0, 2), (2, 0, 1, 2), (2, 1, 0, 2), (2, 1, 1, 2)]),
        ([2, 1], "cpu", [(3, 0, 0, 1), (3, 1, 0, 1), (3, 2, 0, 1)]),
        ([2], "cuda", [(1, 0, 0, [0, 1]), (1, 0, 1, [0, 1])]),
        ([2, 1], "cuda", [(3, 0, 0, [0]), (3, 1, 0, [1]), (3, 2, 0, [0])]),
    ],
)
def test_the_layout_of_a_gang(ranks_per_host: list[int], devices: str, expected: list[Any]) -> None:
    places = [(host, local) for host, count in enumerate(ranks_per_host) for local in range(count)]
    names = [devices if devices == "cpu" else f"{devices}:{local}" for _, local in places]
    peers = tuple(Peer(rank, f"host-{host}", "", local, names[rank], 0) for rank, (host, local) in enumerate(places))
    found = []
    for rank, (host, local) in enumerate(places):
        size, control = ranks_per_host[host], Elsewhere("nothing", len(places))
        world = World(rank, len(places), local, size, f"host-{host}", names[rank], peers, "", control)
        layout = NodeLayout.of(world)
        found.append((layout.num_nodes, layout.node_rank, layout.local_rank, layout.devices))
    assert found == expected


def across(place: str) -> None:
    import lightning
    import torch

    own = list(torch.arange(12.0))  # not a shard: Lightning deals it to the ranks
    seen: list[float] = []

    class Sum(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def training_step(self, batch: Any, index: int) -> Any:
            seen.extend(batch.tolist())
            return (self.weight * batch).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    trainer = lightning.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    model = Sum()
    trainer.fit(model, torch.utils.data.DataLoader(own, batch_size=2))
    found = {"size": trainer.world_size, "nodes": trainer.num_nodes, "seen": seen, "weight": model.weight.item()}
    Path(place, str(tr.world().rank)).write_text(json.dumps(found))


@pytest.mark.skipif(not can_make_hosts(), reason="only root may make network namespaces")
def test_ranks_of_two_hosts_that_have_unequally_many(tmp_path: Path) -> None:
    with hosts(2) as both, contextlib.ExitStack() as stack:
        Cable(*both)
        coordinator = stack.enter_context(serving(3, host="0.0.0.0"))
        for partition, host in enumerate([both[0], both[0], both[1]]):
            address = (host.near, coordinator.address[1])
            order = order_for(coordinator, across, str(tmp_path), address=address, framework=Lightning())
            inside = (*host.inside, "unshare", "--uts", "sh", "-c", f'hostname {host.name} && exec "$@"', "-")
            stack.callback(Machine(order, partition, inside=inside).close)
        with coordinator.changed:
            assert coordinator.changed.wait_for(lambda: coordinator.finished or coordinator.failure, 100)
        assert coordinator.failure is None
    found = [json.loads(tmp_path.joinpath(str(rank)).read_text()) for rank in range(3)]
    assert [(each["size"], each["nodes"]) for each in found] == [(3, 3)] * 3
    assert sorted(row for each in found for row in each["seen"]) == list(range(12))
    assert len({each["weight"] for each in found}) == 1


@pytest.mark.imports("lightning")
def test_without_the_framework_the_function_that_imports_lightning_is_warned_of() -> None:
    def train() -> None:
        import lightning

        assert lightning

    with pytest.warns(UserWarning, match=r"imports lightning.*each would train by itself.*framework='lightning'"):
        run(train, framework="torch")
