"""Gradients of Keras's back ends, reduced over the ranks (rank)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tritium_compat.horovod import arrays
from tritium_compat.horovod.basics import Min
from tritium_compat.horovod.options import Options


def reducer_for(backend: str, options: Options) -> Any:
    """Return what reduces gradients of "tensorflow", "torch" or "jax"."""
    if backend == "tensorflow":
        from tritium_compat.horovod.tensorflow.gradients import Reducer

        return Reducer(options)
    if backend not in ("torch", "jax"):
        raise NotImplementedError(
            f"Keras's back end {backend!r} trains no model. Set KERAS_BACKEND to tensorflow, torch or jax."
        )
    return _OfTorch(options) if backend == "torch" else _OfJax(options)


class _Dense:
    """Reduces dense gradients as its options say, but for those of variables that stay local."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._local: dict[int, Any] = {}

    def register_local_var(self, variable: Any) -> None:
        """Leave the gradients of this variable to this rank."""
        self._local[id(variable)] = variable

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients, reduced; None where one is None."""
        options, found = self.options, list(gradients)
        sent = [n for n, g in enumerate(found) if g is not None and id(variables[n]) not in self._local]
        if sent and not options.alone():
            parts = options.parts([variables[n] for n in sent])
            for number, part in enumerate(parts):
                packed = [options.compression.compress(found[sent[n]]) for n in part]
                name = options.name if len(parts) == 1 else f"{options.name}.{number}"
                means = self._means([tensor for tensor, _ in packed], name, options.op, *options.scales)
                for n, mean, (_, kind) in zip(part, means, packed, strict=True):
                    found[sent[n]] = options.compression.decompress(mean, kind)
        if options.scale_local_gradients and self._local:
            size = options.process_set.size()
            for n, gradient in enumerate(found):
                if gradient is not None and id(variables[n]) in self._local:
                    found[n] = gradient / size
        return found

    def all_ranks(self, flag: Any) -> Any:
        """Return whether the flag is set on all ranks."""
        if self.options.alone():
            return flag
        return self._means([self._number(flag)], f"{self.options.name}.finite", Min, 1.0, 1.0)[0] > 0

    def _number(self, flag: Any) -> Any:
        raise NotImplementedError

    def _means(self, tensors: Sequence[Any], name: str, op: str, before: float, after: float) -> Sequence[Any]:
        raise NotImplementedError


class _OfTorch(_Dense):
    def _number(self, flag: Any) -> Any:
        return flag.int()

    def _means(self, tensors: Sequence[Any], name: str, op: str, before: float, after: float) -> Sequence[Any]:
        from tritium_compat.horovod.torch import ops

        handle = ops.grouped_allreduce_async(tensors, None, name, op, before, after, self.options.process_set)
        result: list[Any] = ops.synchronize(handle)
        return result


class _OfJax(_Dense):
    def _number(self, flag: Any) -> Any:
        return flag.astype("int32")

    def _means(self, tensors: Sequence[Any], name: str, op: str, before: float, after: float) -> Sequence[Any]:
        import jax
        from jax.experimental import io_callback

        def call(*given: Any) -> tuple[Any, ...]:
            own = [np.asarray(one) for one in given]
            return tuple(arrays.allreduce(own, name, op, before, after, self.options.process_set))

        shapes = tuple(jax.ShapeDtypeStruct(one.shape, one.dtype) for one in tensors)
        result: Sequence[Any] = io_callback(call, shapes, *tensors)
        return result
