"""`DistributedOptimizer`: gradients are averaged over the ranks while backward goes on (rank)."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tritium_compat.horovod.basics import Adasum, Average, ProcessSet, global_process_set
from tritium_compat.horovod.torch import ops
from tritium_compat.horovod.torch.compression import Compression
from tritium_compat.horovod.torch.gradients import Gradients
from tritium_compat.horovod.torch.ops import synchronize


class _Distributed:
    """What `DistributedOptimizer` adds to the class of the optimizer that it is given."""

    _gradients: Gradients
    _synchronized = False
    _should_synchronize = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set how many backward passes there are before a step."""
        self._gradients.passes = passes
        self._gradients.reset()

    def synchronize(self) -> None:
        """Wait until the gradients are the averages over all ranks."""
        self._gradients.synchronize()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step` within the block not synchronize, because `synchronize` was called before."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Any = None) -> Any:
        """Wait for the averages, and take a step."""
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). This can cause training slowdown. You may want to consider using "
                    "optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code.",
                    stacklevel=2,
                )
            self._gradients.synchronize()
        self._synchronized = False
        return super().step(closure)  # type: ignore[misc]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients. Raises AssertionError between backward and step."""
        if self._gradients.has_begun:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the state, and count backward passes from 0. Gradients on their way are forgotten."""
        self._gradients.forget()
        self._synchronized = False
        super().load_state_dict(state_dict)  # type: ignore[misc]


class _AdasumDistributed:
    """What `DistributedOptimizer(op=hvd.Adasum)` adds: each rank's own step is what is combined."""

    _compression: Any
    _passes = 1
    _passed = 0

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set after how many calls of `step` the ranks' changes are combined."""
        self._passes, self._passed = passes, 0

    def synchronize(self) -> None:
        """Do nothing: `step` combines."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raise AssertionError, as in Horovod."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        yield

    def step(self, closure: Any = None) -> Any:
        """Take this rank's own step, and replace it by the adaptive sum of all ranks' steps."""
        groups: Any = self.param_groups  # type: ignore[attr-defined]
        params = [p for group in groups for p in group["params"] if p.requires_grad]
        before = [param.detach().clone() for param in params]
        result = super().step(closure)  # type: ignore[misc]
        with torch.no_grad():
            handles = []
            for param, start in zip(params, before, strict=True):
                sent, context = self._compression.compress(param - start)
                handles.append((ops.allreduce_async_(sent, op=Adasum), context))
            for param, start, (handle, context) in zip(params, before, handles, strict=True):
                param.copy_(start + self._compression.decompress(synchronize(handle), context))
        return result


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: str = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return an optimizer whose `step` uses the average of all ranks' gradients, sent while backward goes on.

    It is of a class derived from that of `optimizer`, and shares its state and its groups of parameters.

    named_parameters : the model's, to be checked: every parameter of the optimizer must be among them.
    compression : `Compression.fp16` or `bf16` sends gradients in half the bytes.
    backward_passes_per_step : how many backward passes add to the gradients before a step.
    op : Average, Sum or Adasum.
    gradient_predivide_factor : by which gradients are divided before they are summed, and multiplied after it.
    groups : into how many parts the gradients are put, or lists of parameters that are sent as one.
    sparse_as_dense : whether sparse gradients are made dense before they are sent.
    """
    _check_named(optimizer, named_parameters)
    if num_groups:
        warnings.warn("Parameter `num_groups` has been replaced by `groups` and will be removed", stacklevel=2)
        groups = groups or num_groups
    _check_groups(groups)
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    kind = type(optimizer)
    if op == Adasum:
        if process_set.process_set_id != 0:
            raise NotImplementedError("Adasum does not support non-global process sets yet.")
        made: Any = object.__new__(type(kind.__name__, (_AdasumDistributed, kind), {}))
        made.__dict__ = optimizer.__dict__
        made._compression, made._passes = compression, backward_passes_per_step
        return made
    made = object.__new__(type(kind.__name__, (_Distributed, kind), {}))
    made.__dict__ = optimizer.__dict__
    made._gradients = Gradients(
        made,
        compression=compression,
        passes=backward_passes_per_step,
        op=op,
        predivide=gradient_predivide_factor,
        groups=groups,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    return made


def _check_named(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.nn.Parameter]] | None) -> None:
    if named is None:
        return
    given = list(named)
    if any(not isinstance(item, tuple) for item in given):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    if twice := [name for name, count in Counter(name for name, _ in given).items() if count > 1]:
        raise ValueError(
            f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(sorted(twice))}"
        )
    ids = {id(param) for _, param in given}
    missing = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in ids]
    if missing:
        shapes = ", ".join(str(tuple(param.shape)) for param in missing[:8])
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named: "
            f"{len(missing)} of the optimizer's, with the shapes {shapes}."
        )


def _check_groups(groups: Any) -> None:
    if groups is None:
        return
    if isinstance(groups, bool) or not (isinstance(groups, list) or (isinstance(groups, int) and groups > 0)):
        raise ValueError("groups should be a positive integer or a list of list of torch.Tensor.")
    if isinstance(groups, list):
        seen = set()
        for param in itertools.chain(*groups):
            if not isinstance(param, torch.Tensor):
                raise ValueError("groups must consist of torch.Tensor.")
            if id(param) in seen:
                raise ValueError("A parameter can only appear once in groups.")
            seen.add(id(param))
