"""The permitted outcomes of a disturbed run: its weights, its errors, and their texts (docs/failures.md)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .faults import LOSSES, Struck


@dataclass(frozen=True)
class May:
    """The documented outcomes of one fault."""

    said: str
    """What the reason of a retry, or the last error, says of it: a regular expression."""
    ends: tuple[str, ...] = ()
    """The errors by which it may end the run, whatever `retries` is; all others are tried again."""


LOST_EXECUTOR = r"ExecutorLostFailure|IncompleteShard|lost map output"
DISK = r"No space left on device|the disk .*is full|A disk of Spark's is full"
MAY = {
    "rank killed": May(r"was killed by SIGKILL"),
    "fork server killed": May(r"was killed by SIGKILL"),
    "supervisor killed": May(r"its supervisor, a Python worker of Spark's, was killed or crashed"),
    "daemon killed": May(  # Spark then ends the worker, too, and may notice that first
        r"Spark's Python daemon there \(pid \d+\)|Python daemon|its supervisor, a Python worker of Spark's, was killed"
    ),
    "executor killed": May(LOST_EXECUTOR),
    "node killed": May(LOST_EXECUTOR),
    "driver killed": May(r"$^"),
    "rank stopped": May(r"stopped \(SIGSTOP", ends=("Stalled", "StartTimeout")),
    "rank stopped for a while": May(r"$^"),
    "connections cut": May(r"$^"),
    "connections refused": May(r"$^"),
    "connections silent": May(r"$^"),
    "scratch disk full": May(DISK, ends=("SpoolFull", "JobFailed", "IncompleteShard")),
    "run directory's disk full": May(DISK, ends=("CheckpointFailed", "StoreFailed")),
}
ERRORS_OF_LOSSES = ("RankFailed", "JobFailed", "IncompleteShard")


@dataclass(frozen=True)
class Verdict:
    """The outcome of one call in a few words, and what is wrong with it."""

    words: str
    problems: list[str]


def judge(
    answer: Mapping[str, Any] | None,
    struck: Sequence[Struck],
    events: Sequence[Mapping[str, Any]],
    retries: int,
    reference: Mapping[str, Any],
) -> Verdict:
    """Judge one call, which was hit by these faults in this order. `answer` is None where its driver was killed."""
    again = [str(event["reason"]) for event in events if event["kind"] == "retry"]
    losses = [one for one in struck if one.fault.kind in LOSSES and one.fault.kind != "driver killed"]
    problems = [f"a retry that no fault explains: {reason}" for reason in again if not explained(reason, struck)]
    if len(again) > len(losses):
        problems.append(f"{len(again)} retries for {len(losses)} losses")
    if answer is None:
        return Verdict("driver gone", problems)
    problems += [f"left behind: {what}" for what in answer["left"]]
    if (error := answer["error"]) is not None:
        return Verdict(error["kinds"][0], problems + wrong_error(error, struck, losses, len(again), retries))
    problems += differences(answer["value"], reference)
    return Verdict(f"continued, {len(again)} retries" if again else "continued", problems)


def explained(reason: str, struck: Sequence[Struck]) -> bool:
    """Return whether the sentence describes one of the faults, and its victim where it names one."""
    return any(re.search(MAY[one.fault.kind].said, reason) and names_victim(reason, one) for one in struck)


def names_victim(text: str, one: Struck) -> bool:
    """Return whether the text names the process that was hit; True where it names none, or no such role."""
    if one.fault.kind not in ("rank killed", "daemon killed"):
        return True
    named = [int(pid) for pid in re.findall(r"\(pid (\d+)\)", text.partition("\n")[0])]
    return not named or bool(set(named) & set(one.pids))


def wrong_error(
    error: Mapping[str, Any], struck: Sequence[Struck], losses: Sequence[Struck], again: int, retries: int
) -> list[str]:
    """Return what is wrong with the error of a call, if anything."""
    kind, text = error["kinds"][0], str(error["text"])
    headline = text.partition("\n")[0]
    for one in struck:
        may = MAY[one.fault.kind]
        if kind in may.ends and re.search(may.said, text):
            return []
    problem = f"{kind}: {headline}"
    if len(losses) <= retries and not killed_again_and_again(struck):
        return [f"an error that no fault explains, after {len(losses)} losses with retries={retries}: {problem}"]
    if kind not in ERRORS_OF_LOSSES:
        return [f"a loss, and an error of another class: {problem}"]
    if not explained(headline, losses):
        return [f"a loss, and an error that does not say so: {problem}"]
    if retries and f"Given up after {again + 1} attempts" not in text and "Given up: rank" not in text:
        return [f"an error after all retries that does not tell of them: {text}"]
    return []


def killed_again_and_again(struck: Sequence[Struck]) -> bool:
    """Return whether three kills of a rank may have hit the same one at the same step."""
    return sum(one.fault.kind in ("rank killed", "fork server killed") for one in struck) >= 3


def differences(found: Mapping[str, Any], reference: Mapping[str, Any]) -> list[str]:
    """Return the parts of a result that are not, bit for bit, those of the undisturbed training."""
    return [
        f"{name} is {found.get(name)!r:.300}, and without faults {reference.get(name)!r:.300}"
        for name in sorted({*found, *reference})
        if found.get(name) != reference.get(name)
    ]
