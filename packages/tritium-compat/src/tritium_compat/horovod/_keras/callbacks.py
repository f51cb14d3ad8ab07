"""What the callbacks of both fronts do (rank)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tritium_compat.horovod import arrays, context
from tritium_compat.horovod._keras.variables import broadcast, names_of, weights
from tritium_compat.horovod.basics import Average, Min, global_process_set


class Broadcast:
    """Gives all ranks the weights and optimizer state of one of them, once."""

    model: Any

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        """root_rank : whose values are sent. device : has no effect. local_variables : those that are not sent."""
        super().__init__()
        self.root_rank, self.broadcast_done = root_rank, False
        listed = [] if local_variables is None else local_variables
        self._local = {id(one): one for one in (listed if isinstance(listed, list | tuple | set) else [listed])}

    def register_local_var(self, var: Any) -> None:
        """Leave this variable as it is on each rank."""
        self._local[id(var)] = var

    def on_train_begin(self, logs: Any = None) -> None:
        """Send the values if the model is built on all ranks, so that they begin alike."""
        optimizer = self.model.optimizer
        if self.broadcast_done:
            return
        ready = np.array(int(bool(self.model.built) and hasattr(optimizer, "build")))
        if arrays.allreduce([ready], "hvd.callbacks.built", Min, 1.0, 1.0, global_process_set)[0]:
            if not getattr(optimizer, "built", getattr(optimizer, "_built", False)):
                optimizer.build(self.model.trainable_variables)
            self._send()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Send the values after the first step, in which a model is built that was not before."""
        if not self.broadcast_done:
            self._send()

    def _send(self) -> None:
        broadcast([one for one in weights(self.model) if id(one) not in self._local], self.root_rank)
        self.broadcast_done = True


class MetricAverage:
    """Averages the metrics of an epoch over all ranks, for the callbacks after this one too."""

    def __init__(self, device: str = "") -> None:
        """device : has no effect."""
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replace the metrics by their averages."""
        if not logs:
            return
        names = sorted(logs)
        own = np.array([float(logs[name]) for name in names])
        request = f"hvd.callbacks.metrics {', '.join(names)}"
        (means,) = arrays.allreduce([own], request, Average, 1.0, 1.0, global_process_set)
        logs.update(zip(names, means.tolist(), strict=True))


class LearningRateSchedule:
    """Multiplies the learning rate, from one epoch until another."""

    model: Any
    params: Mapping[str, Any]

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        """initial_lr : what is multiplied.

        multiplier : of the epoch; a number: to the power of the epochs since `start_epoch`.
        start_epoch, end_epoch : the first epoch, and that after the last one.
        staircase : at the beginning of each epoch; else at each batch, with fractions of epochs.
        momentum_correction : whether momentum goes on as if it had been gathered at the new learning rate.
        steps_per_epoch : where Keras does not know it.
        """
        super().__init__()
        if initial_lr is None:
            raise ValueError("Parameter `initial_lr` is required")
        self.initial_lr, self.start_epoch, self.end_epoch = initial_lr, start_epoch, end_epoch
        self.staircase, self.momentum_correction = staircase, momentum_correction
        self.steps_per_epoch, self.current_epoch = steps_per_epoch, 0
        self.multiplier: Callable[[float], float] = (
            multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        )
        self._momentum: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Find how many steps an epoch has."""
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ValueError(
                    f"Keras does not know how many steps an epoch has. Give steps_per_epoch= to "
                    f"{type(self).__name__}(), or to fit()."
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Remember the epoch."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the learning rate."""
        epoch = self.current_epoch
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if not self.staircase:
            self._set(epoch + batch / (self.steps_per_epoch or 1))
        elif batch == 0:
            self._set(epoch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Set the momentum of a legacy optimizer back."""
        if self._momentum is not None:
            self.model.optimizer.momentum, self._momentum = self._momentum, None

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Log the learning rate."""
        if logs is not None:
            logs["lr"] = float(np.asarray(names_of(self.model.optimizer).learning_rate))

    def _set(self, epoch: float) -> None:
        optimizer = names_of(self.model.optimizer)
        before, now = float(np.asarray(optimizer.learning_rate)), self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = now
        if not self.momentum_correction or before in (0, now) or not hasattr(optimizer, "momentum"):
            return
        if hasattr(optimizer, "_set_hyper"):  # a legacy optimizer, whose momentum is a variable
            self._momentum = float(np.asarray(optimizer.momentum))
            optimizer.momentum = self._momentum * now / before
            return
        # Keras's momentum is a constant of the compiled step; what it multiplies is not, and the product is the same.
        gathered = getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", None)
        for variable in gathered or ():
            variable.assign(variable * (now / before))


class LearningRateWarmup(LearningRateSchedule):
    """Raises the learning rate from `initial_lr / hvd.size()` to `initial_lr`, batch by batch."""

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        """initial_lr : the learning rate after `warmup_epochs`. verbose : 1 says when it is reached, on rank 0."""

        def multiplier(epoch: float) -> float:
            epoch += 1 / (self.steps_per_epoch or 1)  # round numbers at the end of each epoch
            size = context.current().size
            return 1 / size * (epoch * (size - 1) / warmup_epochs + 1)

        super().__init__(initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Log the learning rate, and say when the warmup is over."""
        super().on_epoch_end(epoch, logs)
        is_last = self.end_epoch is not None and epoch == self.end_epoch - 1
        if is_last and self.verbose > 0 and context.current().rank == 0:
            rate = float(np.asarray(names_of(self.model.optimizer).learning_rate))
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")  # noqa: T201


class BestModel:
    """Saves the best model, under a name that is given before training: by the attribute `filepath`."""

    filepath: Any
    save_weights_only: bool

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
    ) -> None:
        """See `keras.callbacks.ModelCheckpoint`."""
        options: dict[str, Any] = {"monitor": monitor, "verbose": verbose, "save_best_only": True, "mode": mode}
        name = "best.weights.h5" if save_weights_only else "best.keras"
        super().__init__(name, save_weights_only=save_weights_only, save_freq=save_freq, **options)  # type: ignore[call-arg]
        self.filepath = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Raise ValueError where no name was given."""
        if self.filepath is None:
            raise ValueError("BestModelCheckpoint has no filepath. Set callback.filepath = 'best.keras' before fit().")
        getattr(super(), "on_train_begin")(logs)  # noqa: B009
