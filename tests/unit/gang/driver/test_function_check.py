"""The variables that a function captures are inspected before anything starts; every finding names one."""

from __future__ import annotations

import functools
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tritium.errors import BadFunction
from tritium.gang.driver.function_check import inspect

LOCK = threading.Lock()
TABLE = np.zeros(3 << 20)  # 25 MB


class Trainer:
    def __init__(self, **facts: Any) -> None:
        self.__dict__.update(facts)

    def fit(self) -> None: ...

    def __call__(self) -> None: ...


def uses_the_lock() -> None:
    LOCK.acquire()


def uses_a_helper() -> None:
    uses_the_lock()


def uses_the_table() -> float:
    return float(TABLE.sum())


def on_the_first_gpu(model: Any) -> Any:
    def place(part: Any) -> Any:
        return part.to("cuda:0")

    return place(model)


def reason(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(BadFunction) as error:
        inspect(fn, args, kwargs)
    return str(error.value)


class TestWhatCannotBePickled:
    def test_a_variable_of_the_function_around_it(self) -> None:
        lock = threading.Lock()
        text = reason(lambda: lock.acquire())
        assert text.startswith("'lock' (a _thread.lock), which the lambda captures can't be pickled")
        assert "cannot pickle '_thread.lock' object. Make it inside the function" in text

    def test_a_global(self) -> None:
        assert reason(uses_the_lock).startswith("'LOCK' (a _thread.lock), which uses_the_lock() captures can't be")

    def test_a_global_of_a_helper(self) -> None:
        assert reason(uses_a_helper).startswith("'LOCK' (a _thread.lock), which uses_the_lock() captures can't be")

    def test_a_helper_within_the_function(self) -> None:
        lock = threading.Lock()

        def helper() -> None:
            lock.acquire()

        assert "'lock' (a _thread.lock), which helper() captures" in reason(lambda: helper())

    def test_a_default(self) -> None:
        def train(rate: float = 0.1, lock: Any = LOCK, *, other: int = 0) -> None: ...

        assert reason(train).startswith("'lock' (a _thread.lock), which train() captures")

    def test_an_attribute_of_a_method(self) -> None:
        trainer = Trainer(rate=0.1, lock=threading.Lock())
        assert reason(trainer.fit).startswith("'self.lock' (a _thread.lock), which Trainer.fit() captures")

    def test_an_attribute_of_a_callable_object(self) -> None:
        assert "'self.lock' (a _thread.lock)" in reason(Trainer(lock=threading.Lock()))

    def test_an_argument_and_a_partial(self) -> None:
        lock = threading.Lock()
        assert reason(print, 1, lock).startswith("'args[1]' (a _thread.lock) can't be pickled")
        assert reason(print, file=lock).startswith("\"kwargs['file']\" (a _thread.lock) can't be pickled")
        assert reason(functools.partial(print, end=lock)).startswith("'end' (a _thread.lock), which print() captures")
        assert reason(functools.partial(uses_the_lock)).startswith("'LOCK' (a _thread.lock)")

    def test_deep_in_containers_and_objects(self) -> None:
        settings = {"pools": [Trainer(), Trainer(guard=threading.Lock())]}
        assert reason(print, settings).startswith("\"args[0]['pools'][1].guard\" (a _thread.lock)")

    def test_a_socket(self) -> None:
        with socket.socket() as line:
            assert "'line' (a socket.socket), which the lambda captures" in reason(lambda: line.fileno())

    def test_an_object_that_refuses_in_its_own_way(self) -> None:
        class Stubborn:
            def __reduce__(self) -> Any:
                raise ZeroDivisionError("no")

        it = Stubborn()
        assert f"'it' (a {Stubborn.__module__}." in reason(lambda: it)
        assert "can't go to the ranks: no." in reason(lambda: it)


class TestSpark:
    """Without a JVM: the classes are found by name, in the modules that pyspark gives them."""

    @pytest.fixture
    def session(self) -> Any:
        from pyspark.sql.classic.dataframe import DataFrame
        from pyspark.sql.connect.session import SparkSession as ConnectSession
        from pyspark.sql.session import SparkSession

        return {
            "frame": DataFrame.__new__(DataFrame),
            "connect": ConnectSession.__new__(ConnectSession),
            "spark": SparkSession.__new__(SparkSession),
        }

    def test_a_session_in_a_closure(self, session: Any) -> None:
        spark = session["spark"]
        text = reason(lambda: spark.range(3))
        assert text.startswith("'spark' (a SparkSession), which the lambda captures can't go to the ranks.")
        assert "pass a DataFrame as data=" in text

    def test_a_connect_session(self, session: Any) -> None:
        connect = session["connect"]
        assert reason(lambda: connect.range(3)).startswith("'connect' (a SparkSession)")

    def test_a_frame_in_a_container_and_an_attribute(self, session: Any) -> None:
        frame = session["frame"]
        text = reason(print, [1, frame])
        assert text.startswith("'args[1]' (a DataFrame)") is False
        assert text.startswith("'args[0][1]' (a DataFrame) can't go to the ranks.")
        assert 'data={"train": df}' in text
        assert "tritium.world().shard" in text
        assert reason(print, frames={"train": frame}).startswith("\"kwargs['frames']['train']\" (a DataFrame)")
        assert reason(Trainer(frame=frame).fit).startswith("'self.frame' (a DataFrame), which Trainer.fit() captures")
        assert reason(print, Trainer(frame=frame)).startswith("'args[0].frame' (a DataFrame)")
        assert "'frame' (a DataFrame), which train() captures" in reason(_with_default(frame))

    def test_in_a_helper_of_a_helper(self, session: Any) -> None:
        spark = session["spark"]

        def inner() -> Any:
            return spark.range(3)

        def outer() -> Any:
            return inner()

        assert reason(lambda: outer()).startswith("'spark' (a SparkSession), which inner() captures")

    @pytest.fixture
    def accumulator(self) -> Iterator[Any]:
        from pyspark import accumulators

        yield accumulators.Accumulator(0, 0, accumulators.AddingAccumulatorParam(0))
        del accumulators._accumulatorRegistry[0]

    def test_an_accumulator_however_deep(self, accumulator: Any) -> None:
        """It can be pickled, and what a rank adds is lost: on the driver it stays 0."""

        def loss(x: int) -> None:
            accumulator.add(x)

        said = "'accumulator' (an Accumulator), which loss() captures can't go to the ranks. What a rank adds"
        assert reason(loss).startswith(said)
        assert reason(lambda: loss(1)).startswith(said)
        settings = Trainer(metrics={"count": [Trainer(loss=loss)]})  # as an estimator's
        assert reason(print, settings).startswith(said)
        assert reason(print, [[[{1: accumulator}]]]).startswith("'args[0][0][0][0][1]' (an Accumulator)")
        assert ": it holds an Accumulator. What a rank adds" in reason(print, [[[[[[[[[accumulator]]]]]]]]])

    def test_a_function_that_only_spark_can_call(self) -> None:
        def wrapper(x: int) -> int:
            return x

        vars(wrapper).update(evalType=100, returnType="int", func=wrapper)  # as `udf` makes it, with a session
        text = reason(lambda: wrapper(1))
        assert text.startswith(
            "'wrapper' (a function), which the lambda captures can't go to the ranks. Only Spark can"
        )

    def test_what_holds_an_object_of_the_jvm(self) -> None:
        from py4j.java_gateway import JavaObject
        from pyspark.sql.classic.column import Column

        column: Any = Column.__new__(Column)
        java = JavaObject.__new__(JavaObject)
        vars(column)["_jc"] = java
        text = "(a Column), which the lambda captures can't go to the ranks. It is in Spark's JVM, which the driver"
        assert text in reason(lambda: column)
        assert "'java' (a py4j.java_gateway.JavaObject)" in reason(lambda: java)

    def test_plain_values_of_sparks(self) -> None:
        from pyspark import StorageLevel
        from pyspark.ml.linalg import Vectors
        from pyspark.sql import Row
        from pyspark.sql.types import LongType, StructType

        values = (Row(a=1), Vectors.dense([1.0]), StructType().add("a", LongType()), StorageLevel.MEMORY_ONLY)
        assert inspect(print, values) == []


def _with_default(frame: Any) -> Callable[..., Any]:
    def train(frame: Any = frame) -> None: ...

    return train


class LeavesItBehind(Trainer):
    """A class that is picklable in spite of what it holds on the driver."""

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key not in ("spark", "lock")}


def test_what_an_object_leaves_behind_is_not_looked_at() -> None:
    from pyspark.sql.session import SparkSession

    spark = SparkSession.__new__(SparkSession)
    trainer = LeavesItBehind(spark=spark, lock=threading.Lock(), table=np.zeros(3 << 20))
    (warning,) = inspect(print, (trainer,))
    assert warning.startswith("'args[0]' (a ")
    assert "LeavesItBehind) is 25 MB" in warning


class TestWarnings:
    def test_nothing_to_say(self) -> None:
        rate = 0.1
        assert inspect(lambda: rate, (1, "two"), {"three": [3]}) == []
        assert inspect(print) == []
        assert inspect(Trainer(rate=1).fit) == []

    def test_a_hard_coded_gpu_in_nested_code(self) -> None:
        (warning,) = inspect(on_the_first_gpu)
        line = on_the_first_gpu.__code__.co_firstlineno + 2
        assert warning.startswith(f"on_the_first_gpu() names 'cuda:0' (line {line}): all ranks of a host would share")
        assert "tritium.world().device" in warning
        (warning,) = inspect(lambda: on_the_first_gpu(None))
        assert warning.startswith("on_the_first_gpu() names 'cuda:0'")

    def test_a_sentence_about_a_gpu_is_none(self) -> None:
        def train() -> None:
            """Once ran on cuda:0."""

        assert inspect(train) == []

    def test_what_is_larger_than_ten_megabytes(self) -> None:
        (warning,) = inspect(uses_the_table)
        assert warning.startswith(
            "'TABLE' (a numpy.ndarray), which uses_the_table() captures is 25 MB, sent with every"
        )
        assert "Rows belong in data=" in warning
        (warning,) = inspect(print, ([b"x" * (11 << 20)],))
        assert warning.startswith("'args[0]' (a list) is 12 MB")
        assert inspect(print, (np.zeros(1 << 20),)) == []

    def test_a_model_on_a_gpu(self) -> None:
        torch = pytest.importorskip("torch")
        from torch._subclasses.fake_tensor import FakeTensorMode

        from tritium.closures import Capture
        from tritium.gang.driver.function_check import _on_gpu

        with FakeTensorMode():  # tensors that say they are on a GPU, on a machine that has none
            model = torch.nn.Linear(2, 2, device="cuda")
        warning = _on_gpu(Capture("net", model, "train()"))
        assert warning is not None
        assert warning.startswith("'net' (a torch.nn.modules.linear.Linear), which train() captures is on cuda:0")
        assert inspect(print, (torch.nn.Linear(2, 2),)) == []
        assert inspect(print, (torch.nn.Linear(2, 2, device="meta"),)) == []


def test_a_module_that_ranks_import_is_not_looked_into(tmp_path: Path) -> None:
    """`py_files=` and installed modules go by reference: their globals don't travel."""
    tmp_path.joinpath("installed.py").write_text(
        "import threading\nLOCK = threading.Lock()\ndef train():\n    with LOCK:\n        return 'cuda:0'\n"
    )
    program = f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import installed
        from tritium.errors import BadFunction
        from tritium.gang.driver.function_check import inspect
        assert inspect(installed.train, (), {{}}, [{str(tmp_path)!r}]) == []
        try:
            inspect(installed.train)
        except BadFunction as error:
            assert "'LOCK' (a _thread.lock), which train() captures" in str(error), error
        else:
            raise AssertionError("by value, the lock travels")
        assert not {{"torch", "pyspark"}} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=60)
