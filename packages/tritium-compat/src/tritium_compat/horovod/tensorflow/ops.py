"""Horovod's collectives of TensorFlow's tensors, through which gradients flow (rank)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tritium_compat.horovod import arrays, context
from tritium_compat.horovod.basics import Average, ProcessSet, Sum, global_process_set
from tritium_compat.horovod.tensorflow.calls import collective, free_rows, same
from tritium_compat.horovod.tensorflow.compression import Compression
from tritium_compat.horovod.torch.ops import join as join
from tritium_compat.horovod.torch.ops import reduction


def _differentiable(forward: Callable[..., list[Any]], backward: Callable[..., Any], tensors: Sequence[Any]) -> Any:
    """Return what `forward` gives for the tensors, with `backward(gradients)` as its gradient."""
    if not tensors:
        return []

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def run(*given: Any) -> Any:
        return forward(given), lambda *gradients: backward([tf.convert_to_tensor(one) for one in gradients])

    return run(*[tf.convert_to_tensor(tensor) for tensor in tensors])


def _allreduce(tensors: Sequence[Any], name: str | None, scales: tuple[Any, ...]) -> list[Any]:
    op, before, after, process_set = scales

    def call(given: list[Any], name: str | None) -> list[Any]:
        return arrays.allreduce(given, name, op, before, after, process_set)

    def forward(given: Sequence[Any]) -> list[Any]:
        return collective(call, "Allreduce", given, same(given), name)

    def backward(gradients: list[Any]) -> list[Any]:
        return _allreduce(gradients, None, scales)

    return list(_differentiable(forward, backward, tensors))


def allreduce(
    tensor: Any,
    average: Any = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Return the average over all ranks, or what `op` says. Of tf.IndexedSlices, the rows of all ranks.

    device_dense, device_sparse, ignore_name_scope : have no effect: collectives go through the host's memory.
    Raises HorovodInternalError where ranks differ in it; within a tf.function tf.errors.UnknownError, which names it.
    """
    op = reduction(average, op)
    return reduce_all([tensor], name, op, prescale_factor, postscale_factor, process_set, compression)[0]


def grouped_allreduce(
    tensors: Sequence[Any],
    average: Any = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Return the averages of several tensors, which are sent as one."""
    op = reduction(average, op)
    return reduce_all(tensors, name, op, prescale_factor, postscale_factor, process_set, compression)


def reduce_all(
    tensors: Sequence[Any],
    name: str | None,
    op: str,
    before: float,
    after: float,
    process_set: ProcessSet,
    compression: Any,
) -> list[Any]:
    """Reduce dense tensors by one request, and sparse ones by another."""
    sparse = [n for n, tensor in enumerate(tensors) if isinstance(tensor, tf.IndexedSlices)]
    dense = [n for n in range(len(tensors)) if n not in sparse]
    found: list[Any] = [None] * len(tensors)
    if sparse:
        for n, slices in zip(sparse, _sparse([tensors[n] for n in sparse], name, op, process_set), strict=True):
            found[n] = slices
        if before * after != 1:
            raise NotImplementedError("prescale_factor and postscale_factor are not there for tf.IndexedSlices.")
    if dense:
        packed = [compression.compress(tf.convert_to_tensor(tensors[n])) for n in dense]
        results = _allreduce([tensor for tensor, _ in packed], name, (op, before, after, process_set))
        for n, result, (_, kind) in zip(dense, results, packed, strict=True):
            found[n] = compression.decompress(result, kind)
    return found


def _sparse(given: Sequence[Any], name: str | None, op: str, process_set: ProcessSet) -> list[Any]:
    if op not in (Average, Sum):
        raise NotImplementedError(
            f"op={op!r} of tf.IndexedSlices is not there: use hvd.Average or hvd.Sum, or make them dense before, by "
            "sparse_as_dense=True in DistributedOptimizer."
        )
    parts = [part for slices in given for part in (slices.values, slices.indices)]
    rows = grouped_allgather(parts, None if name is None else f"{name}.rows", process_set=process_set)
    size = process_set.size() if op == Average else 1
    return [
        tf.IndexedSlices(rows[2 * n] / tf.cast(size, rows[2 * n].dtype), rows[2 * n + 1], slices.dense_shape)
        for n, slices in enumerate(given)
    ]


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the tensors of all ranks, concatenated along their first dimension, which may differ."""
    return grouped_allgather([tensor], name, ignore_name_scope, process_set)[0]


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return several tensors of all ranks, each concatenated."""
    given = [tf.convert_to_tensor(tensor) for tensor in tensors]
    given = [tf.reshape(tensor, [1]) if tensor.shape.rank == 0 else tensor for tensor in given]

    def forward(given: Sequence[Any]) -> list[Any]:
        def call(each: list[Any], name: str | None) -> list[Any]:
            return arrays.allgather(each, name, process_set)

        return collective(call, "Allgather", given, free_rows(given), name)

    def backward(gradients: list[Any]) -> list[Any]:
        means = _allreduce(gradients, None, (Average, 1.0, 1.0, process_set))
        counts = allgather(tf.stack([tf.shape(tensor)[:1] for tensor in given], 1), process_set=process_set)
        place = process_set.rank()
        starts = tf.reduce_sum(counts[:place], 0)
        return [mean[starts[n] : starts[n] + counts[place, n]] for n, mean in enumerate(means)]

    return list(_differentiable(forward, backward, given))


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the tensor of `root_rank`."""

    def backward(gradients: list[Any]) -> Any:
        mean = _allreduce(gradients, None, (Average, 1.0, 1.0, process_set))[0]
        return mean if context.current().rank == root_rank else mean * 0

    return _differentiable(lambda given: send_all(given, root_rank, name, process_set), backward, [tensor])[0]


def send_all(tensors: Sequence[Any], root_rank: int, name: str | None, process_set: ProcessSet) -> list[Any]:
    """Return the tensors of `root_rank`, by one request."""

    def call(given: list[Any], name: str | None) -> list[Any]:
        return arrays.broadcast(given, root_rank, name, process_set)

    return collective(call, "Broadcast", tensors, same(tensors), name)


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the rows that came from all ranks; with `splits` also how many came from each."""
    given = tf.convert_to_tensor(tensor)
    counts = tf.zeros([0], tf.int32) if splits is None else tf.convert_to_tensor(splits)

    def forward(given: Sequence[Any]) -> list[Any]:
        def call(each: list[Any], name: str | None) -> list[Any]:
            return list(arrays.alltoall(each[0], each[1], name, process_set))

        outputs = [*free_rows(given[:1]), (tf.int32, tf.TensorShape([None]))]
        return collective(call, "Alltoall", given, outputs, name)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def run(rows: Any) -> Any:
        out, received = forward([rows, counts])

        def backward(gradient: Any, _: Any) -> Any:
            return alltoall(gradient, received, process_set=process_set)[0]

        return (out, received), backward

    out, received = run(given)
    return out if splits is None else (out, received)


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: Any = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Return this rank's part of the rows of the average, or sum, over all ranks."""
    scales = prescale_factor, postscale_factor
    return grouped_reducescatter([tensor], device_dense, compression, op, process_set, *scales, name=name)[0]


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[Any]:
    """Return this rank's parts of several tensors."""
    packed = [compression.compress(tf.convert_to_tensor(tensor)) for tensor in tensors]

    def forward(given: Sequence[Any]) -> list[Any]:
        def call(each: list[Any], name: str | None) -> list[Any]:
            return arrays.reducescatter(each, name, op, prescale_factor, postscale_factor, process_set)

        return collective(call, "Reducescatter", given, free_rows(given), name)

    def backward(gradients: list[Any]) -> list[Any]:
        factor = prescale_factor * postscale_factor * (process_set.size() if op == Sum else 1)
        gathered = grouped_allgather(gradients, process_set=process_set)
        return [part * tf.cast(factor, part.dtype) for part in gathered]

    results = _differentiable(forward, backward, [tensor for tensor, _ in packed])
    return [compression.decompress(result, kind) for result, (_, kind) in zip(results, packed, strict=True)]
