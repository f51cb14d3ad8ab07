"""The process management interface (PMI-1) by which a rank's MPI library finds the other ranks (supervisor).

Elsewhere mpirun answers these requests of MPI_Init. The rank has one end of a socket pair; each line on it is a request
of `key=value` words. The values that a rank puts are exchanged with the other ranks at its barriers, by an all-gather
through the coordinator. MPICH, Intel MPI and MVAPICH speak this protocol.
"""

from __future__ import annotations

import glob
import json
import os
import re
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from tritium.errors import TritiumError, WireError
from tritium.gang.control.client import Client
from tritium.wire import Message

BARRIER_TAG, INIT_TAG = "pmi", "MPI_Init"
_WORD = re.compile(r"([\w-]+)=(\S*)")
_MAXES = "kvsname_max=256 keylen_max=64 vallen_max=4096"


class MPISupervisor(Protocol):
    """The calls of a rank's MPI to its supervisor."""

    def on_mpi_abort(self, code: int) -> None:
        """Handle MPI_Abort, which does not end the program by itself."""

    def on_rank_refused(self, error: TritiumError) -> None:
        """Handle that MPI_Init waits for a rank that has returned."""


class Pmi:
    """Answers the requests of one rank, in a thread; see the module.

    name : the name of the gang's only key-value space. Every attempt has its own, as it names MPICH's shared memory.
    """

    def __init__(self, coordinator: Client, name: str, supervisor: MPISupervisor) -> None:
        self._coordinator = coordinator
        self._supervisor = supervisor
        self._name = name
        self._ours, self._theirs = socket.socketpair()
        for end in (self._ours, self._theirs):
            end.settimeout(None)  # A default timeout would make it non-blocking, also for the rank.
        self._values: dict[str, str] = {}
        self._put: dict[str, str] = {}
        self._barriers = 0
        self._gathered: dict[int, Message] = {}
        self._changed = threading.Condition()
        self._closed = False

    @property
    def fd(self) -> int:
        """The descriptor that the rank inherits."""
        return self._theirs.fileno()

    def on_assigned(self, rank: int, peers: Sequence[Mapping[str, Any]]) -> None:
        """Take the rank and the hosts of all ranks."""
        with self._changed:
            self._rank, self._size = rank, len(peers)
            self._values["PMI_process_mapping"] = process_mapping([str(peer["host"]) for peer in peers])

    def on_gathered(self, message: Message) -> None:
        """Take the coordinator's answer to a barrier, or to MPI_Init."""
        if message["tag"] == INIT_TAG:
            if "problem" in message.fields:
                self._supervisor.on_rank_refused(TritiumError(message["problem"]))
            return
        with self._changed:
            self._gathered[message["number"]] = message
            self._changed.notify_all()

    def close(self) -> None:
        """End `serve`, and remove shared memory that MPICH has not removed; to be called when the rank has ended."""
        self._theirs.close()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        with suppress(OSError):
            self._ours.shutdown(socket.SHUT_RDWR)
        for path in glob.glob(f"/dev/shm/mpich_*_{_fnv1a(self._name):x}_*"):  # Killed ranks leave it.
            with suppress(FileNotFoundError):  # The supervisor of another rank may have removed it.
                os.unlink(path)

    def serve(self) -> None:
        """Answer requests, when the rank has been started, until it closes its end or `close` is called."""
        self._theirs.close()  # The rank has inherited it.
        requests = self._ours.makefile("r", encoding="utf-8", errors="replace")
        with self._ours, requests, suppress(OSError, WireError):  # The supervisor notices who has gone.
            for line in requests:
                if line.startswith("mcmd="):  # Requests such as spawn have several lines.
                    for more in requests:
                        if more.strip() == "endcmd":
                            break
                if line.strip():
                    self._answer(line)

    def _answer(self, line: str) -> None:
        words = dict(_WORD.findall(line))
        command = words.get("cmd") or words.get("mcmd", "")
        if command == "init":
            self._gather("MPI_Init", b"", INIT_TAG)  # Only its failure matters: when a rank returns without MPI_Init.
            self._say("response_to_init", "pmi_version=1 pmi_subversion=1 rc=0")
        elif command == "get_maxes":
            self._say("maxes", f"{_MAXES} rc=0")
        elif command == "get_appnum":
            self._say("appnum", "appnum=0 rc=0")
        elif command == "get_my_kvsname":
            self._say("my_kvsname", f"kvsname={self._name} rc=0")
        elif command == "get_universe_size":
            self._say("universe_size", f"size={self._size} rc=0")
        elif command == "put":
            key = words["key"]
            self._put[key] = self._values[key] = line.rstrip("\n").partition(" value=")[2]
            self._say("put_result", "rc=0 msg=success")
        elif command == "get":
            value = self._values.get(words["key"])
            answer = "rc=-1 msg=key_not_found value=unknown" if value is None else f"rc=0 msg=success value={value}"
            self._say("get_result", answer)
        elif command == "barrier_in":
            self._say("barrier_out", "rc=0" if self._exchange() else "rc=-1 msg=a_rank_has_left")
        elif command == "finalize":
            self._say("finalize_ack", "rc=0")
        elif command == "abort":
            self._supervisor.on_mpi_abort(int(words.get("exitcode", 1)))
        else:  # MPI_Comm_spawn and MPI_Publish_name need a server, of which there is none.
            self._say(f"{command}_result", "rc=-1 msg=not_supported")

    def _say(self, command: str, rest: str) -> None:
        self._ours.sendall(f"cmd={command} {rest}\n".encode())

    def _gather(self, operation: str, values: bytes, tag: str, number: int = 0) -> None:
        self._coordinator.send("gather", values, tag=tag, number=number, operation=operation)

    def _exchange(self) -> bool:
        """Give every rank the values put since the last barrier. False: a rank has returned without this one."""
        number, self._barriers = self._barriers, self._barriers + 1
        values, self._put = json.dumps(self._put).encode(), {}
        self._gather("MPI_Finalize", values, BARRIER_TAG, number)
        with self._changed:
            self._changed.wait_for(lambda: number in self._gathered or self._closed)
            message = self._gathered.pop(number, None)
        if message is None or "problem" in message.fields:
            return False
        for values in message.parts():
            self._values.update(json.loads(values))
        return True


def _fnv1a(text: str) -> int:
    """Return the 32-bit FNV-1a hash, by which MPICH (4 and 5) names the shared memory of a key-value space."""
    value = 2166136261
    for byte in text.encode():
        value = ((value ^ byte) * 16777619) & 0xFFFFFFFF
    return value


def process_mapping(hosts: Sequence[str]) -> str:
    """Return PMI's text for the hosts of all ranks, in rank order: "(vector,(first host,hosts,ranks of each),…)".

    MPI uses shared memory between the ranks of one host. Ranks of a host are consecutive.
    """
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    blocks: list[list[int]] = []
    for host, first_host in numbers.items():
        ranks_of_each = hosts.count(host)
        if blocks and blocks[-1][2] == ranks_of_each:
            blocks[-1][1] += 1
        else:
            blocks.append([first_host, 1, ranks_of_each])
    return "(vector," + ",".join(f"({first},{count},{ranks})" for first, count, ranks in blocks) + ")"
