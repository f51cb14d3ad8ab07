"""The gradients of an optimizer's parameters, averaged over the ranks while backward goes on (rank)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tritium_compat.horovod.basics import Average, ProcessSet
from tritium_compat.horovod.torch import moves, ops
from tritium_compat.horovod.torch.ops import Handle, synchronize

_BUCKET = 25 << 20  # bytes of gradients that are sent as one, as DDP does
_FIRST_BUCKET = 1 << 20
_numbers = itertools.count()


class Bucket:
    """Parameters whose gradients are sent as one, once all of them are there."""

    def __init__(self, name: str, params: Sequence[torch.nn.Parameter]) -> None:
        self.name, self.params = name, list(params)
        self.arrived: set[torch.nn.Parameter] = set()
        self.sent: list[Callable[[], None]] = []
        """What waits for the averages, and puts them into the gradients."""

    @property
    def is_sent(self) -> bool:
        """Whether the gradients are on their way."""
        return bool(self.sent)


class Gradients:
    """Averages the gradients of an optimizer's parameters."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        compression: Any,
        passes: int,
        op: str,
        predivide: float,
        groups: Any,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self._optimizer, self._compression, self._op = optimizer, compression, op
        self._predivide, self._sparse_as_dense, self._process_set = predivide, sparse_as_dense, process_set
        self.passes = passes
        self._name = f"optimizer.{next(_numbers)}"
        self._bucket_of: dict[torch.nn.Parameter, Bucket] = {}
        self._buckets: list[Bucket] = []
        self._delay: dict[torch.nn.Parameter, int] = {}
        self._on = process_set.included() and process_set.size() > 1
        if self._on:
            self._add(self._new_params(), groups)

    def _new_params(self) -> list[torch.nn.Parameter]:
        """Return the parameters that need gradients and have no bucket, the last ones of the model first."""
        all_ = [p for group in self._optimizer.param_groups for p in group["params"] if p.requires_grad]
        return [p for p in reversed(all_) if p not in self._bucket_of]

    def _add(self, params: Sequence[torch.nn.Parameter], groups: Any = None) -> None:
        for part in _parts(params, groups):
            bucket = Bucket(f"{self._name}.{len(self._buckets)}", part)
            self._buckets.append(bucket)
            for param in part:
                self._bucket_of[param], self._delay[param] = bucket, self.passes
                hooked: Any = param
                hooked.register_post_accumulate_grad_hook(self._arrived)

    def _arrived(self, param: torch.nn.Parameter) -> None:
        bucket = self._bucket_of[param]
        if bucket.is_sent or self._delay[param] <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
                "backward_passes_per_step to accumulate gradients locally."
            )
        self._delay[param] -= 1
        if self._delay[param] == 0:
            bucket.arrived.add(param)
            if len(bucket.arrived) == len(bucket.params):
                self._send(bucket)

    @property
    def has_begun(self) -> bool:
        """Whether gradients are on their way, or wait to be sent."""
        return any(bucket.is_sent or bucket.arrived for bucket in self._buckets)

    def reset(self) -> None:
        """Count backward passes from 0."""
        self._delay = dict.fromkeys(self._delay, self.passes)
        for bucket in self._buckets:
            bucket.arrived.clear()

    def forget(self) -> None:
        """Forget what was sent, as after an error of a collective, and start over."""
        for bucket in self._buckets:
            bucket.sent = []
        self.reset()

    def synchronize(self) -> None:
        """Send what was not sent, zeros for gradients that are not there, and wait for all."""
        if not self._on:
            return
        if late := self._new_params():  # those that were frozen
            self._add(late)
        for bucket in self._buckets:
            if not bucket.is_sent:
                self._send(bucket)
        for bucket in self._buckets:
            waits, bucket.sent = bucket.sent, []
            for wait in waits:
                wait()
        self.reset()

    def _send(self, bucket: Bucket) -> None:
        dense = []
        for param in bucket.params:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            if not param.grad.is_sparse:
                dense.append(param)
            elif self._sparse_as_dense:
                bucket.sent.append(self._send_sparse_as_dense(bucket, param))
            else:
                bucket.sent.append(self._send_sparse(bucket, param))
        if dense:
            bucket.sent.append(self._send_dense(bucket, dense))

    def _send_dense(self, bucket: Bucket, params: Sequence[torch.nn.Parameter]) -> Callable[[], None]:
        gradients = [_gradient(param) for param in params]
        packed = [self._compression.compress(gradient) for gradient in gradients]
        sent = [tensor for tensor, _ in packed]
        before, after = (1 / self._predivide, self._predivide) if self._op == Average else (1.0, 1.0)
        handle: Handle = ops.start_allreduce(
            sent, sent, bucket.name, self._op, before, after, self._process_set, lambda _: sent
        )

        def wait() -> None:
            for gradient, tensor, (_, context) in zip(gradients, synchronize(handle), packed, strict=True):
                if tensor is not gradient:
                    gradient.copy_(self._compression.decompress(tensor, context))

        return wait

    def _send_sparse_as_dense(self, bucket: Bucket, param: torch.nn.Parameter) -> Callable[[], None]:
        place = next(i for i, other in enumerate(bucket.params) if other is param)
        sent, context = self._compression.compress(_gradient(param).to_dense())
        handle = ops.allreduce_async_(sent, None, f"{bucket.name}.{place}", self._op, process_set=self._process_set)

        def wait() -> None:
            mean = self._compression.decompress(synchronize(handle), context)
            param.grad = mean.to_sparse()  # optimizers for sparse gradients take no others

        return wait

    def _send_sparse(self, bucket: Bucket, param: torch.nn.Parameter) -> Callable[[], None]:
        place = next(i for i, other in enumerate(bucket.params) if other is param)
        name = f"{bucket.name}.{place}"
        result = moves.sparse_allreduce_async(_gradient(param), name, self._op, self._process_set)

        def wait() -> None:
            param.grad = result()

        return wait


def _gradient(param: torch.nn.Parameter) -> torch.Tensor:
    assert param.grad is not None
    return param.grad


def _parts(params: Sequence[torch.nn.Parameter], groups: Any) -> Iterator[list[torch.nn.Parameter]]:
    """Yield the parameters bucket by bucket."""
    if isinstance(groups, int):
        size = -(-len(params) // groups)
        yield from (list(params[start : start + size]) for start in range(0, len(params), size or 1))
        return
    given = [[p for p in params if any(p is one for one in group)] for group in groups or ()]
    yield from filter(None, given)
    rest = [p for p in params if not any(p is one for group in given for one in group)]
    for _, same in itertools.groupby(rest, key=lambda p: (p.dtype, p.device)):
        part: list[torch.nn.Parameter] = []
        size, limit = 0, _FIRST_BUCKET
        for param in same:
            own = param.numel() * param.element_size()
            if part and size + own > limit:
                yield part
                part, size, limit = [], 0, _BUCKET
            part.append(param)
            size += own
        yield part
