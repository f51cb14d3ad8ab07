"""Lightning: its Trainer and Fabric find the gang by themselves, and keep checkpoints in the run directory (rank)."""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from tritium.errors import BadSetting
from tritium.frameworks.at_import import at_import
from tritium.frameworks.framework import Place
from tritium.frameworks.torch import Torch
from tritium.observe.run_directory import run_at

# One library has two names: (the package with Trainer, the package with Fabric).
_PACKAGES = (("lightning.pytorch", "lightning.fabric"), ("pytorch_lightning", "lightning_fabric"))
_FOLDER_IN_RUN_DIR = "lightning"
_STARTS_PROCESSES = ("spawn", "fork", "notebook")


@dataclass(frozen=True, kw_only=True)
class Lightning(Torch):
    """Lightning: `Trainer()` and `Fabric()` without arguments train data-parallel on all ranks."""

    name = "lightning"
    modules = ("lightning.pytorch",)
    covers = ("torch", "pytorch_lightning", "lightning_fabric")
    install = "lightning"

    def run(self, place: Place, function: Callable[[], Any]) -> Any:
        """Call the function with the gang known to Lightning, also to one that is imported later."""
        folder = _folder(place)
        layout = NodeLayout.of(place)
        for trainer, fabric in _PACKAGES:
            connect = functools.partial(_connect, layout)
            at_import(f"{trainer}.trainer.connectors.accelerator_connector", connect)
            at_import(f"{fabric}.connector", connect)
            at_import(f"{trainer}.trainer.connectors.data_connector", _ask_for_no_workers)
            if folder is not None:
                at_import(f"{trainer}.callbacks.model_checkpoint", functools.partial(_keep_in, folder))
        if folder is not None:
            os.environ.setdefault("PL_TRAINER_DEFAULT_ROOT_DIR", folder)
        # A shard refuses workers, and each of its loaders has its own length.
        warnings.filterwarnings("ignore", "Your `IterableDataset` has `__len__` defined")
        return super().run(place, function)


@dataclass(frozen=True)
class NodeLayout:
    """The gang in Lightning's words: `num_nodes` nodes of `devices` devices each, of which each rank is one.

    Where hosts have unequal numbers of ranks, which Lightning can't say, every rank is a node of its own.
    """

    size: int
    rank: int
    num_nodes: int
    node_rank: int
    local_rank: int
    devices: int | list[int]
    """The number of CPUs, or the indices of the GPUs."""
    accelerator: str

    @classmethod
    def of(cls, place: Place) -> NodeLayout:
        first = [rank for rank, peer in enumerate(place.peers) if peer.local_rank == 0]
        sizes = {end - start for start, end in zip(first, [*first[1:], place.size], strict=True)}
        if len(sizes) == 1:
            nodes, node, local_rank = len(first), sum(start <= place.rank for start in first) - 1, place.local_rank
            mates = place.peers[first[node] : first[node] + place.local_size]
        else:
            nodes, node, local_rank, mates = place.size, place.rank, 0, place.peers[place.rank : place.rank + 1]
        if place.device == "cpu":
            return cls(place.size, place.rank, nodes, node, local_rank, len(mates), "cpu")
        gpus = [int(mate.device.partition(":")[2]) for mate in mates]
        return cls(place.size, place.rank, nodes, node, local_rank, gpus, "gpu")


def _connect(layout: NodeLayout, module: Any) -> None:
    """Let the connector of Trainer, or of Fabric, find the gang: it asks TorchElasticEnvironment first."""
    gang = module.TorchElasticEnvironment = _environment(module.TorchElasticEnvironment, layout)

    def join(settings: dict[str, Any]) -> None:
        plugins = settings["plugins"] or ()
        plugins = plugins if isinstance(plugins, list | tuple) else [plugins]
        environment = next((base for base in gang.__mro__ if base.__name__ == "ClusterEnvironment"), gang)
        # An environment of the user's own is left alone.
        if not any(isinstance(plugin, environment) for plugin in plugins):
            _check(settings, layout)
            settings.update(devices=layout.devices, num_nodes=layout.num_nodes)
            if settings["accelerator"] == "auto":
                settings["accelerator"] = layout.accelerator

    _adjust(getattr(module, "_AcceleratorConnector", None) or module._Connector, join)


def _adjust(kind: Any, adjust: Callable[[dict[str, Any]], None]) -> None:
    """Let `adjust` change the arguments, with those that have their defaults, of every instance of a class."""
    original = kind.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        adjust(bound.arguments)
        original(*bound.args, **bound.kwargs)

    kind.__init__ = __init__


def _environment(base: Any, layout: NodeLayout) -> Any:
    """Return the cluster environment of the gang. It has torchrun's variables, as `base` has."""

    class TritiumEnvironment(base):  # type: ignore[misc]
        """The gang: its launch has started the processes and set MASTER_ADDR and MASTER_PORT."""

        @staticmethod
        def detect() -> bool:
            return True

        def world_size(self) -> int:
            return layout.size

        def global_rank(self) -> int:
            return layout.rank

        def local_rank(self) -> int:
            return layout.local_rank

        def node_rank(self) -> int:
            return layout.node_rank

        def validate_settings(self, num_devices: int, num_nodes: int) -> None:
            """Do nothing: `_check` did, before Lightning counted devices."""

    return TritiumEnvironment


def _check(settings: dict[str, Any], layout: NodeLayout) -> None:
    """Raise BadSetting where the user's arguments ask for other processes than the ranks of the gang."""
    devices, nodes, strategy = settings["devices"], settings["num_nodes"], settings["strategy"]
    if isinstance(strategy, str) and any(word in strategy for word in _STARTS_PROCESSES):
        raise BadSetting(
            f"strategy={strategy!r} starts processes of its own, and this gang has started its {layout.size} ranks "
            'already. Leave it out, or take strategy="ddp".',
            setting="strategy",
        )
    if devices in ("auto", -1, "-1"):
        wrong = nodes not in (1, layout.num_nodes)
        conflict = f"num_nodes={nodes} asks for ranks on {nodes} hosts, and this gang has its {layout.size} on "
        conflict += f"{layout.num_nodes}"
    else:
        count = _count(devices)
        wrong = count * nodes != layout.size
        conflict = f"devices={devices!r} and num_nodes={nodes} ask for {count * nodes} processes, and this gang has "
        conflict += f"{layout.size} rank{'s' * (layout.size > 1)}"
    if wrong:
        raise BadSetting(
            f"{conflict}. Leave devices= and num_nodes= out: every rank trains; or launch with "
            f"ranks={_count(devices)}. For a Trainer of one rank alone give plugins=LightningEnvironment().",
            setting="devices",
        )


def _count(devices: Any) -> int:
    """Return the number of devices that an argument of Lightning asks for."""
    if isinstance(devices, str):
        parts = [part for part in devices.split(",") if part.strip()]
        return int(devices) if len(parts) == 1 and "," not in devices and devices.isdigit() else len(parts)
    return devices if isinstance(devices, int) else len(devices)


def _ask_for_no_workers(module: Any) -> None:
    """Don't let Lightning advise workers for the loader of a shard, which refuses them."""
    original = module._worker_check

    @functools.wraps(original)
    def _worker_check(trainer: Any, dataloader: Any, name: str) -> None:
        from tritium.data.views.torch import ShardDataset

        if not isinstance(getattr(dataloader, "dataset", None), ShardDataset):
            original(trainer, dataloader, name)

    module._worker_check = _worker_check


def _keep_in(folder: str, module: ModuleType) -> None:
    """Let checkpoints go to one place for all attempts, the newest as `last.ckpt`, unless the user says otherwise.

    Lightning's default path contains the version of its logger, another one in every attempt, so that
    `ckpt_path="last"` would not find the checkpoint of the attempt before.
    """

    def keep(settings: dict[str, Any]) -> None:
        if settings["dirpath"] is None:
            settings["dirpath"] = f"{folder}/checkpoints"
        if settings["save_last"] is None:
            settings["save_last"] = True

    _adjust(vars(module)["ModelCheckpoint"], keep)


def _folder(place: Place) -> str | None:
    """Return the folder for Lightning's files in the run directory; None where a rank does not reach that."""
    try:
        reaches_run_dir = place.run_dir != "" and run_at(place.run_dir) == place.run_id
    except Exception:  # noqa: BLE001 - any error of a file system means that this rank does not reach it
        reaches_run_dir = False
    missing = [rank for rank, reached in enumerate(place.gather(reaches_run_dir)) if not reached]
    if not missing:
        return f"{place.run_dir.rstrip('/')}/{_FOLDER_IN_RUN_DIR}"
    if place.rank == 0:
        place.note(
            f"Lightning's checkpoints and logs stay in the working directory of rank 0 on {place.host}, and no retry "
            f"resumes from them: rank {missing[0]} on {place.peers[missing[0]].host} does not reach the run directory "
            f"{place.run_dir}. Give run_dir= a place that the driver and every rank reach."
        )
    return None
