"""The thread that agrees with the other ranks on which collectives are ready, and does them (rank).

Horovod's collectives are found by their names: ranks may ask for them in different orders, and ask for other things
meanwhile. In a round, every rank sends how many requests it has and digests of the first ones. What all have in the
same order is done at once; where they differ, ranks send the requests themselves, see `request.agree`. What follows in
each step of a training is done without asking, see `expected`.

A rank takes part in a round when it has something new, when a thread of the user's waits for a result, and when it has
joined. The round then lasts until the last rank comes.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

import torch

from tritium_compat.horovod.collectives import Collectives
from tritium_compat.horovod.errors import HorovodInternalError
from tritium_compat.horovod.expected import Expected
from tritium_compat.horovod.groups import Groups, cuda_event
from tritium_compat.horovod.request import Agreement, Request, Signature, agree, never_meet

_DIGESTS = 14
_WAITS, _JOINED, _CLOSES = 1, 2, 4
_LOOK_AGAIN, _LOOKS = 0.5, 10  # seconds between rounds in which all wait, and after how many of them they give up


class Engine:
    """Does the collectives of the ranks of one process set, in one thread."""

    def __init__(self, ranks: Sequence[int], rank: int, store: Any, name: str) -> None:
        """Connect the ranks, and start the thread.

        ranks : those of the process set, in its order, by their numbers in the gang.
        rank : this one's number in the gang.
        """
        self.ranks, self.rank = list(ranks), rank
        self._groups = Groups(store, name, self.ranks.index(rank), len(ranks))
        self._collectives = Collectives(self._groups, self.ranks, rank)
        self._pending: dict[str, Request] = {}
        self._changed = threading.Condition()
        self._news = self._closes = False
        self._join: Request | None = None
        self._doing: list[Request] = []
        self._over: HorovodInternalError | None = None
        self._joined_before: set[int] = set()
        self._expected = Expected()
        self._alike = 0  # rounds in a row in which all ranks waited, and nothing was ready
        self._threads = torch.get_num_threads()
        self._gpu: int | None = None  # the callers' current one, of which the thread knows nothing
        self._thread = threading.Thread(target=self._run, name=f"tritium-{name}", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> Request:
        """Ask for a collective. Raises ValueError for a name that this rank still waits for."""
        with self._changed:
            if self._over is not None:
                raise self._over
            signature = request.signature
            if signature.key in self._pending:
                raise ValueError(
                    f"{signature.kind} {signature.name!r} has been called, and is not done yet. Give another name, or "
                    "wait for the first one by synchronize(handle)."
                )
            if signature.device != "cpu":
                self._gpu = torch.cuda.current_device()
                request.before = cuda_event()
                request.before.record()
            self._pending[signature.key] = request
            self._notify()
        return request

    def wait(self, request: Request) -> Any:
        """Return the result of a request when it is there. Raises HorovodInternalError."""
        if not request.done.is_set():
            with self._changed:
                request.waits = True
                self._notify()
            request.done.wait()
        if request.error is not None:
            raise request.error
        if request.after is not None:
            torch.cuda.current_stream().wait_event(request.after)
        return request.result

    def poll(self, request: Request) -> bool:
        """Return whether a result is there."""
        if not request.done.is_set():
            with self._changed:
                self._notify()
        return request.done.is_set()

    def join(self) -> int:
        """Take part in the others' allreduces with zeros until all ranks have joined. Returns the last one to join."""
        request = Request(Signature("join", "join"))
        with self._changed:
            if self._over is not None:
                raise self._over
            self._join = request
            self._notify()
        result = self.wait(request)
        return int(result)

    def close(self, *, wait: bool) -> None:
        """End the thread. Requests that are not done fail, here and on the other ranks.

        wait : until the other ranks know. Without it, they notice when this process ends.
        """
        with self._changed:
            self._closes = True
            self._notify()
        if wait:
            self._thread.join()

    def _notify(self) -> None:
        self._news = True
        self._changed.notify_all()

    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # a new thread would use all cores
        while self._over is None:
            with self._changed:
                if self._alike:
                    self._changed.wait_for(lambda: self._news, _LOOK_AGAIN)
                else:
                    self._changed.wait_for(self._comes)
                self._news = False
                pending = list(self._pending.values())
                gpu = self._gpu
                flags = (_WAITS if any(r.waits for r in pending) else 0) | (_JOINED if self._join else 0)
                flags |= _CLOSES if self._closes else 0
            try:
                if gpu is not None:
                    torch.cuda.set_device(gpu)
                with torch.no_grad():
                    self._round(pending, flags)
            except Exception as error:  # noqa: BLE001 - the connection is lost, or memory: every caller is told
                cause = error if isinstance(error, HorovodInternalError) else HorovodInternalError(str(error))
                cause.__cause__ = None if cause is error else error
                self._end(cause)
                self._groups.abort()

    def _comes(self) -> bool:
        """Return whether this rank takes part in a round: not with a request alone that was done meanwhile."""
        if self._join is not None or self._closes:
            return True
        return any(request.waits for request in self._pending.values()) or (self._news and bool(self._pending))

    def _round(self, pending: Sequence[Request], flags: int) -> None:
        digests, last = [0] * _DIGESTS, 0
        for i, request in enumerate(pending[:_DIGESTS]):
            last = digests[i] = request.signature.digest(last)
        if self._done_as_expected(pending, digests, flags):
            return
        header = torch.tensor([flags, len(pending), *digests])
        every = [part.tolist() for part in self._groups.gather(header)]
        if closing := [rank for rank, part in zip(self.ranks, every, strict=True) if part[0] & _CLOSES]:
            mine = self.rank in closing
            self._end(HorovodInternalError("Horovod has been shut down" + ("." if mine else f" by rank {closing[0]}.")))
            return
        joined = [rank for rank, part in zip(self.ranks, every, strict=True) if part[0] & _JOINED]
        if len(joined) == len(self.ranks):
            self._expected = Expected()
            self._all_joined(joined)
            return
        self._joined_before = set(joined)
        same = 0
        while not joined and same < min(_DIGESTS, *(part[1] for part in every)):
            if any(part[2 + same] != every[0][2 + same] for part in every):
                break
            same += 1
        signatures = [request.signature for request in pending[:same]]
        self._expected.saw(signatures, digests[same - 1])
        if same:
            self._alike = 0
            self._do(signatures)
            return
        self._sort_out(pending, joined, all(part[0] & (_WAITS | _JOINED) for part in every))

    def _done_as_expected(self, pending: Sequence[Request], digests: Sequence[int], flags: int) -> bool:
        """Do what all ranks expect to be next, and return whether all had asked for it."""
        expected = self._expected.next()
        if expected is None:
            return False
        has_it = not flags & (_JOINED | _CLOSES) and digests[expected.count - 1] == expected.digest
        requests = pending[: expected.count] if has_it else ()
        total = self._collectives.try_fused(requests, expected)
        if total is None:  # the round that follows does something else, so that less is expected
            return False
        self._alike = 0
        self._expected.saw([request.signature for request in requests], expected.digest)
        for request in requests:
            self._taken(request.signature.key)
        self._doing = list(requests)
        self._collectives.end_fused(requests, total)
        self._doing = []
        return True

    def _sort_out(self, pending: Sequence[Request], joined: Sequence[int], all_wait: bool) -> None:
        """Exchange the requests themselves, as they are not the same ones in the same order."""
        own = [_plain(request.signature) for request in pending]
        found = self._groups.gather_objects(json.dumps(own).encode())
        asked = {
            rank: [_signature(one) for one in json.loads(payload)]
            for rank, payload in zip(self.ranks, found, strict=True)
            if rank not in joined
        }
        agreement: Agreement = agree(asked, joined)
        for key, why in agreement.wrong.items():
            if (request := self._taken(key)) is not None:
                request.end(error=HorovodInternalError(why))
        self._do(agreement.ready)
        self._alike = 0 if agreement.wrong or agreement.ready or not all_wait else self._alike + 1
        if self._alike == _LOOKS:
            self._alike = 0
            error = never_meet(asked, joined)
            for request in pending:
                if (taken := self._taken(request.signature.key)) is not None:
                    taken.end(error=HorovodInternalError(str(error)))

    def _do(self, ready: Sequence[Signature]) -> None:
        requests = []
        for signature in ready:
            request = self._taken(signature.key)
            requests.append(Request(signature) if request is None else request)  # None: this rank has joined
        self._doing = requests
        self._collectives.do(requests)
        self._doing = []

    def _taken(self, key: str) -> Request | None:
        with self._changed:
            return self._pending.pop(key, None)

    def _all_joined(self, joined: Sequence[int]) -> None:
        last = max(set(joined) - self._joined_before)
        with self._changed:
            request, self._join = self._join, None
            self._joined_before = set()
        assert request is not None
        request.end(last)

    def _end(self, error: HorovodInternalError) -> None:
        with self._changed:
            self._over = error
            doing = [request for request in self._doing if not request.done.is_set()]
            left = [*doing, *self._pending.values(), *([self._join] if self._join else [])]
            self._pending.clear()
            self._join = None
        for request in left:
            request.end(error=HorovodInternalError(str(error)))


def _plain(signature: Signature) -> list[Any]:
    return [signature.kind, signature.name, signature.tensors, signature.device, signature.detail]


def _signature(plain: list[Any]) -> Signature:
    kind, name, tensors, device, detail = plain
    shapes = tuple((dtype, tuple(shape)) for dtype, shape in tensors)
    return Signature(kind, name, shapes, device, tuple((key, value) for key, value in detail))
