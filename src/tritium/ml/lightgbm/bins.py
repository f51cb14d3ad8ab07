"""LightGBM's datasets of a rank's rows, with bins that are found in the rows of all ranks (rank)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import lightgbm
import numpy as np

from tritium.gang.rank.world import World
from tritium.ml.lightgbm.parameters import parameter
from tritium.ml.lightgbm.rows import ShardRows

Array = np.ndarray[Any, Any]
basic: Any = lightgbm.basic
_SAMPLE_ROWS = 200_000  # This is LightGBM's default.
_MOST_SAMPLE_BYTES = 128 << 20
_MOST_TRAFFIC_BYTES = 1 << 30  # The coordinator sends the sample to every rank.
_ZERO = 1e-35  # LightGBM takes a smaller number for zero.


def is_shared(params: dict[str, Any], width: int, counts: Sequence[int]) -> bool:
    """Return whether the sample in which bins are found is small enough to be sent to every rank."""
    size = min(sum(counts), _sample_rows(params)) * width * 8
    return len(counts) == 1 or (size <= _MOST_SAMPLE_BYTES and size * len(counts) <= _MOST_TRAFFIC_BYTES)


def training_set(
    rows: ShardRows, params: dict[str, Any], counts: Sequence[int], world: World, names: Sequence[str]
) -> lightgbm.Dataset:
    """Return the dataset of a rank's rows. All ranks call it, before they are connected where `is_shared`.

    With `is_shared` every rank finds the bins in the same sample: those that one process would find in all rows.
    Otherwise LightGBM lets each rank find the bins of some features, in its own rows.
    """
    shared = is_shared(params, rows.width, counts)
    total = sum(counts) if shared else rows.count
    share, seed = min(1.0, _sample_rows(params) / total), int(params["seed"])
    dataset = lightgbm.Dataset(None, params=dict(params))
    dataset._handle = _with_bins_of(
        _sample(rows, share, seed, world if shared else None), basic._param_dict_to_str(params), rows.count, total
    )
    _fill(dataset, rows)
    dataset.set_feature_name(list(names))
    return dataset


def validation_set(rows: ShardRows, reference: lightgbm.Dataset, params: dict[str, Any]) -> lightgbm.Dataset:
    """Return the dataset of a rank's rows to validate on, with the bins of `reference`."""
    dataset = lightgbm.Dataset(None, params=dict(params))
    dataset._init_from_ref_dataset(rows.count, reference._handle)  # type: ignore[arg-type]
    _fill(dataset, rows)
    return dataset


def _fill(dataset: lightgbm.Dataset, rows: ShardRows) -> None:
    for batch in rows.batches():
        dataset._push_rows(batch)
    dataset.set_label(rows.label)
    if (weight := rows.weight) is not None:
        dataset.set_weight(weight)
    if (sizes := rows.group_sizes) is not None:
        dataset.set_group(sizes)


def _sample_rows(params: dict[str, Any]) -> int:
    return int(parameter(params, "bin_construct_sample_cnt", _SAMPLE_ROWS))


def _sample(rows: ShardRows, share: float, seed: int, world: World | None) -> Array:
    """Return the features of about this share of the rows, of all ranks where `world` is given, sorted by id.

    A row is taken by a hash of its id, so the sample does not depend on the number of ranks.
    """
    ids = rows.ids
    chosen: slice | Array = slice(None) if share >= 1 else np.flatnonzero(_hashed(ids, seed) < share)
    ids, features = ids[chosen], rows.matrix(chosen)
    if world is not None and world.size > 1:
        parts = world.gather((ids, features))
        ids = np.concatenate([part[0] for part in parts])
        features = np.concatenate([part[1] for part in parts])
    return features if (ids[1:] > ids[:-1]).all() else features[np.argsort(ids, kind="stable")]


def _hashed(ids: Array, seed: int) -> Array:
    """Return a number in [0, 1) for each id: splitmix64 of it."""
    with np.errstate(over="ignore"):
        z = ids.astype(np.uint64) + np.uint64(seed % (1 << 32) + 1) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        fractions: Array = (z ^ (z >> np.uint64(31))) / 2.0**64
    return fractions


def _with_bins_of(sample: Array, params: str, rows: int, total: int) -> ctypes.c_void_p:
    """Return the handle of a dataset for `rows` rows, of `total` on all ranks, with the bins of the sample [k, width].

    LightGBM takes a sample column by column, without its zeros.
    """
    width = sample.shape[1]
    values, places = [], []
    for column in sample.T:
        present = np.flatnonzero((np.abs(column) > _ZERO) | np.isnan(column)).astype(np.int32)
        places.append(present)
        values.append(column[present].astype(np.float64))
    value_pointers = (ctypes.POINTER(ctypes.c_double) * width)()
    place_pointers = (ctypes.POINTER(ctypes.c_int32) * width)()
    for i in range(width):
        value_pointers[i] = values[i].ctypes.data_as(ctypes.POINTER(ctypes.c_double))
        place_pointers[i] = places[i].ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
    counts = np.array([len(present) for present in places], np.int32)
    handle = ctypes.c_void_p()
    basic._safe_call(
        basic._LIB.LGBM_DatasetCreateFromSampledColumn(
            value_pointers,
            place_pointers,
            ctypes.c_int32(width),
            counts.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            ctypes.c_int32(len(sample)),
            ctypes.c_int32(rows),
            ctypes.c_int64(total),
            params.encode(),
            ctypes.byref(handle),
        )
    )
    return handle
