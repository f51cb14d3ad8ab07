"""What is known of a rank that failed, on its way to the driver and as the error raised there (any process)."""

from __future__ import annotations

import dataclasses
import pickle
import re
import signal as signals
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tritium import errors, ship
from tritium.errors import RankFailed, Stalled, TritiumError
from tritium.gang.vitals import killed_for

How = Literal["exception", "signal", "exit", "lost", "orphaned", "error", "stalled", "regroup"]

STACKS_BYTES = 1 << 16  # of all ranks, in an exception

# What a collective says when its partner is gone. Such an exception waits a moment for the death that caused it.
_ECHO = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|gloo|nccl|DistBackendError|DistNetworkError|"
    r"remote process exited|socket (timeout|closed)",
    re.IGNORECASE,
)


class Regroup(BaseException):
    """The gang ends to be started again with more ranks: no failure, and nothing that a function should catch."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The end of one rank.

    `how` is "exception" (the user's function raised), "signal" (killed), "exit" (the process left without returning),
    "lost" (its supervisor is gone), "orphaned" (what its supervisor belongs to is; `text` says what), "stalled" (it
    makes no progress; `text` is the story), "error" (an error of Tritium's own tree, such as BadRow: raised as it is)
    or "regroup" (none: the gang has saved its state, to be started again with more ranks). `memory` are figures of a
    rank that was killed, `at` is where it stood (its step and phase), `others` what the other ranks were doing,
    `stacks` stay where they were collected, as they are large.
    """

    how: How
    rank: int
    host: str = "?"
    pid: int = 0
    type: str = ""
    text: str = ""
    traceback: str = ""
    signal: str | None = None
    exit_code: int | None = None
    log: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    memory: Mapping[str, Any] | None = None
    at: Mapping[str, Any] = field(default_factory=dict)
    stacks: Mapping[int, str] = field(default_factory=dict)
    pickled: bytes = b""

    @classmethod
    def of(cls, error: BaseException, rank: int, **facts: Any) -> Failure:
        """The failure that an exception is. The exception travels too, where it can be pickled."""
        try:
            pickled = ship.pickle(error)
            pickle.loads(pickled)  # what can't be rebuilt here can't be rebuilt on the driver either
        except Exception as problem:  # noqa: BLE001 - any class may refuse in any way; its text still travels
            facts.setdefault("log", (f"(this exception can't be pickled: {problem!r})",))
            pickled = b""
        return cls(
            how="error" if isinstance(error, TritiumError) else "exception",
            rank=rank,
            type=f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins."),
            text=str(error),
            traceback="".join(traceback.format_exception(error)),
            pickled=pickled,
            **facts,
        )

    @property
    def is_echo(self) -> bool:
        """Whether this may only be what another rank's death looks like from here."""
        return self.how == "exception" and bool(_ECHO.search(f"{self.type} {self.text}"))

    def headline(self) -> str:
        """One line: who, where, how."""
        who = f"rank {self.rank} on {self.host}"
        if self.how == "signal":
            more = f": {killed_for(self.memory or {})}" if self.signal == "SIGKILL" else ""
            return f"{who} (pid {self.pid}) was killed by {self.signal}{self._place()}{more}"
        if self.how == "stalled":
            return self.text.partition("\n")[0].rstrip(".")
        if self.how == "exit":
            how = (
                f": {self.text}"
                if self.text
                else f" with exit code {self.exit_code} before its function returned{self._place()}"
            )
            return f"{who} (pid {self.pid}) left{how}"
        if self.how == "regroup":
            return "the gang starts again with more ranks"
        if self.how in ("lost", "orphaned"):
            return f"{who} was lost: {self.text or 'the connection to its supervisor broke'}"
        return f"{who} (pid {self.pid}) raised {self.type}: {self.text}"

    def _place(self) -> str:
        step, phase = self.at.get("step"), self.at.get("phase")
        return "" if step is None else f" ({phase if f'step {step}' in str(phase) else f'step {step}, {phase}'})"

    @property
    def is_loss(self) -> bool:
        """Whether the rank was taken away, or lost its connection to one that was, and did not fail by itself."""
        return self.how in ("signal", "exit", "lost", "orphaned") or self.is_echo

    def error(self, run_dir: str | None = None) -> TritiumError | Regroup:
        """The exception for the driver: Tritium's own as it was raised, any other as the cause of RankFailed."""
        if self.how == "regroup":
            return Regroup("slots have come back")
        cause = self.cause()
        if isinstance(cause, TritiumError) and self.how == "error":
            here = {"rank": self.rank, "host": self.host, "pid": self.pid, "run_dir": run_dir}
            cause.__dict__.update(here | cause.__dict__)  # an error that names a rank means the one at fault
            cause.__dict__["rank_traceback"] = self.traceback
            return cause
        if self.how == "stalled":
            return self._stalled(run_dir)
        story = [self.headline()[0].upper() + self.headline()[1:] + "."]
        if self.traceback:
            story += ["", f"Its traceback (rank {self.rank}):", self.traceback.rstrip()]
        if self.log:
            story += ["", f"Its last {len(self.log)} lines of output:", *self.log]
        if self.others:
            story += ["", "Meanwhile the others:", *(f"  {line}" for line in self.others)]
        error = RankFailed(
            "\n".join(story),
            rank=self.rank,
            host=self.host,
            pid=self.pid,
            signal=self.signal,
            exit_code=self.exit_code,
            lost=self.is_loss,
            headline=self.headline(),
            step=self.at.get("step"),
            phase=self.at.get("phase"),
            traceback=self.traceback,
            log=list(self.log),
            memory=self.memory,
            run_dir=run_dir,
        )
        error.__cause__ = cause
        return error

    def _stalled(self, run_dir: str | None) -> Stalled:
        story = [self.text[0].upper() + self.text[1:]]
        if run_dir:
            story += ["", f"The whole stacks of every rank: {run_dir}/stacks"]
        story += [
            "",
            "If this is how long the work takes: raise stall_timeout, call tritium.world().log() now and then, or say "
            'on_stall="report".',
        ]
        facts: dict[str, Any] = {
            "traceback": "",
            "log": list(self.log),
            "signal": None,
            "exit_code": None,
            "run_dir": run_dir,
        }
        facts |= {"rank": self.rank, "host": self.host, "pid": self.pid, "memory": None, "stacks": dict(self.stacks)}
        facts |= {"lost": False, "headline": self.headline(), "step": None, "phase": "", "seconds": 0.0}
        return Stalled("\n".join(story), **{**facts, **self.at})

    def cause(self) -> BaseException | None:
        """The rank's own exception, where it can be rebuilt here."""
        if not self.pickled:
            known = getattr(errors, self.type.removeprefix("tritium.errors."), None) if self.how == "error" else None
            return known(self.text) if known else None
        try:
            cause = pickle.loads(self.pickled)
        except Exception:  # noqa: BLE001 - its class may be missing here; type, text and traceback are in the story
            return None
        return cause if isinstance(cause, BaseException) else None

    def fields(self) -> dict[str, Any]:
        """All but the pickled exception, as JSON; that one travels as a message's blob."""
        fields = dataclasses.asdict(self)
        del fields["pickled"], fields["stacks"]
        return fields

    def with_stacks(self) -> dict[str, Any]:
        """`fields`, and as much of every rank's stacks as is fit to travel through Spark's exceptions."""
        each = STACKS_BYTES // max(1, len(self.stacks))
        return {**self.fields(), "stacks": {str(rank): text[:each] for rank, text in self.stacks.items()}}

    @classmethod
    def read(cls, fields: dict[str, Any], pickled: bytes) -> Failure:
        """The inverse of `fields` and of `with_stacks`."""
        known = {f.name for f in dataclasses.fields(cls)}
        fields = {k: v for k, v in fields.items() if k in known}
        lists = {name: tuple(fields.get(name, ())) for name in ("log", "others")}
        stacks = {int(rank): text for rank, text in fields.get("stacks", {}).items()}
        return cls(**{**fields, **lists, "stacks": stacks, "pickled": pickled})


def signal_name(number: int) -> str:
    """9 → "SIGKILL"."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"
