"""`TFNodeContext`: what a function of TensorFlowOnSpark's knows of its place (rank)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from tritium_compat.tensorflowonspark import TFNode

_WORKERS = ("chief", "master", "worker")


class TFNodeContext:
    """The place of a rank in the cluster. Functions get it as their second argument, `ctx`."""

    def __init__(
        self,
        executor_id: int = 0,
        job_name: str = "",
        task_index: int = 0,
        cluster_spec: Mapping[str, list[str]] | None = None,
        defaultFS: str = "file://",
        working_dir: str = ".",
        mgr: Any = None,
        tmp_socket: Any = None,
    ) -> None:
        """Describe a place.

        executor_id : the number of the rank; also `worker_num`.
        job_name, task_index : its role, and its number among those of that role.
        cluster_spec : role → the addresses of its ranks.
        mgr : what `TFNode.DataFeed` reads rows from; None: there are none.
        """
        self.worker_num = self.executor_id = executor_id
        self.job_name, self.task_index = job_name, task_index
        self.cluster_spec = dict(cluster_spec or {})
        self.num_workers = sum(len(there) for job, there in self.cluster_spec.items() if job in _WORKERS)
        self.defaultFS, self.working_dir = defaultFS, working_dir
        self.mgr, self.tmp_socket = mgr, tmp_socket

    def absolute_path(self, path: str) -> str:
        """Return the path with the scheme of the default file system, see `TFNode.hdfs_path`."""
        return TFNode.hdfs_path(self, path)

    def start_cluster_server(self, num_gpus: int = 1, rdma: bool = False) -> Any:
        """Refuse: TensorFlow 2 has strategies, see `TFNode.start_cluster_server`."""
        return TFNode.start_cluster_server(self, num_gpus, rdma)

    def export_saved_model(self, sess: Any, export_dir: str, tag_set: str, signatures: Any) -> None:
        """Refuse: TensorFlow 2 has no sessions, see `TFNode.export_saved_model`."""
        TFNode.export_saved_model(sess, export_dir, tag_set, signatures)

    def get_data_feed(
        self,
        train_mode: bool = True,
        qname_in: str = "input",
        qname_out: str = "output",
        input_mapping: Mapping[str, str] | None = None,
    ) -> TFNode.DataFeed:
        """Return the rows of this rank."""
        return TFNode.DataFeed(self.mgr, train_mode, qname_in, qname_out, input_mapping)

    def release_port(self) -> None:
        """Do nothing: TensorFlow takes over the port that Tritium holds for it."""


def context(size: int, rank: int, master_node: str | None, mgr: Any, file_system: str, home: str) -> TFNodeContext:
    """Return the place of this rank, and let TF_CONFIG call rank 0 `master_node`, as TensorFlowOnSpark does."""
    config = json.loads(os.environ.get("TF_CONFIG", "{}"))
    cluster = config.get("cluster", {"worker": [f"localhost:{number}" for number in range(size)]})
    job, index = (config["task"]["type"], config["task"]["index"]) if config else ("worker", rank)
    if master_node and "chief" not in cluster:
        there = cluster["worker"]
        cluster = {master_node: there[:1], **({"worker": there[1:]} if there[1:] else {})}
        job, index = (master_node, 0) if rank == 0 else ("worker", rank - 1)
        if config:
            os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
    return TFNodeContext(rank, job, index, cluster, file_system, home, mgr)
