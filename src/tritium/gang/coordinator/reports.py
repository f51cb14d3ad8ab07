"""Pass output, logs, counts and files of the ranks to the run's observer (driver, or the first supervisor)."""

from __future__ import annotations

import base64
import json
import time

from tritium.errors import TritiumError
from tritium.events import NonFatalError, Note, made
from tritium.gang.coordinator.members import GangState, Member
from tritium.observe.stored import Piece
from tritium.wire import Message


def on_clock(member: Member, message: Message) -> None:
    """Answer with this process's time, by which a supervisor knows how its host's clock differs."""
    member.session.send("clock", sent=message["sent"], at=time.time())


class Reports:
    """Handles the messages that only inform. A file that can't be stored ends the gang."""

    def __init__(self, gang: GangState) -> None:
        self.non_fatal_errors: list[NonFatalError] = []
        self._gang = gang
        self._storing_rank: dict[str, int] = {}
        """File name → the rank that is storing it."""

    def on_event(self, member: Member, message: Message) -> None:
        """Record an event that a rank tells of itself."""
        self._gang.observer.event(made(message.kind, {**message.fields, "rank": member.best_number}))

    def on_output(self, member: Member, message: Message) -> None:
        """Record output of a rank; it is kept with the member until ranks are assigned."""
        text = message.blob.decode("utf-8", "replace")
        if member.rank is None and self._gang.failure is None:
            member.early_output.append(text)
        else:
            self._gang.observer.output(member.best_number, text)

    def on_spans(self, member: Member, message: Message) -> None:
        """Record spans of a rank's steps, or events of torch's profiler, with the clock of its host: a line of JSON."""
        facts = {name: message.fields.get(name) for name in ("epoch", "offset", "error", "torch")}
        line = json.dumps({**facts, "spans": base64.b64encode(message.blob).decode()})
        self._gang.observer.spans(member.number, f"{line}\n".encode())

    def show_early_output(self) -> None:
        """Record output from before ranks were assigned; under the partition, if they never were."""
        for member in self._gang.members.values():
            texts, member.early_output = member.early_output, []
            for text in texts:
                self._gang.observer.output(member.best_number, text)

    def on_non_fatal_error(self, member: Member, message: Message) -> None:
        """Record an exception or exit that neither ends a rank nor changes its result."""
        error = NonFatalError(rank=member.number, host=member.host, late=self._gang.finished, **message.fields)
        self.non_fatal_errors.append(error)
        self._gang.observer.event(error)
        self._gang.observer.event(Note(text=error.headline()))

    def on_store(self, member: Member, message: Message) -> None:
        """Store a piece of a file in the run directory. Two ranks storing the same file at once fail the gang."""
        if self._gang.failure is not None:  # The gang is being ended, and incomplete files are removed.
            return
        piece = Piece.read(message.fields, message.blob)
        name = piece.name
        owner = self._storing_rank.setdefault(name, member.number)
        if owner != member.number:
            problem = TritiumError(
                f"Ranks {owner} and {member.number} both store {name!r} at the same time: their pieces would mix. Let "
                f"one of them store it, or give each a name of its own, such as f'{{world.rank}}-{name}'."
            )
            self._gang.fail_member(member, problem)
            return
        if piece.last:
            del self._storing_rank[name]
        try:
            self._gang.observer.store(piece)
        except TritiumError as error:  # The rank does not wait for an answer.
            self._gang.fail_member(member, error)
