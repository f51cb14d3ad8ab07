"""`TFNode`: the rows of a rank as a feed, and paths (rank)."""

from __future__ import annotations

import getpass
from collections.abc import Mapping, Sequence
from typing import Any

from tritium_compat.tensorflowonspark.feed import Manager

_SCHEMES = ("adl", "file", "hdfs", "oss", "s3", "s3a", "s3n", "swift", "viewfs", "wasb")


def hdfs_path(ctx: Any, path: str) -> str:
    """Return a path with a scheme: as it is, or in the default file system, relative ones in the user's directory."""
    if path.partition("://")[0] in _SCHEMES and "://" in path:
        return path
    if path.startswith("/"):
        return f"{ctx.defaultFS}{path}"
    if ctx.defaultFS.startswith(("hdfs://", "viewfs://")):
        return f"{ctx.defaultFS}/user/{getpass.getuser()}/{path}"
    if ctx.defaultFS.startswith("file://"):
        return f"{ctx.defaultFS}/{ctx.working_dir.lstrip('/')}/{path}"
    return f"{ctx.defaultFS}/{path}"


def start_cluster_server(ctx: Any, num_gpus: int = 1, rdma: bool = False) -> Any:
    """Refuse by name: it is TensorFlow 1's."""
    raise NotImplementedError(
        "TFNode.start_cluster_server is of TensorFlow 1. Use tf.distribute.MultiWorkerMirroredStrategy, for which "
        "TF_CONFIG is set."
    )


def export_saved_model(sess: Any, export_dir: str, tag_set: str, signatures: Any) -> None:
    """Refuse by name: it is TensorFlow 1's."""
    raise NotImplementedError(
        "TFNode.export_saved_model takes a session of TensorFlow 1. Use model.export(path), or "
        "tensorflowonspark.compat.export_saved_model."
    )


def release_port(ctx: Any) -> None:
    """Do nothing: TensorFlow takes over the port that Tritium holds for it."""


class DataFeed:
    """The rows of this rank: those that `cluster.train` or `cluster.inference` was given, dealt to all ranks."""

    def __init__(
        self,
        mgr: Manager | None,
        train_mode: bool = True,
        qname_in: str = "input",
        qname_out: str = "output",
        input_mapping: Mapping[str, str] | None = None,
    ) -> None:
        """Read rows.

        mgr : `ctx.mgr`.
        train_mode : makes no difference: there are no ends of partitions in a feed.
        input_mapping : column → name in the batch; a row's values are in the order of the sorted columns.
        """
        if mgr is None:
            raise ValueError(
                "There are no rows to be fed. Give input_mode=TFCluster.InputMode.SPARK to TFCluster.run, and an RDD "
                "to cluster.train."
            )
        if (qname_in, qname_out) != ("input", "output"):
            raise NotImplementedError(f"DataFeed(qname_in={qname_in!r}, qname_out={qname_out!r}): there is one feed.")
        self.mgr, self.train_mode = mgr, train_mode
        self.input_tensors = None if input_mapping is None else [name for _, name in sorted(input_mapping.items())]

    def next_batch(self, batch_size: int) -> Any:
        """Return the next rows: a list, or with `input_mapping` a dict of lists. Shorter, or empty, at the end."""
        rows = self.mgr.take(batch_size)
        if self.input_tensors is None:
            return rows
        return {name: [row[place] for row in rows] for place, name in enumerate(self.input_tensors)}

    def should_stop(self) -> bool:
        """Return whether the last row was taken."""
        return self.mgr.ended

    def batch_results(self, results: Sequence[Any]) -> None:
        """Give the results of the rows that were taken, one each, in their order."""
        self.mgr.give(results)

    def terminate(self) -> None:
        """Take no more rows."""
        self.mgr.end()
