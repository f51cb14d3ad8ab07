"""Petastorm's readers: a data set that Petastorm 0.13.1 wrote (data/write_petastorm.py), and plain Parquet files."""

from __future__ import annotations

import importlib.util
import itertools
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tritium.compat.petastorm import TransformSpec, codecs, make_batch_reader, make_reader, stored_schema
from tritium.compat.petastorm import predicates as P
from tritium.compat.petastorm.errors import DecodeFieldError, NoDataAvailableError, PetastormMetadataError
from tritium.compat.petastorm.ngram import NGram
from tritium.compat.petastorm.transform import edit_field
from tritium.compat.petastorm.unischema import Unischema, UnischemaField, dict_to_spark_row
from tritium.compat.petastorm.weighted_sampling_reader import WeightedSamplingReader
from tritium.errors import TritiumWarning

DATA = Path(__file__).with_name("data")
WRITTEN = f"file://{DATA}/petastorm"


def script() -> ModuleType:
    """Return the script that wrote the data set."""
    spec = importlib.util.spec_from_file_location("write_petastorm", DATA / "write_petastorm.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def same(found: Any, wanted: Any, name: str) -> bool:
    """Return whether a value is what was written; of a JPEG, nearly."""
    if name == "jpeg":
        return found.shape == wanted.shape and np.abs(found.astype(int) - wanted).mean() < 15
    if isinstance(wanted, np.ndarray):
        return found.dtype == wanted.dtype and np.array_equal(found, wanted)
    return bool(found == np.datetime64(wanted) if name == "time" else found == wanted)


@pytest.mark.parametrize("pool", ["thread", "dummy"])
def test_what_petastorm_wrote_is_read(pool: str) -> None:
    module = script()
    with make_reader(WRITTEN, reader_pool_type=pool) as reader:
        assert dict(reader.schema.fields) == dict(module.schema(codecs, module_of(UnischemaField)).fields)
        found = sorted(reader, key=lambda row: row.id)
    assert type(found[0]).__name__ == "Everything_view"
    for row, wanted in zip(found, module.rows(), strict=True):
        wrong = [name for name, value in row._asdict().items() if not same(value, wanted[name], name)]
        assert not wrong, (row, wanted)
    assert isinstance(found[1].float, np.float32)
    assert found[0].long_or_none is None


def module_of(thing: Any) -> Any:
    return importlib.import_module(thing.__module__)


def test_a_schema_can_be_stored_and_names_petastorms_classes() -> None:
    pytest.importorskip("pyspark")
    schema = script().schema(codecs, module_of(UnischemaField))
    stored = stored_schema.dumps(schema)
    assert b"tritium" not in stored
    again = stored_schema.loads(stored)
    assert again.fields == schema.fields
    assert str(again.fields["jpeg"].codec) == "CompressedImageCodec('jpeg', 90)"
    assert str(again) == str(schema)


class Calls:
    def __reduce__(self) -> Any:
        return print, ("run by a data set",)


def test_a_data_set_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for stored in (pickle.dumps(Calls()), pickle.dumps({"a": Calls()}, 2), b"cos\nsystem\n(S'true'\ntR."):
        with pytest.raises(PetastormMetadataError, match="which a Unischema is not made of"):
            stored_schema.loads(stored)
    with pytest.raises(PetastormMetadataError, match="is a dict"):
        stored_schema.loads(pickle.dumps({}))
    assert capsys.readouterr().out == ""

    class Own(codecs.NdarrayCodec):
        pass

    with pytest.raises(PetastormMetadataError, match="'a' has a codec of your own, Own"):
        stored_schema.dumps(Unischema("S", [UnischemaField("a", np.int32, (1,), Own())]))


@pytest.fixture(scope="module")
def rides(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the URL of 3 files of 40, 30 and 20 rows in row groups of 10."""
    place = tmp_path_factory.mktemp("rides")
    start = 0
    for number, rows in enumerate((40, 30, 20)):
        ids = np.arange(start, start + rows)
        table = pa.table(
            {
                "id": ids,
                "temperature": (ids / 2).astype(np.float32),
                "hours": pa.array([[i, i + 1, i + 2] for i in ids.tolist()], pa.list_(pa.float64())),
                "city": [f"city {i % 3}" for i in ids.tolist()],
                "count": pa.array([None if i % 10 == 0 else i for i in ids.tolist()], pa.int64()),
            }
        )
        pq.write_table(table, place / f"part-{number}.parquet", row_group_size=10)
        start += rows
    (place / "_SUCCESS").touch()
    return f"file://{place}"


def ids(url: Any, **settings: Any) -> list[int]:
    with make_batch_reader(url, ["id"], **settings) as reader:
        return [int(i) for batch in reader for i in batch.id]


def test_batches_are_row_groups_as_arrays(rides: str) -> None:
    with make_batch_reader(rides, shuffle_row_groups=False) as reader:
        assert reader.batched_output
        assert list(reader.schema.fields) == ["id", "temperature", "hours", "city", "count"]
        batches = list(reader)
        assert reader.last_row_consumed
    assert len(batches) == 9
    first = batches[0]
    assert first.id.tolist() == list(range(10))
    assert first.temperature.dtype == np.float32
    assert (first.hours.shape, first.hours.dtype) == ((10, 3), np.float64)
    assert first.hours[4].tolist() == [4, 5, 6]
    assert first.city.dtype.kind == "U"
    assert np.isnan(first.count[0])
    assert first.count[1] == 1.0


def test_order_follows_from_the_seed(rides: str) -> None:
    shuffled = ids(rides, seed=1, shuffle_rows=True, num_epochs=2)
    assert shuffled == ids(rides, seed=1, shuffle_rows=True, num_epochs=2, workers_count=1, reader_pool_type="dummy")
    assert sorted(shuffled[:90]) == sorted(shuffled[90:]) == list(range(90))
    assert shuffled[:90] != shuffled[90:]
    assert shuffled != ids(rides, seed=2, shuffle_rows=True, num_epochs=2)
    groups = ids(rides, seed=1)
    assert groups != list(range(90))
    assert groups[:10] == list(range(groups[0], groups[0] + 10))
    parts = ids(rides, seed=1, shuffle_row_drop_partitions=3)
    assert sorted(parts) == list(range(90))
    assert parts[:10] != list(range(parts[0], parts[0] + 10))


@pytest.mark.parametrize("shards", [1, 2, 4, 7, 9, 13, 100])
def test_shards_are_equal_and_cover_all(rides: str, shards: int) -> None:
    found = [ids(rides, cur_shard=shard, shard_count=shards) for shard in range(shards)]
    each = -(-90 // shards)
    assert {len(shard) for shard in found} == {each}
    everything = sorted(itertools.chain(*found))
    assert set(everything) == set(range(90))
    assert len(everything) - 90 < shards


def test_shards_as_petastorm_has_them(rides: str) -> None:
    found = [ids(rides, cur_shard=s, shard_count=2, equal_shards=False, shuffle_row_groups=False) for s in (0, 1)]
    assert [len(shard) for shard in found] == [50, 40]
    assert found[1][:20] == [*range(10, 20), *range(30, 40)]
    with pytest.raises(NoDataAvailableError, match="There are 9 row groups for 10 shards"):
        ids(rides, cur_shard=0, shard_count=10, equal_shards=False)
    small = P.in_lambda(["id"], lambda column: column < 25)
    assert sorted(ids(rides, cur_shard=0, shard_count=2, predicate=small)) == [*range(10), *range(20, 25)]
    for wrong in ((None, 2), (2, 2), (0, None), (True, 2)):
        with pytest.raises(ValueError, match=r"Pass hvd.rank\(\) and hvd.size\(\)"):
            ids(rides, cur_shard=wrong[0], shard_count=wrong[1])


def test_endless_and_again(rides: str) -> None:
    with make_batch_reader(rides, ["id"], num_epochs=None) as reader:
        assert len(list(itertools.islice(reader, 30))) == 30
        with pytest.raises(NotImplementedError, match="after all rows have been read"):
            reader.reset()
    with pytest.raises(RuntimeError, match="has been stopped"):
        next(reader)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tritium-reader")]
    with make_batch_reader(rides, ["id"]) as reader:
        assert len(list(reader)) == len(list(reader)) + 9 == 9
        reader.reset()
        assert len(list(reader)) == 9
    nothing = P.in_set([-1], "id")
    with make_batch_reader(rides, num_epochs=None, predicate=nothing) as reader, pytest.raises(NoDataAvailableError):
        next(reader)


def test_memory_ahead_is_bounded(rides: str) -> None:
    with make_batch_reader(rides, num_epochs=None, workers_count=2, results_queue_size=3) as reader:
        next(reader)
        assert len(reader._prefetch._waiting) <= 3


def test_predicates_and_filters(rides: str) -> None:
    assert ids(rides, predicate=P.in_set({3, 33}, "id"), shuffle_row_groups=False) == [3, 33]
    either = P.in_reduce([P.in_set({3}, "id"), P.in_lambda(["id"], lambda column: column > 88)], any)
    assert ids(rides, predicate=either, shuffle_row_groups=False) == [3, 89]
    assert len(ids(rides, predicate=P.in_negate(either))) == 88
    halves = [P.in_pseudorandom_split([0.5, 0.5], half, "id") for half in (0, 1)]
    first, second = (set(ids(rides, predicate=half)) for half in halves)
    assert first | second == set(range(90))
    assert not first & second
    assert 25 < len(first) < 65
    with make_batch_reader(rides, ["city"], filters=[("id", "<", 12)], shuffle_row_groups=False) as reader:
        assert [len(batch.city) for batch in reader] == [10, 2]
    with make_batch_reader(rides, predicate=P.in_intersection([88], "hours")) as reader:
        assert sorted(np.concatenate([batch.id for batch in reader])) == [86, 87, 88]
    with make_reader(WRITTEN, predicate=P.in_lambda(["id", "flag"], lambda i, flag: i > 2 and flag)) as rows:
        assert sorted(row.id for row in rows) == [3, 5]
    with pytest.raises(ValueError, match="returns bool of the shape"):
        ids(rides, predicate=P.in_lambda(["id"], lambda column: np.array(True)))
    with pytest.raises(ValueError, match=r"The predicate needs the field 'idd'. Did you mean 'id'"):
        ids(rides, predicate=P.in_set({1}, "idd"))


def test_transforms(rides: str) -> None:
    def of_frame(frame: Any) -> Any:
        frame["image"] = [np.full((2, 3), value, np.float32) for value in frame.temperature]
        return frame[["id", "image"]]

    spec = TransformSpec(of_frame, [edit_field("image", np.float32, (2, 3), False)], selected_fields=["image", "id"])
    with make_batch_reader(rides, transform_spec=spec, shuffle_row_groups=False) as reader:
        batch = next(reader)
        assert batch._fields == ("image", "id")
        assert (batch.image.shape, batch.image.dtype) == ((10, 2, 3), np.float32)
        assert batch.image[3, 0, 0] == 1.5
    with make_batch_reader(rides, transform_spec=TransformSpec(removed_fields=["hours", "count"])) as reader:
        assert next(reader)._fields == ("id", "temperature", "city")
    with (
        make_batch_reader(rides, transform_spec=TransformSpec(of_frame)) as reader,
        pytest.raises(ValueError, match="omits by removed_fields="),
    ):
        next(reader)

    def of_row(row: dict[str, Any]) -> dict[str, Any]:
        return {"sum": row["matrix"].sum(), "id": row["id"]}

    chosen = TransformSpec(of_row, [edit_field("sum", np.float32, ())], removed_fields=["matrix"])
    with make_reader(WRITTEN, ["id", "matrix"], transform_spec=chosen) as rows:
        found = {int(row.id): row.sum for row in rows}
    assert found[2] == script().rows()[2]["matrix"].sum()


def test_fields_by_regular_expression_and_ngrams(rides: str) -> None:
    with make_reader(WRITTEN, ["id", ".*_or_none"]) as reader:
        assert next(reader)._fields == ("id", "long_or_none", "text_or_none", "array_or_none")
    with pytest.raises(RuntimeError, match="No field matches"):
        make_batch_reader(rides, ["i"])
    plain = {"shuffle_row_groups": False, "reader_pool_type": "dummy"}
    with pytest.warns(UserWarning, match="has no Unischema"):
        rows = make_reader(rides, NGram({0: ["id", "city"], 1: ["temp.*"]}, 1, "id"), **plain)
    with rows:
        windows = list(rows)
    assert len(windows) == 9 * 9  # none over the border of a row group
    assert windows[0][0]._fields == ("id", "city")
    assert (windows[0][0].id, windows[0][1].temperature) == (0, 0.5)
    with pytest.warns(UserWarning, match="has no Unischema"):
        rows = make_reader(rides, NGram({-1: ["id"], 0: ["id"]}, 1, "id", timestamp_overlap=False), **plain)
    with rows:
        assert [int(window[-1].id) for window in rows][:5] == [0, 2, 4, 6, 8]
    with pytest.raises(NotImplementedError, match="An NGram is of rows"):
        make_batch_reader(rides, NGram({0: ["id"]}, 1, "id"))


def test_partition_columns_and_lists_of_files(tmp_path: Path) -> None:
    for year, month in ((2019, "a b"), (2020, "c"), (2020, "d")):
        place = tmp_path / f"year={year}" / f"month={month.replace(' ', '%20')}"
        place.mkdir(parents=True)
        pq.write_table(pa.table({"x": [1.0, 2.0]}), place / "0.parquet")
    url = f"file://{tmp_path}"
    with make_batch_reader(url, shuffle_row_groups=False) as reader:
        first, *_ = batches = list(reader)
    assert (first.year.tolist(), first.month.tolist(), first.x.tolist()) == ([2019, 2019], ["a b", "a b"], [1.0, 2.0])
    assert len(batches) == 3
    with make_batch_reader(url, ["x"], predicate=None, filters=[("year", "=", 2020)]) as reader:
        assert len(list(reader)) == 2
    only = P.in_lambda(["year"], lambda year: year == 2019)
    with make_batch_reader(url, ["year", "month"], predicate=only) as reader:
        assert [batch.month.tolist() for batch in reader] == [["a b", "a b"]]
    files = sorted(f"file://{path}" for path in tmp_path.rglob("*.parquet"))
    with make_batch_reader(files[1:]) as reader:
        assert next(reader)._fields == ("x",)


def test_mixed_readers(rides: str) -> None:
    first, second = make_batch_reader(rides, ["id"], num_epochs=None), make_batch_reader(rides, ["id"], num_epochs=None)
    with WeightedSamplingReader([first, second], [0, 1]) as reader:
        assert len(next(reader).id) == 10
        assert not reader.last_row_consumed


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda u: make_batch_reader(u, epochs=2), TypeError, "has no argument 'epochs'. Did you mean 'num_epochs'?"),
        (
            lambda u: make_batch_reader(u, num_epochs=0),
            ValueError,
            "num_epochs=0: it must be a whole number of at least 1",
        ),
        (lambda u: make_batch_reader(u, rowgroup_selector=1), NotImplementedError, "Use filters="),
        (lambda u: make_batch_reader(u, reader_pool_type="x"), ValueError, "reader_pool_type='x'"),
        (lambda u: make_batch_reader(u, schema_fields="id"), ValueError, "a list of fields"),
        (lambda u: make_batch_reader(u + "/no"), FileNotFoundError, "no data set at"),
        (lambda u: make_batch_reader(u.removeprefix("file://")), ValueError, "has no scheme. Write file:///"),
        (lambda u: make_batch_reader([]), ValueError, "The list of files is empty"),
        (lambda u: make_batch_reader(u, predicate=len), ValueError, "it must be a PredicateBase"),
        (lambda u: TransformSpec(removed_fields=[], selected_fields=[]), ValueError, "not both"),
    ],
)
def test_wrong_arguments(rides: str, call: Callable[[str], Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error) as caught:
        call(rides)
    assert says in str(caught.value)


def test_what_is_not_needed_is_said(rides: str) -> None:
    with pytest.warns(TritiumWarning, match="reader_pool_type='process' is not needed: threads load the rows"):
        make_batch_reader(rides, reader_pool_type="process").stop()
    with pytest.warns(UserWarning, match="read it by make_reader"):
        make_batch_reader(WRITTEN, ["id"]).stop()


def test_bad_data_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [[1], [1, 2]], "b": [1, 2]}), tmp_path / "0.parquet")
    url = f"file://{tmp_path}"
    with make_batch_reader(url) as reader, pytest.raises(ValueError, match="'a' have different lengths \\(1, 2\\)"):
        next(reader)
    with make_batch_reader(url, ["b"]) as reader:
        assert next(reader).b.tolist() == [1, 2]
    (tmp_path / "1.parquet").write_bytes(b"nothing")
    with pytest.raises(pa.ArrowInvalid, match=r"1.parquet is not a Parquet file"):
        make_batch_reader(url, cur_shard=0, shard_count=1)
    field = UnischemaField("a", np.int32, (2,), codecs.NdarrayCodec())
    schema = Unischema("S", [field])
    pq.write_table(pa.table({"a": [b"no array"]}), tmp_path / "1.parquet")
    (tmp_path / "0.parquet").unlink()
    entries = {stored_schema.UNISCHEMA_KEY: stored_schema.dumps(schema)}
    pq.write_metadata(pa.schema([pa.field("a", pa.binary())], metadata=entries), tmp_path / "_common_metadata")
    with make_reader(url) as rows, pytest.raises(DecodeFieldError, match=r"'a' can't be decoded by NdarrayCodec\(\)"):
        next(rows)
    with pytest.raises(ValueError, match="'a' takes the shape \\(2,\\); the array has \\(3,\\)"):
        dict_to_spark_row(schema, {"a": np.zeros(3, np.int32)})
    with pytest.raises(ValueError, match="'a' takes int32; the array has int64"):
        dict_to_spark_row(schema, {"a": np.zeros(2, np.int64)})
    with pytest.raises(ValueError, match="has no field 'a'"):
        dict_to_spark_row(schema, {})
