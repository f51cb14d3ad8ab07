"""What ranks report, for the run's observer: output, logs, counts, files (driver, or the first supervisor)."""

from __future__ import annotations

from tritium.errors import TritiumError
from tritium.gang.coordinator.members import Gang, Member
from tritium.gang.failure import NonFatalError
from tritium.observe.stored import Piece
from tritium.wire import Message


class Reports:
    """Passes them on. A file that can't be stored ends the gang."""

    def __init__(self, gang: Gang) -> None:
        self.non_fatal_errors: list[NonFatalError] = []
        self._gang = gang
        self._storing: dict[str, int] = {}  # which rank is in the middle of which file

    def on_log(self, member: Member, message: Message) -> None:
        """Numbers of a step or an epoch."""
        self._gang.observer.event("log", rank=member.number, **message.fields)

    def on_trace(self, member: Member, message: Message) -> None:
        """Where a rank's time went."""
        self._gang.observer.event("trace", rank=member.number, **message.fields)

    def on_counts(self, member: Member, message: Message) -> None:
        """What an epoch did with the rows."""
        self._gang.observer.event("counts", rank=member.number, name=message["name"], **message["counts"])

    def on_output(self, member: Member, message: Message) -> None:
        """What a rank has printed, kept until it has a number."""
        text = message.blob.decode("utf-8", "replace")
        if member.rank is None:
            member.early_output.append(text)
        else:
            self._gang.observer.output(member.rank, text)

    def on_note(self, member: Member, message: Message) -> None:
        """A line for the person who waits."""
        self._gang.observer.event("note", text=str(message["text"]))

    def on_checkpoint(self, member: Member, message: Message) -> None:
        """A checkpoint is complete."""
        facts = {name: message[name] for name in ("step", "bytes", "seconds", "path")}
        self._gang.observer.event("checkpoint", rank=member.number, **facts)

    def on_resumed(self, member: Member, message: Message) -> None:
        """The gang goes on from a checkpoint."""
        self._gang.observer.event("resumed", step=message["step"], path=message["path"])

    def on_non_fatal_error(self, member: Member, message: Message) -> None:
        """Something raised that neither ends a rank nor changes its result."""
        facts = {name: str(message[name]) for name in ("where", "type", "text", "traceback")}
        told = NonFatalError(member.number, member.host, int(message["pid"]), late=self._gang.finished, **facts)
        self.non_fatal_errors.append(told)
        self._gang.observer.event("non_fatal_error", **vars(told))
        self._gang.observer.event("note", text=told.headline())

    def on_store(self, member: Member, message: Message) -> None:
        """A piece of a file of the run directory."""
        if self._gang.failure is not None:  # the gang is being ended; what was stored by half is removed
            return
        piece = Piece.read(message.fields, message.blob)
        name = piece.name
        owner = self._storing.setdefault(name, member.number)
        if owner != member.number:
            problem = TritiumError(
                f"Ranks {owner} and {member.number} both store {name!r} at the same time: their pieces would mix. Let "
                f"one of them store it, or give each a name of its own, such as f'{{world.rank}}-{name}'."
            )
            self._gang.fail_member(member, problem)
            return
        if piece.last:
            del self._storing[name]
        try:
            self._gang.observer.store(piece)
        except TritiumError as error:  # its rank has sent it, and waits for no answer
            self._gang.fail_member(member, error)
