"""A rank's connection to its supervisor, and through it to the coordinator (rank)."""

from __future__ import annotations

import functools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from tritium.errors import BadSetting, TooLarge, TritiumError, WireError
from tritium.events import Event, Logged, Note, made
from tritium.frameworks.ports import held
from tritium.gang.failure import Failure
from tritium.gang.limits import check_value, short, too_much_to_log
from tritium.gang.rank.connections import connections, reset
from tritium.gang.rank.peers import peers_of
from tritium.gang.rank.progress_page import ProgressWriter
from tritium.gang.rank.world import World
from tritium.wire import Channel, Message

if TYPE_CHECKING:
    from tritium.data.shard import Shard
    from tritium.data.steps import Feed
    from tritium.observe.stored import Piece
    from tritium.observe.trace import Section, Trace
    from tritium.tls import Certificate


class RankControl:
    """The rank's end of the control socket. One thread receives; methods may be called from any thread."""

    def __init__(
        self,
        channel: Channel,
        *,
        elastic: bool = False,
        progress: ProgressWriter | None = None,
        trace: Trace | None = None,
        on_returned: Callable[[], None] = lambda: None,
    ) -> None:
        self.certificate: Certificate | None = None
        self.run_dir = ""  # Sent with the job: on the command line `ps` would show keys in a URL.
        self.elastic = elastic
        self.could_be_more = False
        self.notice: float | None = None
        self.store_limit: int | None = None
        self._channel = channel
        self.progress = progress or ProgressWriter()
        self.trace = trace
        self._on_returned = on_returned
        self._work = {"returned": self._forsake, "reset": self._reset, "calls": self._tell_calls}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._gathered: dict[tuple[str, int], Message] = {}
        self._calls: dict[str, int] = {}
        self._feeds: dict[str, Feed] = {}
        self._spools: dict[str, Message] = {}
        self._shards: dict[str, Shard] = {}
        self._all_finished = False
        self.assignment: dict[str, Any] = {}
        self._peers = b""
        self._pieces: list[bytes] = []
        self.decoders: Mapping[str, Mapping[str, Any]] = {}
        self.tensors = False

    def take_job(self) -> bytes:
        """Return the pickled function with its arguments, and free it. To be called once."""
        job, self._pieces = b"".join(self._pieces), []
        return job

    def listen(self) -> None:
        """Start receiving, in a thread."""
        self._thread = threading.Thread(target=self._listen, name="tritium-control", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while (message := self._channel.receive()) is not None:
            if (work := self._work.get(message.kind)) is not None:
                # A thread of its own, as the framework's work may take long and may fail.
                threading.Thread(target=work, args=[message], name=f"tritium-{message.kind}", daemon=True).start()
            with self._changed:
                self._take(message)
                self._changed.notify_all()
        os._exit(1)  # The supervisor is gone, and only Linux kills this process for that.

    def _take(self, message: Message) -> None:
        if message.kind == "job":
            self._pieces.append(message.blob)
            self.run_dir = str(message.fields.get("run_dir", ""))
            if fields := message.fields.get("certificate"):
                from tritium.tls import Certificate

                self.certificate = Certificate(**fields)
        elif message.kind == "assign":
            self.assignment, self._peers = message.fields, message.blob
        elif message.kind == "gathered":
            self._gathered[message["tag"], message["number"]] = message
        elif message.kind == "spool":
            self._spools[message["name"]] = message
        elif message.kind == "mark":
            from tritium.data.steps import Watermark

            ended = {int(rank): int(rows) for rank, rows in message["ended"]}
            self._feed(message["name"]).publish(Watermark(message["rows"], ended, self.assignment["size"]))
        elif message.kind == "more":
            self.could_be_more = True
        elif message.kind == "notice":
            self.notice = time.monotonic() + message["seconds"]
        elif message.kind == "fingerprint":
            for name, table in json.loads(message.blob).items():
                self._feed(name).fingerprint = table
        elif message.kind == "finished":
            self._all_finished = True

    def _tell_calls(self, message: Message) -> None:
        """Tell how far this rank has come in its collectives."""
        from tritium.frameworks.collectives import counts

        fields: dict[str, Any]
        try:
            fields = {"calls": list(counts(self.assignment["size"]))}
        except Exception as error:  # noqa: BLE001 - another torch may record otherwise, and a traceback is progress
            fields = {"problem": f"{type(error).__name__}: {error}"}
        self.send("calls", number=message["number"], **fields)

    def _forsake(self, _: Message) -> None:
        """End waits for ranks whose functions have returned, and list the connections for them to reset."""
        self._on_returned()
        self.send("connections", json.dumps([ends for ends, _ in connections()]).encode())

    def _reset(self, message: Message) -> None:
        """Reset connections to a waiting rank, but none by which this process serves others or is served."""
        reset(map(tuple, json.loads(message.blob)), but={self.assignment["master_port"], *held})

    def _feed(self, name: str) -> Feed:
        from tritium.data.steps import Feed

        if name not in self._feeds:
            self._feeds[name] = Feed(functools.partial(self._awaits_rows, name))
        return self._feeds[name]

    @contextmanager
    def _awaits_rows(self, name: str) -> Iterator[None]:
        with self.progress.within(f"waiting for rows of {name!r}", "rows"), self._traced("rows to arrive"):
            yield

    def _traced(self, section: Section) -> AbstractContextManager[None]:
        return nullcontext() if self.trace is None else self.trace.within(section)

    def join(self) -> World:
        """Wait until the gang has formed, and return this rank's world."""
        with self._changed:
            self._changed.wait_for(lambda: self.assignment)
        a = self.assignment
        self.store_limit = a["store_limit"]
        peers = peers_of(json.loads(self._peers))
        me = peers[a["rank"]]
        return World(
            a["rank"], a["size"], a["local_rank"], a["local_size"], me.host, me.device, peers, a["run_id"], self
        )

    def await_all(self) -> None:
        """Wait until every rank's function has returned, as others may still use a TCPStore in this process."""
        with self._changed:
            self._changed.wait_for(lambda: self._all_finished)

    def send(self, kind: str, blob: bytes = b"", /, **fields: Any) -> None:
        """Send a message to the coordinator, through the supervisor."""
        self._channel.send(kind, blob, **fields)

    def report_non_fatal(self, where: str, error: BaseException) -> None:
        """Report to the driver an exception that neither ends this rank nor changes its result."""
        failure = Failure.of(error, self.assignment["rank"], pid=os.getpid())
        facts = {"type": failure.type, "text": failure.text, "traceback": failure.traceback}
        with suppress(WireError):  # The supervisor may be gone.
            self.send("non_fatal_error", pid=failure.pid, **short({"where": where}), **facts)

    def all_gather(self, operation: str, value: bytes, tag: str = "main") -> list[bytes]:
        """Return every rank's bytes, in rank order. Each calling thread needs a tag of its own."""
        return self.all_gather_async(operation, value, tag)()

    def all_gather_async(self, operation: str, value: bytes, tag: str = "main") -> Callable[[], list[bytes]]:
        """Begin an all-gather, and return a function that waits for its values. Raises TooLarge."""
        check_value(operation, self.assignment["rank"], value)
        with self._changed:
            number = self._calls.get(tag, 0)
            self._calls[tag] = number + 1
        self.send("gather", value, tag=tag, number=number, operation=operation)
        return functools.partial(self._gathered_values, operation, (tag, number))

    def _gathered_values(self, operation: str, key: tuple[str, int]) -> list[bytes]:
        # Calls with other tags are made in the background, and do not change the phase of the rank.
        shown = self.progress.within(f"in {operation}", "wait") if key[0] == "main" else nullcontext()
        with shown, self._traced("communicate"), self._changed:
            self._changed.wait_for(lambda: key in self._gathered)
            message = self._gathered.pop(key)
        if "problem" in message.fields:
            raise TritiumError(f"world.{operation}(): {message['problem']}")
        return message.parts()

    def tell(self, event: Event) -> None:
        """Record an event on the driver. Long texts are cut in the middle; too many numbers raise BadSetting."""
        if not isinstance(event, Logged):
            self.send(event.kind, **short(event.fields()))
            return
        self.progress.on_logged(event)
        try:
            self.send(event.kind, **event.fields())
        except TooLarge as error:
            raise too_much_to_log(event, error) from None

    def store(self, piece: Piece) -> None:
        """Store a piece of a file in the run directory."""
        with self.progress.within(f"storing {piece.name!r}"):
            self.send("store", piece.body, **piece.fields())

    def shard(self, name: str) -> Shard:
        """Return the shard `name`, when its rows are spooled (with "stream": the first ones). Raises BadSetting."""
        names = self.assignment["names"]
        if name not in names:
            known = ", ".join(map(repr, names)) or "none: launch(…, data={…}) names them"
            raise BadSetting(f"There is no shard {name!r}. There are: {known}.")
        with self.progress.within(f"waiting for rows of {name!r}", "rows"), self._changed:
            self._changed.wait_for(lambda: name in self._spools)
        with self._changed:
            if name not in self._shards:
                self._shards[name] = self._open(name, self._spools[name])
            return self._shards[name]

    def confirm_rows(self) -> None:
        """Wait until every shard that this rank has opened is known to be complete, on all ranks."""
        with self._changed:
            shards = list(self._shards.values())
        for shard in shards:
            shard.counts  # noqa: B018 - reading it waits for the rows

    def _open(self, name: str, message: Message) -> Shard:
        from tritium.data.schema import Field
        from tritium.data.shard import Shard, memory_limit

        body = json.loads(message.blob)
        return Shard(
            name,
            body["columns"],
            [Field.from_json(f) for f in body["fields"]],
            index=self.assignment["rank"],
            size=self.assignment["size"],
            feed=self._feed(name),
            decode=self.decoders.get(name, {}),
            tensors=self.tensors,
            prepared=message["prepared"],
            memory=memory_limit() // (2 * self.assignment["local_size"]),  # The ranks of a host share it.
            on_epoch_end=functools.partial(self._epoch_ended, name),
            on_batch=functools.partial(self.progress.took, name),
            on_message=lambda text: self.tell(Note(text=text)),
            trace=self.trace,
        )

    def _epoch_ended(self, name: str, counts: Mapping[str, Any]) -> None:
        self.progress.enter(f"after epoch {counts['epoch'] + 1} of {name!r}")
        self.tell(made("counts", {**counts, "rank": self.assignment["rank"], "name": name}))
