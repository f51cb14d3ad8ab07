"""What a checkpoint keeps of a training with Lightning: Lightning's own checkpoint (rank)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import fsspec  # type: ignore[import-untyped]
import torch

from tritium.checkpoint.training import Collective, Own, Shared, Stateful
from tritium.gang.rank.world import World
from tritium.ml.early_stopping import EarlyStoppingState
from tritium.ml.torch.random_state import random_state, set_random_state


class LightningFile:
    """Lightning's checkpoint, in memory on its way from and to the run directory."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.path = f"memory://tritium-lightning-{world.run_id}.ckpt"
        """The path of a file in the memory of this process."""
        self.trainer: Any = None
        """The Trainer whose state is saved; None before there is one."""
        self.sums: Any = None
        """The sums of the epoch in which it is saved; None between epochs."""
        self.sums_of_ranks = Collective(lambda: None if self.sums is None else self.sums.state())

    def parts(self, early_stopping: EarlyStoppingState, device: torch.device) -> dict[str, Stateful]:
        """Return all that is kept of a training, in the order in which it is restored."""
        rank, size = self._world.rank, self._world.size
        return {
            "lightning": self,
            "best": Shared(lambda: early_stopping.weights, early_stopping.load_weights),
            "sums": self.sums_of_ranks,
            "random": Own(rank, lambda: random_state(device), lambda kept: set_random_state(kept, device), size),
        }

    def shared(self) -> dict[str, Any]:
        self.trainer.save_checkpoint(self.path, weights_only=False)  # Every rank calls it, rank 0 writes.
        content = bytearray(taken(self.path) if self._world.rank == 0 else b"")
        file = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0)
        return {"file": file, "within": self.sums is not None}

    def own(self) -> None:
        return None

    def write(self, shared: Any, own: Sequence[Any]) -> str:
        """Write the file, from which a Trainer continues, and return its path."""
        content = shared["file"].numpy().tobytes()
        if shared["within"] and len(own) != self._world.size:
            content = started_over(content)  # Its rows are dealt to the ranks again.
        with fsspec.open(self.path, "wb") as file:
            file.write(content)
        return self.path

    def restore(self, shared: Any, own: Sequence[Any]) -> None:
        """Remove the file: the Trainer has restored its state."""
        taken(self.path)


def taken(path: str) -> bytes:
    """Return Lightning's file, which is in memory, and remove it."""
    files = fsspec.filesystem("memory")
    content: bytes = files.cat_file(path)
    files.rm(path)
    return content


def weights_in(content: bytes) -> dict[str, torch.Tensor]:
    """Return the weights in a file of Lightning's."""
    weights: dict[str, torch.Tensor] = _read(content)["state_dict"]
    return weights


def started_over(content: bytes) -> bytes:
    """Return a file of Lightning's that was saved within an epoch, with its weights at the first batch of that."""
    checkpoint = _read(content)
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    progress["current"] = dict.fromkeys(progress["current"], 0)
    progress["total"]["completed"] = progress["total"]["processed"]
    progress["is_last_batch"] = False
    file = io.BytesIO()
    torch.save(checkpoint, file)
    return file.getvalue()


def _read(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)
