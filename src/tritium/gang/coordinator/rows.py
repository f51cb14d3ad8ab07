"""Count the rows of each rank, and publish how many every rank may take (driver, or the first supervisor)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tritium.data.few import deal, is_many
from tritium.data.fingerprint import Part, added, table
from tritium.data.schema import Shapes
from tritium.data.steps import WatermarkTracker
from tritium.errors import BadRow
from tritium.events import Note, RowsCounted, RowsReceived
from tritium.gang.coordinator.members import GangState, Member
from tritium.wire import Message

MARK_SECONDS = 0.05
"""The least time between two marks that ranks are sent, so that ends that come together share one."""

Verify = Callable[[Mapping[str, Any], Shapes], Exception | None]


class RowCounts:
    """The row counts of every named DataFrame.

    stream : whether ranks take rows while others still arrive.
    verify : called with (fingerprint, shapes), it returns an error for rows that must not be trained on, else None.
    """

    def __init__(self, gang: GangState, names: Sequence[str], *, stream: bool, verify: Verify | None) -> None:
        self.receipts: dict[int, dict[str, Any]] = {}
        self._gang = gang
        self._stream = stream
        self._verify = verify
        self._trackers = {name: WatermarkTracker(gang.size) for name in names}
        self._marked: dict[str, float] = {}
        """Name → time of the last mark that was sent."""
        self._marking: set[str] = set()
        """The names whose next mark is scheduled."""
        self._few: dict[int, tuple[Member, Message]] = {}
        """Rank → its rows, where they are few."""
        self._many = False
        """Whether the rows of all ranks together are many."""

    def on_rows(self, member: Member, message: Message) -> None:
        """Take the number of a rank's rows so far."""
        for name, rows in message["rows"].items():
            self._gang.observer.event(RowsCounted(name=name, rank=member.number, rows=int(rows)))
            if self._stream:
                self.mark(name, member.number, int(rows), ended=False)

    def on_few(self, member: Member, message: Message) -> None:
        """Take a rank's rows, or that they are many. Deal those of all ranks again when all together are few."""
        self._few[member.number] = member, message
        messages = [one for _, (_, one) in sorted(self._few.items())]
        many = any(one["many"] for one in messages)
        self._many = (
            self._many or many or is_many(sum(one["rows"] for one in messages), sum(len(one.blob) for one in messages))
        )
        if self._many or len(messages) == self._gang.size:
            # Where they are many, the ranks that wait keep their own rows.
            answers = [b""] * len(messages) if self._many else deal([one.blob for one in messages])
            for (_, (waiting, _)), answer in zip(sorted(self._few.items()), answers, strict=True):
                waiting.session.send("dealt", answer)
            self._few.clear()

    def on_receipt(self, member: Member, message: Message) -> None:
        """Take the receipt of a rank that has all its rows. With the last one, check shapes and fingerprint."""
        gang = self._gang
        self.receipts[member.number] = {"rows": message["rows"], **json.loads(message.blob)}
        for name, rows in message["rows"].items():
            gang.observer.event(RowsCounted(name=name, rank=member.number, rows=int(rows), ended=True))
        if len(self.receipts) == gang.size:
            shapes, ragged = agree({r: receipt["columns"] for r, receipt in self.receipts.items()})
            whole = received(self.receipts)
            problem = ragged or (self._verify(whole.fingerprint, shapes) if self._verify else None)
            if problem is not None:
                gang.fail_member(member, problem)
                return
            gang.observer.event(whole)
            for text in skipped_notes(whole, self.receipts):
                gang.observer.event(Note(text=text))
            gang.broadcast("spooled", json.dumps(shapes).encode())
            # Sent before the last mark.
            gang.broadcast("fingerprint", json.dumps(whole.fingerprint).encode())
        for name, rows in message["rows"].items():
            self.mark(name, member.number, int(rows), ended=True)

    def mark(self, name: str, rank: int, rows: int, *, ended: bool) -> None:
        """Update a rank's number of rows, and send a mark if it changes, at most every MARK_SECONDS."""
        tracker = self._trackers[name]
        if not tracker.report(rank, rows, ended) or not (self._stream or tracker.complete):
            return
        if tracker.complete or time.monotonic() - self._marked.get(name, 0.0) >= MARK_SECONDS:
            self._send_mark(name)
        elif name not in self._marking:
            self._marking.add(name)
            self._gang.after(MARK_SECONDS, lambda: self._send_mark(name))

    def _send_mark(self, name: str) -> None:
        """Broadcast the changes since the last mark; sessions deliver every one, in order."""
        self._marking.discard(name)
        mark = self._trackers[name].change()
        if mark is not None:
            self._marked[name] = time.monotonic()
            self._gang.broadcast("mark", name=name, rows=mark.rows, ended=list(mark.ended.items()))


def received(receipts: Mapping[int, Mapping[str, Any]]) -> RowsReceived:
    """Return, for every name, the rows per rank and the fingerprint of the whole exchange (the sum of the ranks').

    With the rows per rank that were left out of those names where some were.
    """
    rows: dict[str, list[int]] = {}
    left_out = {name for receipt in receipts.values() for name in receipt.get("skipped", ())}
    skipped = {
        name: [receipt.get("skipped", {}).get(name, 0) for _, receipt in sorted(receipts.items())]
        for name in sorted(left_out)
    }
    prints: dict[str, dict[int, Part]] = {}
    for _, receipt in sorted(receipts.items()):
        for name, count in receipt["rows"].items():
            rows.setdefault(name, []).append(count)
        for name, parts in receipt["fingerprint"].items():
            for partition, *part in parts:
                whole = prints.setdefault(name, {})
                whole[partition] = added(whole.get(partition, (0, 0, 0)), part)
    fingerprint = {name: table(parts) for name, parts in prints.items()}
    return RowsReceived(rows=rows, fingerprint=fingerprint, skipped=skipped or None)


def skipped_notes(whole: RowsReceived, receipts: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Return a line for the user for each name of which rows were left out.

    whole : the result of `received`.
    """
    notes = []
    for name, counts in (whole.skipped or {}).items():
        left = sum(counts)
        rows = left + sum(whole.rows[name])
        first = next(r["first"][name] for _, r in sorted(receipts.items()) if name in r.get("first", {}))
        notes.append(
            f"data {name!r}: {left:,} of {rows:,} rows {'is' if left == 1 else 'are'} left out, as "
            f"on_error='skip' says. The first: {first}"
        )
    return notes


Columns = Mapping[str, Sequence[Mapping[str, Any]]]


def agree(columns: Mapping[int, Columns]) -> tuple[dict[str, dict[str, list[int]]], BadRow | None]:
    """Return the shape of every column by name, or an error when ranks have different ones.

    columns : rank → name → the spool's descriptions of columns. An empty shard has shape None, as no row has shown it.
    """
    shapes: dict[str, dict[str, list[int]]] = {}
    seen: dict[tuple[str, str], int] = {}
    for rank, names in sorted(columns.items()):
        for name, descriptions in names.items():
            known = shapes.setdefault(name, {})
            for column in descriptions:
                label, shape = column["name"], column.get("shape")
                if shape is None:
                    continue
                if known.setdefault(label, list(shape)) != list(shape):
                    other = seen[name, label]
                    return shapes, BadRow(
                        f"{name}: rows of column {label!r} have the shape {known[label]} on rank {other} and "
                        f"{list(shape)} on rank {rank}. Make them one length, or pad them: "
                        f"tr.Data(df, pad={{{label!r}: length}}).",
                        column=label,
                    )
                seen.setdefault((name, label), rank)
    return shapes, None
