"""`HostMemory`: means of arrays over ranks that are all on one host, through memory that they share (rank)."""

from __future__ import annotations

import mmap
import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, ClassVar

import numpy as np

from tritium.errors import RanksDiffer
from tritium.frameworks.framework import Place
from tritium.wire import peer

_MEANS_OFFSET = 1 << 40  # The means lie far behind the ranks' arrays; only pages that are written take memory.
_CALL = struct.Struct("<qq")
"""The number of the call and the bytes of a rank's arrays, on which ranks must agree."""
_CACHE_LINE_BYTES = 64
_PIECE_ELEMENTS = 1 << 15  # As many are added at a time as stay in the processor's cache meanwhile.
_CONNECT_SECONDS = 60.0
_ABLE = hasattr(os, "memfd_create") and hasattr(socket, "SO_PEERCRED")  # Only Linux has both.


class HostMemory:
    """Memory shared by the ranks of one host, in which they compute means of arrays.

    The memory has no name in any file system: a killed rank leaves nothing behind. Ranks wait for each other on sockets
    to rank 0, which end with their processes, so that a dead one is noticed at once.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._file = -1
        self._door: socket.socket | None = None
        """Rank 0's listening socket; on every other rank its connection to rank 0."""
        self._address = b""
        self._others: list[socket.socket] = []
        """On rank 0 a connection to each other rank; on every other rank one to rank 0."""
        self._calls = 0
        self._waits = False
        self._values, self._means = np.empty(0, np.uint8), np.empty(0, np.uint8)
        self.failure: Exception | None = None
        """The reason why the memory is closed, where a call has failed."""

    newest: ClassVar[HostMemory | None] = None
    """The one that was opened last in this process."""

    @property
    def calls(self) -> tuple[int, bool]:
        """The number of calls of `mean`, and whether the last one waits for another rank."""
        return (self._calls + 1) // 2, self._waits

    @classmethod
    def shared(cls, place: Place) -> HostMemory | None:
        """Return the memory of all ranks; None on every rank where they can't share any. All ranks call it.

        They can't on several hosts, in containers with a network each, or on a system other than Linux. Nor can they
        where the system refuses a rank the memory or a descriptor for it, which is noted for the user.
        """
        if place.size == 1 or len({host_peer.host for host_peer in place.peers}) > 1 or not _ABLE:
            return None
        memory = cls(place.rank, place.size)
        try:
            opened = place.gather((memory._problem(memory._open), memory._address))
            if (
                _is_well(place, [problem for problem, _ in opened])
                and all(place.gather(memory._reaches(opened[0][1])))
                and _is_well(place, place.gather(memory._problem(memory._exchange)))
            ):
                cls.newest = memory
                return memory
        except BaseException:
            memory.close()
            raise
        memory.close()
        return None

    def _problem(self, step: Callable[[], None]) -> str | None:
        """Return why the step failed, or None, so that all ranks know it before one waits for another."""
        try:
            step()
        except OSError as error:
            self.close()  # At once, as other ranks may be waiting for this one.
            return str(error)
        return None

    def _open(self) -> None:
        """Rank 0 makes the memory, and listens for the others."""
        self._door = socket.socket(socket.AF_UNIX)
        self._door.settimeout(_CONNECT_SECONDS)
        if self._rank == 0:
            self._file = os.memfd_create("tritium-means")
            os.ftruncate(self._file, 2 * _MEANS_OFFSET)
            self._door.bind("")  # The kernel chooses a name, which ends with the socket.
            self._door.listen(self._size)
            self._address = self._door.getsockname()

    def _reaches(self, address: bytes) -> bool:
        """Connect to rank 0, and return whether it is there: another container has other names."""
        assert self._door is not None
        if self._rank == 0:
            return True
        try:
            self._door.connect(address)
            return peer(self._door)[1] == os.getuid()
        except OSError:
            return False

    def _exchange(self) -> None:
        """Rank 0 gives the memory to the others, which are connected to it."""
        door, self._door = self._door, None
        assert door is not None
        if self._rank:
            self._others.append(door)
            _, files, _, _ = socket.recv_fds(door, 1, 1)
            if not files:
                raise ConnectionError("it got no descriptor of the memory from rank 0")
            self._file = files[0]
            os.set_inheritable(self._file, False)
        else:
            with door:
                while len(self._others) < self._size - 1:
                    other, _ = door.accept()
                    self._others.append(other)
                    if peer(other)[1] == os.getuid():  # Any user may connect to the name of a socket.
                        socket.send_fds(other, [b"\0"], [self._file])
                    else:
                        self._others.pop().close()
        for other in self._others:
            other.settimeout(None)  # The default timeout is for the program's own sockets.

    @staticmethod
    def averages(dtype: Any) -> bool:
        """Return whether `mean` takes arrays of this dtype, of NumPy, JAX or torch: NumPy adds those as they do."""
        return str(dtype).removeprefix("torch.") in ("float32", "float64")

    def mean(self, arrays: Sequence[np.ndarray[Any, Any]]) -> None:
        """Replace the arrays, all of one floating dtype and contiguous, by their means over the ranks, in place.

        All ranks call it with arrays of the same shapes; they get the same means, bit for bit. Raises ConnectionError
        where another rank has ended, RanksDiffer where another rank's arrays have another size, MemoryError where this
        rank can't map so much memory. After any of them, every call raises, on every rank.
        """
        if self._file < 0:
            raise ConnectionResetError("The ranks share no memory any more: to average gradients has failed before.")
        dtype, count = arrays[0].dtype, sum(array.size for array in arrays)
        size = -(-count * dtype.itemsize // _CACHE_LINE_BYTES) * _CACHE_LINE_BYTES
        values, means = (mapped.view(dtype) for mapped in self._mapped(size))
        # This rank computes the means from `start` to `end`.
        start, end = (count * rank // self._size for rank in (self._rank, self._rank + 1))
        rest = [*_pieces(arrays, 0, start), *_pieces(arrays, end, count)]
        for part, at in rest:
            values[self._rank][at] = part
        self._wait(count * dtype.itemsize)
        with np.errstate(all="ignore"):  # Infinite gradients are left to the optimizer.
            for part, at in _pieces(arrays, start, end):
                every = [part if rank == self._rank else values[rank][at] for rank in range(self._size)]
                total = np.add(every[0], every[1], out=means[at])
                for addend in every[2:]:
                    total += addend
                total /= self._size
                part[...] = total
        self._wait(count * dtype.itemsize)
        for part, at in rest:
            part[...] = means[at]

    def close(self) -> None:
        """Leave the other ranks: those that wait for this one raise."""
        for other in (*self._others, *filter(None, [self._door])):
            with suppress(OSError):  # The other rank may be gone.
                other.shutdown(socket.SHUT_RDWR)  # Wakes a thread of this process that waits for it.
            other.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            self._values, self._means = np.empty(0, np.uint8), np.empty(0, np.uint8)

    def _mapped(self, size: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return bytes `[ranks, size]` for the ranks' arrays, and bytes `[size]` for the means.

        They lie apart, whatever the size: a rank may give its next arrays while others read the means.
        """
        if len(self._means) < size:
            try:
                self._values = np.frombuffer(mmap.mmap(self._file, self._size * size), np.uint8)
                self._means = np.frombuffer(mmap.mmap(self._file, size, offset=_MEANS_OFFSET), np.uint8)
            except OSError as error:
                more = f"{self._size * size:,} bytes of memory that it shares with the others, to average gradients"
                raise self._failed(MemoryError(f"Rank {self._rank} can't map {more}: {error}")) from error
        return self._values[: self._size * size].reshape(self._size, size), self._means[:size]

    def _wait(self, size: int) -> None:
        """Wait until every rank has come here with arrays of `size` bytes."""
        self._calls += 1
        mine = _CALL.pack(self._calls, size)
        self._waits = True
        try:
            if self._rank == 0:
                calls = {mine, *(_receive(other) for other in self._others)}
                agreed = mine if calls == {mine} else _CALL.pack(-1, -1)
                for other in self._others:
                    other.sendall(agreed)
            else:
                self._others[0].sendall(mine)
                agreed = _receive(self._others[0])
        except OSError as error:
            text = f"The connection of rank {self._rank} to another rank ended while they averaged gradients: {error}"
            raise self._failed(ConnectionResetError(text)) from error
        finally:
            self._waits = False
        if agreed != mine:
            text = f"Ranks average gradients of different sizes: {size} bytes on rank {self._rank}."
            raise self._failed(RanksDiffer(f"{text} Every rank must make the same model and take the same steps."))

    def _failed(self, failure: Exception) -> Exception:
        """Close the memory for a failure, and return that."""
        self.close()
        self.failure = failure
        return failure


def _pieces(
    arrays: Sequence[np.ndarray[Any, Any]], start: int, end: int
) -> Iterator[tuple[np.ndarray[Any, Any], slice]]:
    """Yield the elements `start` to `end` of arrays that lie one after the other: flat pieces, and where they lie."""
    begin = 0
    for array in arrays:
        flat, first, last = array.reshape(-1), max(start, begin), min(end, begin + array.size)
        for at in range(first, last, _PIECE_ELEMENTS):
            piece = slice(at, min(at + _PIECE_ELEMENTS, last))
            yield flat[piece.start - begin : piece.stop - begin], piece
        begin += array.size


def _receive(other: socket.socket) -> bytes:
    """Return the other rank's `_CALL`. Raises ConnectionError when it has ended."""
    data = other.recv(_CALL.size, socket.MSG_WAITALL)
    if len(data) < _CALL.size:
        raise ConnectionResetError("closed by the other rank")
    return data


def _is_well(place: Place, problems: Sequence[str | None]) -> bool:
    """Return whether no rank has a problem, the same on every rank. Notes the first one."""
    rank = next((rank for rank, problem in enumerate(problems) if problem is not None), None)
    if rank is not None and place.rank == 0:
        place.note(
            "ranks average gradients over TCP, which takes longer, and not in memory that they share: "
            f"rank {rank} on {place.peers[rank].host} could not open it ({problems[rank]})"
        )
    return rank is None
