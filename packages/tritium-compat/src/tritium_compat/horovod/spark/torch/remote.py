"""The training loop of `horovod.spark.torch` (rank)."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import tritium_compat.horovod.torch as hvd
from tritium_compat.horovod.spark.common.training import Rank, Rows
from tritium_compat.horovod.spark.common.util import to_list
from tritium_compat.horovod.spark.torch.modules import loaded, optimizer_for, rescaled, saved, shaped, unpacked

Tensors = list[torch.Tensor]


def train(rank: Rank, module: bytes, optimizer: bytes, checkpoint: bytes | None) -> Any:
    """Train, and return history and final state on rank 0: {"model": …, "optimizer": …}."""
    if rank.settings.random_seed is not None:
        torch.manual_seed(rank.settings.random_seed)
    hvd.init()
    try:
        return Loop(
            rank, unpacked(module), unpacked(optimizer), None if checkpoint is None else loaded(checkpoint)
        ).run()
    finally:
        hvd.shutdown()


class Loop:
    """The epochs of a training. The learning rate is times the number of ranks, and divided by it where it is saved."""

    def __init__(self, rank: Rank, module: Any, optimizer: Any, checkpoint: Any) -> None:
        self.rank, self.settings = rank, rank.settings
        self.device = torch.device(rank.world.device if self.settings.use_gpu else "cpu")
        self.module = module.to(self.device)
        kind, self.groups, state = optimizer
        self.kind = kind
        if checkpoint is not None:
            module.load_state_dict(checkpoint["model"])
            rank.note("the training continues from the checkpoint of its run_id")
            state = checkpoint["optimizer"]  # with the learning rate as it is: so does horovod.spark
        else:
            state = rescaled(state, hvd.size())
        bound = optimizer_for(module, kind, self.groups, state)
        hvd.broadcast_parameters(module.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(bound, root_rank=0)
        options: dict[str, Any] = {"backward_passes_per_step": self.settings.backward_passes_per_step}
        if self.settings.gradient_compression:
            options["compression"] = self.settings.gradient_compression
        self.optimizer = hvd.DistributedOptimizer(bound, named_parameters=module.named_parameters(), **options)
        self.labels: Sequence[str] = self.settings.label_cols
        self.losses = self._losses()
        self.minibatch = self.settings.train_minibatch_fn or train_minibatch

    def _losses(self) -> list[Callable[..., torch.Tensor]]:
        settings, count = self.settings, len(self.labels)
        if settings.loss_constructors:
            known = {"rank": self.rank, "model": self.module, "settings": settings}
            return [make(**known) for make in to_list(settings.loss_constructors, count) or ()]
        return [
            loss.to(self.device) if isinstance(loss, torch.nn.Module) else loss
            for loss in to_list(settings.loss, count) or ()
        ]

    def run(self) -> Any:
        """Run the epochs, with a checkpoint and logs of rank 0 after each."""
        rank, store, history = self.rank, self.rank.store, []
        steps = rank.steps(math.floor)
        training = rank.train_rows()
        with store.get_local_output_dir() as directory:
            file = os.path.join(directory, store.checkpoint_filename)
            writer = (
                _writer(os.path.join(directory, store.logs_subdir)) if rank.is_first and store.saving_runs else None
            )
            state = b""
            for epoch in range(self.settings.epochs):
                entry = {"epoch": epoch, "train": self._train(epoch, steps, training)}
                if rank.validates:
                    entry["validation"] = self._validate()
                history.append(entry)
                rank.note(str(entry))
                if rank.is_first:
                    state = saved(self._state())
                    with open(file, "wb") as out:
                        out.write(state)
                    if writer is not None:
                        _log(writer, entry)
                    if store.saving_runs:
                        store.sync(directory)
            if writer is not None:
                writer.close()
                store.sync(directory)
        return (history, state) if rank.is_first else None

    def _state(self) -> dict[str, Any]:
        weights = {name: value.cpu() for name, value in self.module.state_dict().items()}
        return {"model": weights, "optimizer": rescaled(self.optimizer.state_dict(), 1 / hvd.size())}

    def _train(self, epoch: int, steps: int, rows: Iterator[Rows]) -> dict[str, Any]:
        self.module.train()
        sums = Averages(self.settings.metrics, self.labels)
        for step in range(steps):
            inputs, labels, weights = self._prepared(next(rows))
            outputs, loss = self.minibatch(
                *(self.module, self.optimizer, self._matched, self._loss, inputs, labels, weights),
                *(self.settings.backward_passes_per_step, step),
            )
            sums.update(loss, *self._matched(outputs, labels))
            self.rank.world.log(
                step=step, steps=steps, epoch=epoch, epochs=self.settings.epochs, rows=(step + 1) * self.rank.batch_size
            )
        self.optimizer.step()
        return sums.averaged()

    def _validate(self) -> dict[str, Any]:
        self.module.eval()
        sums, rows = Averages(self.settings.metrics, self.labels), self.rank.validation_rows()
        with torch.no_grad():
            for _ in range(self.rank.steps(math.ceil, "validation")):
                inputs, labels, weights = self._prepared(next(rows))
                outputs, labels = self._matched(self.module(*inputs), labels)
                sums.update(self._loss(outputs, labels, weights), outputs, labels)
        return sums.averaged()

    def _prepared(self, rows: Rows) -> tuple[Tensors, Tensors, torch.Tensor | None]:
        settings = self.settings

        def tensor(name: str) -> torch.Tensor:
            return torch.tensor(rows[name], dtype=torch.float32, device=self.device)

        inputs = shaped([tensor(name) for name in settings.feature_cols], settings.input_shapes)
        labels = [tensor(name) for name in self.labels]
        return inputs, labels, tensor(settings.sample_weight_col) if settings.sample_weight_col else None

    def _matched(self, outputs: Any, labels: Tensors) -> tuple[Any, Tensors]:
        """Return outputs as a list, and labels in their shapes."""
        if not isinstance(outputs, list | tuple):
            outputs = [outputs]
        if hasattr(outputs[0], "shape"):
            if self.settings.label_shapes:
                labels = [
                    label.reshape(*shape) for label, shape in zip(labels, self.settings.label_shapes, strict=True)
                ]
            else:
                pairs = zip(labels, outputs, strict=False)
                labels = [label.reshape(o.shape) if o.numel() == label.numel() else label for label, o in pairs]
        return outputs, labels

    def _loss(self, outputs: Any, labels: Tensors, weights: torch.Tensor | None) -> torch.Tensor:
        """Return the weighted sum of the losses; with weights of rows each is the mean of the weighted losses."""
        count = len(self.labels)
        each = self.settings.loss_weights or [1.0 / count] * count
        total: Any = 0.0
        for output, label, loss, weight in zip(outputs, labels, self.losses, each, strict=True):
            if weights is None:
                total = total + loss(output, label) * weight
            else:
                total = total + (loss(output, label, reduction="none").flatten() * weights).mean() * weight
        found: torch.Tensor = total
        return found


def train_minibatch(
    model: Any,
    optimizer: Any,
    transform_outputs: Any,
    loss_fn: Any,
    inputs: Tensors,
    labels: Tensors,
    sample_weights: torch.Tensor | None,
    backward_passes_per_step: int,
    batch_idx: int,
) -> tuple[Any, torch.Tensor]:
    """Take the step of the batches before, and compute the gradients of this one, as `train_minibatch_fn` may."""
    if batch_idx % backward_passes_per_step == 0:
        if batch_idx != 0:
            optimizer.step()
        optimizer.zero_grad()
    outputs, labels = transform_outputs(model(*inputs), labels)
    loss = loss_fn(outputs, labels, sample_weights)
    if backward_passes_per_step > 1:
        loss = loss / backward_passes_per_step
    loss.backward()
    return outputs, loss


class Averages:
    """Sums of loss and metrics over the batches of an epoch, and their averages over batches and ranks."""

    def __init__(self, groups: Any, labels: Sequence[str]) -> None:
        self._groups, self._labels, self._batches = list(groups or ()), labels, 0
        self._sums: dict[str, float] = {}

    def update(self, loss: torch.Tensor, outputs: Any, labels: Tensors) -> None:
        """Add a batch. A group of one function is computed for every output, one of several for one output each."""
        self._batches += 1
        self._add("loss", loss)
        for number, group in enumerate(self._groups):
            functions = to_list(list(group) if isinstance(group, list | tuple) else [group], len(outputs)) or ()
            for name, function, output, label in zip(self._labels, functions, outputs, labels, strict=False):
                self._add(f"group_{number}_{name}", function(output, label))

    def _add(self, name: str, value: Any) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + float(
            value.detach() if isinstance(value, torch.Tensor) else value
        )

    def averaged(self) -> dict[str, Any]:
        """Return loss and metrics as the history has them. All ranks call it."""
        own = torch.tensor([*self._sums.values()], dtype=torch.float64) / max(1, self._batches)
        means = dict(zip(self._sums, hvd.allreduce(own, name="metrics").tolist(), strict=True))
        groups: list[dict[str, float]] = [
            {name: value for name, value in means.items() if name.startswith(f"group_{number}_")}
            for number in range(len(self._groups))
        ]
        return {"loss": means["loss"], "all_metrics": groups}


def _writer(path: str) -> Any:
    """Return a writer of TensorBoard's events; None where TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(path)


def _log(writer: Any, entry: dict[str, Any]) -> None:
    for stage, key in (("train", "train"), ("val", "validation")):
        if key not in entry:
            continue
        writer.add_scalar(f"{stage}/loss", entry[key]["loss"], entry["epoch"])
        for number, group in enumerate(entry[key]["all_metrics"]):
            for name, value in group.items():
                writer.add_scalar(f"{stage}/{name}:{number}", value, entry["epoch"])
