"""TensorFlow: tell the ranks of each other by TF_CONFIG, and give them their roles (rank)."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from tritium.errors import BadSetting
from tritium.frameworks.framework import Framework, Place, own_devices
from tritium.frameworks.noise import noise
from tritium.frameworks.ports import held_ports, without_proxy

_servers: list[Any] = []


@dataclass(frozen=True, kw_only=True)
class TensorFlow(Framework):
    """TensorFlow: `TF_CONFIG` is set for MultiWorkerMirroredStrategy, or for ParameterServerStrategy.

    ps : how many ranks, the last ones, are parameter servers. With any, rank 0 is the chief and the only rank that
         calls the function; the others are workers. Results of workers and parameter servers are None.
    """

    ps: int = 0

    name = "tensorflow"
    modules = ("tensorflow",)
    covers = ("tf_keras", "keras")
    install = "tensorflow"
    float32 = True
    secondary = re.compile(
        r"^(Unavailable|Aborted|Cancelled|DeadlineExceeded|Internal|FailedPrecondition|Unknown)Error: .*"
        r"(collective|coordination service|heartbeat|remote target|connection|recv_?tensor|/job:worker)",
        re.I | re.S,
    )

    @property
    def no_rows(self) -> str | None:
        """Say that rows would be dealt to ranks that call no function."""
        if not self.ps:
            return None
        return (
            f"TensorFlow(ps={self.ps}) takes no data=: rows are dealt to all ranks, and only the chief calls the "
            "function, whose datasets run on the workers. Let a dataset_fn read files there; or leave ps out, for "
            "MultiWorkerMirroredStrategy."
        )

    def wrong(self, ranks: int) -> Iterator[str]:
        """Yield each error of `ps`, alone and for so many ranks."""
        if isinstance(self.ps, bool) or not isinstance(self.ps, int) or self.ps < 0:
            yield f"TensorFlow(ps={self.ps!r}): a number of parameter servers, at least 0, is needed."
        elif self.ps and ranks < self.ps + 2:
            yield (
                f"TensorFlow(ps={self.ps}) needs at least {self.ps + 2} ranks (a chief, a worker and {self.ps} for "
                f"parameters), and the gang may have {ranks}. Give ranks={self.ps + 2} or more."
            )

    def prepare(self, *, gpus: bool) -> None:
        """Keep the notes of TensorFlow's C++ out of the output, unless TF_CPP_MIN_LOG_LEVEL is set."""
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

    def load(self) -> None:
        """Import TensorFlow, without the lines that it always writes then."""
        with _quiet():
            super().load()

    def run(self, place: Place, function: Callable[[], Any]) -> Any:
        """Call the function with TF_CONFIG set; on a worker or parameter server of a chief, serve it instead.

        A server stays as long as its process does: until every rank has returned, so also the chief.
        """
        _choose_gpus(place)
        if place.size == 1:
            return function()
        without_proxy(place)
        with held_ports(place) as addresses:
            cluster, job, index = self._roles(place.rank, addresses)
            os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
            if job in ("worker", "chief") and (job == "chief" or not self.ps):
                return function()
            _servers.append(_serve(cluster, job, index))
            return None

    def on_returned(self) -> None:
        """Abort TensorFlow's collectives, where ranks have any: each needs all of them. Anything else goes on."""
        context: Any = sys.modules["tensorflow.python.eager.context"].context()
        errors: Any = sys.modules["tensorflow.python.framework.errors_impl"]
        if context._collective_ops_server_def is not None:  # MultiWorkerMirroredStrategy has connected the ranks.
            context.abort_collective_ops(errors.UNAVAILABLE, "a rank that this collective needs has returned")

    def _roles(self, rank: int, addresses: list[str]) -> tuple[dict[str, list[str]], str, int]:
        """Return the cluster, as in TF_CONFIG, and the job and its index of this rank."""
        if not self.ps:
            return {"worker": addresses}, "worker", rank
        first = len(addresses) - self.ps
        cluster = {"chief": addresses[:1], "worker": addresses[1:first], "ps": addresses[first:]}
        job = "chief" if rank == 0 else "worker" if rank < first else "ps"
        return cluster, job, rank - {"chief": 0, "worker": 1, "ps": first}[job]


def _serve(cluster: dict[str, list[str]], job: str, index: int) -> Any:
    """Start a server of the cluster, in threads of its own."""
    tf: Any = sys.modules["tensorflow"]
    config = tf.compat.v1.ConfigProto()
    # A worker waits in one of these threads and needs others to serve it, so the default of one a core is too few.
    config.inter_op_parallelism_threads = max(os.cpu_count() or 1, len(cluster["worker"]) + 1)
    return tf.distribute.Server(
        tf.train.ClusterSpec(cluster), job_name=job, task_index=index, protocol="grpc", config=config
    )


def _choose_gpus(place: Place) -> None:
    """Show TensorFlow this rank's part of the host's GPUs only: it takes the memory of all that it sees."""
    tf: Any = sys.modules["tensorflow"]
    with _quiet() if place.device == "cpu" else nullcontext():
        devices = tf.config.list_physical_devices("GPU")
    if place.device == "cpu":
        tf.config.set_visible_devices([], "GPU")
    if not place.device.startswith("cuda"):
        return
    indices = own_devices(place)
    if len(devices) < indices.stop:
        raise BadSetting(
            f"TensorFlow {tf.__version__} finds {len(devices)} GPUs on {place.host} for {place.local_size} ranks with "
            f"gpus=: it would train on the CPU. Install its CUDA libraries there "
            f"({sys.executable} -m pip install 'tensorflow[and-cuda]'), or leave gpus= out."
        )
    tf.config.set_visible_devices(devices[indices.start : indices.stop], "GPU")


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back the output on stderr within the block, and write it afterwards without TensorFlow's noise.

    The supervisor leaves the noise out, too, but there is none with on="here".
    """
    sys.stderr.flush()
    before = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)
            held.seek(0)
            os.write(2, noise({}, gpus=False).sub(b"", held.read()))
