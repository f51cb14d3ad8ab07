"""`TFCluster`: a function of TensorFlowOnSpark's in the ranks of a gang (driver)."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from tritium import Data, TensorFlow, world
from tritium.errors import BadSetting, TritiumWarning
from tritium.integration.spark import default_file_system
from tritium_compat import jobs
from tritium_compat.tensorflowonspark import feed
from tritium_compat.tensorflowonspark.TFSparkNode import context

_EPOCHS = 10  # of train(rdd, num_epochs=0), as there


class InputMode:
    """Where rows come from."""

    TENSORFLOW = 0
    """The function reads them."""
    SPARK = 1
    """An RDD, by `cluster.train` or `cluster.inference`."""


class TFCluster:
    """A function and its ranks. With InputMode.SPARK they are started when their rows are there, in `train`."""

    def __init__(self, sc: Any, call: Callable[..., list[Any]], input_mode: int) -> None:
        self.sc, self.input_mode = sc, input_mode
        self._call = call
        self._fed = False
        self._problem: BaseException | None = None
        self._thread: threading.Thread | None = None

    def train(self, dataRDD: Any, num_epochs: int = 0, feed_timeout: float = 600, qname: str = "input") -> None:
        """Run the function in every rank, with the rows of an RDD dealt to the ranks, `num_epochs` times (0: 10).

        Returns when it has returned everywhere. Raises RankFailed with what it raised.
        """
        if num_epochs < 0:
            raise BadSetting(f"cluster.train(num_epochs={num_epochs}): it must not be negative.", setting="num_epochs")
        self._feed("train", dataRDD, num_epochs or _EPOCHS, qname)

    def inference(self, dataRDD: Any, feed_timeout: float = 600, qname: str = "input") -> Any:
        """Run the function in every rank, and return an RDD of its results: one a row, in the order of the rows.

        The results travel through the driver.
        """
        answers = self._feed("inference", dataRDD, 1, qname, answers=True)
        parts: list[list[Any]] = [[] for _ in range(dataRDD.getNumPartitions())]
        for partition, _, result in sorted((one for part in answers for one in part), key=lambda one: one[:2]):
            parts[partition].append(result)
        return self.sc.parallelize(parts, len(parts)).flatMap(list)

    def _feed(self, whose: str, rdd: Any, epochs: int, qname: str, answers: bool = False) -> list[Any]:
        if self.input_mode != InputMode.SPARK:
            raise BadSetting(f"cluster.{whose} needs TFCluster.run(…, input_mode=TFCluster.InputMode.SPARK).")
        if qname != "input":
            raise BadSetting(f"cluster.{whose}(qname={qname!r}): there is one feed.", setting="qname")
        if not hasattr(rdd, "mapPartitionsWithIndex"):
            raise NotImplementedError(
                f"cluster.{whose} takes an RDD, not a {type(rdd).__name__}. DStreams are not fed: train on a DataFrame "
                "that foreachBatch gives, and score streams with a model's transformer."
            )
        if self._fed:
            raise NotImplementedError(
                f"cluster.{whose} was called a second time. A function is run once with its rows: give the union of "
                "the RDDs, or call TFCluster.run again."
            )
        self._fed = True
        frame = feed.frame(rdd, _session())
        rows = Data(frame, decode={"row": feed.unpacked}, shuffle=False)
        return self._call(epochs, answers, data={feed.NAME: rows})

    def start(self) -> None:
        """Run the function in a thread, which `shutdown` waits for."""

        def work() -> None:
            try:
                self._call(0, False)
            except BaseException as error:  # noqa: BLE001 - raised by shutdown
                self._problem = error

        self._thread = threading.Thread(target=work, name="tritium-tensorflowonspark", daemon=True)
        self._thread.start()

    def shutdown(self, ssc: Any = None, grace_secs: float = 0, timeout: float = 259200) -> None:
        """Wait for the function, and raise what it raised. The SparkContext goes on.

        timeout : seconds; -1 waits without end. Raises TimeoutError.
        """
        if ssc is not None:
            raise NotImplementedError("cluster.shutdown(ssc=…): DStreams are not fed.")
        if self._thread is not None:
            self._thread.join(timeout if timeout > 0 else None)
            if self._thread.is_alive():
                raise TimeoutError(
                    f"The function has not returned within {timeout} s. sc.cancelAllJobs() ends its ranks."
                )
        elif not self._fed:
            warnings.warn(
                "cluster.shutdown: the function was never run, as cluster.train was not called.",
                TritiumWarning,
                stacklevel=2,
            )
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem

    def tensorboard_url(self) -> None:
        """Return None: no TensorBoard is started."""


def run(
    sc: Any,
    map_fun: Callable[..., Any],
    tf_args: Any,
    num_executors: int,
    num_ps: int,
    tensorboard: bool = False,
    input_mode: int = InputMode.TENSORFLOW,
    log_dir: str | None = None,
    driver_ps_nodes: bool = False,
    master_node: str | None = None,
    reservation_timeout: float = 600,
    queues: Sequence[str] = ("input", "output", "error"),
    eval_node: bool = False,
    release_port: bool = True,
) -> TFCluster:
    """Return a cluster of `num_executors` ranks that call `map_fun(tf_args, ctx)`.

    num_ps : how many of them are parameter servers; then only the chief calls the function, see `TensorFlow`.
    master_node : what the first rank is called: "chief" or "master".
    reservation_timeout : seconds within which every rank must have started.
    """
    jobs.refuse(
        "TFCluster.run",
        {"driver_ps_nodes": driver_ps_nodes, "eval_node": eval_node},
        {
            "driver_ps_nodes": "parameter servers are ranks: raise num_executors by num_ps.",
            "eval_node": "it is for tf.estimator, which TensorFlow no longer has. Evaluate by fit(validation_data=…).",
        },
    )
    if num_ps and input_mode == InputMode.SPARK:
        raise BadSetting(
            f"TFCluster.run(num_ps={num_ps}) with InputMode.SPARK: rows are dealt to ranks that call the function, and "
            "with parameter servers only the chief does. Use num_ps=0 and MultiWorkerMirroredStrategy.",
            setting="num_ps",
        )
    if tensorboard:
        warnings.warn(
            f"TFCluster.run(tensorboard=True): none is started. Run tensorboard --logdir {log_dir or 'DIR'}.",
            TritiumWarning,
            stacklevel=2,
        )
    place = (master_node, file_system(sc), os.getcwd())

    def call(epochs: int, answers: bool, **settings: Any) -> list[Any]:
        return jobs.run(
            in_rank,
            num_executors,
            args=(map_fun, tf_args, epochs, answers, place),
            framework=TensorFlow(ps=num_ps),
            gpus=gpus(tf_args),
            start_timeout=float(reservation_timeout),
            spark=_session(),
            **settings,
        )

    cluster = TFCluster(sc, call, input_mode)
    if input_mode == InputMode.TENSORFLOW:
        cluster.start()
    return cluster


def in_rank(
    map_fun: Callable[..., Any], tf_args: Any, epochs: int, answers: bool, place: tuple[str | None, str, str]
) -> list[Any] | None:
    """Call the function, and return the results of its rows if there are to be any (rank)."""
    here = world()
    manager = feed.Manager(epochs) if epochs else None
    master_node, default_fs, home = place
    ctx = context(here.size, here.rank, master_node, manager, default_fs, home)
    if isinstance(tf_args, list):
        sys.argv = tf_args
    map_fun(tf_args, ctx)
    return manager.answered() if answers and manager is not None else None


def file_system(sc: Any) -> str:
    """Return Hadoop's default file system, without a slash at its end."""
    found = default_file_system(sc) or "file://"
    return found.rstrip("/") if found != "file:///" else "file://"


def gpus(tf_args: Any) -> int:
    """Return how many GPUs a rank has: as the arguments say, or one, where tasks of Spark have any."""
    return int(getattr(tf_args, "num_gpus", 1)) if jobs.gpus() else 0


def _session() -> Any:
    from pyspark.sql import SparkSession

    return SparkSession.builder.getOrCreate()
