"""The failure of a rank: a message on its way to the driver, and the error raised there (any process)."""

from __future__ import annotations

import dataclasses
import os
import pickle
import re
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tritium import errors, ship
from tritium.checkpoint.control import Regroup
from tritium.errors import RankFailed, Stalled, TritiumError
from tritium.events import FailureFacts
from tritium.frameworks import patterns
from tritium.gang.killed import killed_for
from tritium.wire import clip

How = Literal["exception", "signal", "exit", "lost", "orphaned", "error", "stalled", "returned", "regroup"]

# The limits of a failure's parts are together below that of a message's header, so that it can always be sent.
STACKS_BYTES = 1 << 16
"""The limit of all ranks' stacks within an exception's text."""
HEADLINE_BYTES = 1 << 12
_BYTES = {"text": 1 << 18, "traceback": 3 << 16, "type": 1 << 11, "host": 1 << 11, "signal": 1 << 8}
_LINES = {"log": (32, 1 << 12), "others": (8, 1 << 13)}
_FIGURE_BYTES = 1 << 10
"""The limit of a text in `memory` or `at`."""
PICKLED_BYTES = 1 << 22
"""A larger exception is sent as text."""

# Beside those of each framework, these texts are of a collective whose partner has died. They count only when the code
# of one of _SPEAKERS raised them, as a refused connection may as well be that of the user's database.
_PERHAPS = re.compile(r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket (timeout|closed)", re.I)
_SPEAKERS = ("torch", "jax", "jaxlib", "tensorflow", "keras", "horovod", "mpi4py", "lightgbm", "xgboost")

ADVICE = {
    "stalled": "If this is how long the work takes: raise stall_timeout, call tritium.world().log() now and then, or "
    'say on_stall="report".',
    "returned": "Every rank must make the same collective calls: let all take as many steps (an epoch of "
    "world.shard(…) has as many on each), and decide together when to stop (world.gather(…)).",
}


@dataclass(frozen=True, kw_only=True)
class Failure(FailureFacts):
    """The failure of one rank.

    how    : one of:
        "exception": the user's function raised. "error": an error of Tritium's own, such as BadRow, raised as it is.
        "signal": the process was killed. "exit": it left before the function returned.
        "lost": its supervisor is gone. "orphaned": its supervisor's parent is gone, as `text` says.
        "stalled": it makes no progress; `text` is the report.
        "returned": its function has returned, and another rank waited for it in vain; `text` is the report.
        "regroup": no failure; the gang has saved its state, to be started again elsewhere or with more ranks.

    stacks : rank → text; too large for `fields`.
    Other fields are those of FailureFacts.
    """

    how: How
    stacks: Mapping[int, str] = field(default_factory=dict)
    pickled: bytes = b""

    def __post_init__(self) -> None:
        """Cut every text that exceeds its limit in the middle."""
        short: dict[str, Any] = {}
        for name, limit in _BYTES.items():
            text = getattr(self, name)
            short[name] = None if text is None else clip(text, limit)
        for name, (lines, limit) in _LINES.items():
            short[name] = tuple(clip(line, limit) for line in getattr(self, name)[-lines:])
        for name in ("memory", "at"):
            figures = getattr(self, name)
            short[name] = figures and {
                k: clip(v, _FIGURE_BYTES) if isinstance(v, str) else v for k, v in figures.items()
            }
        for name, value in short.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, error: BaseException, rank: int, **facts: Any) -> Failure:
        """Make a failure from an exception, with the pickled exception where that is possible.

        facts : further fields.
        Raises nothing, whatever the exception's own methods do.
        """
        try:
            pickled = ship.pickle_from_rank(error)
            pickle.loads(pickled)  # If it can't be rebuilt here, it can't be on the driver.
            if len(pickled) > PICKLED_BYTES:
                size = f"{len(pickled):,} bytes, over the limit of {PICKLED_BYTES:,}"
                facts.setdefault("log", (f"(this exception is not sent along as an object: pickled it is {size})",))
                pickled = b""
        except Exception as problem:  # noqa: BLE001 - any class may refuse in any way; its text still travels
            facts.setdefault("log", (f"(this exception can't be pickled: {_shown(problem, repr)})",))
            pickled = b""
        return cls(
            how="error" if isinstance(error, TritiumError) else "exception",
            rank=rank,
            type=f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins."),
            text=_shown(error, str),
            traceback=_shown(error, lambda error: "".join(traceback.format_exception(error))),
            secondary=not isinstance(error, TritiumError) and _is_secondary(error),
            pickled=pickled,
            **facts,
        )

    @classmethod
    def of_coordinator(cls, error: Exception) -> Failure:
        """Make the failure of a gang whose coordinator raised `error`; no rank is at fault (`rank` is -1)."""
        host = socket.gethostname()
        problem = TritiumError(
            f"The coordinator of this run failed on {host}: {type(error).__name__}: {error}. No rank is at fault; all "
            "have been ended. Please report it with `error.rank_traceback`."
        )
        problem.__cause__ = error
        return cls.of(problem, -1, host=host, pid=os.getpid())

    def with_output(self, tail: Sequence[str]) -> Failure:
        """Return this failure with the last lines of the rank's output, which may tell that it is secondary."""
        aborted = self.signal == "SIGABRT" and any(p.search(line) for p in patterns("aborts") for line in tail)
        return dataclasses.replace(self, log=(*self.log, *tail), secondary=self.secondary or aborted)

    @property
    def doubt(self) -> int:
        """Whether another rank's death may have caused this: 0, no; 1, perhaps; 2, probably.

        Perhaps: a function may exit, and a library may abort, when a collective fails.
        """
        return 2 if self.secondary else int(self.how == "exit" or self.signal == "SIGABRT")

    def headline(self) -> str:
        """Return one line: rank, host, how it failed."""
        who = f"rank {self.rank} on {self.host}"
        if self.how == "signal":
            more = f": {killed_for(self.memory or {})}" if self.signal == "SIGKILL" else ""
            return f"{who} (pid {self.pid}) was killed by {self.signal}{self._place()}{more}"
        if self.how in ("stalled", "returned"):
            return clip(self.text.partition("\n")[0], HEADLINE_BYTES).rstrip(".")
        if self.how == "exit":
            how = (
                f": {clip(self.text, HEADLINE_BYTES)}"
                if self.text
                else f" with exit code {self.exit_code} before its function returned{self._place()}"
            )
            return f"{who} (pid {self.pid}) left{how}"
        if self.how == "regroup":
            return f"the gang has saved its state, and ends: {self.text}"
        if self.how in ("lost", "orphaned"):
            text = clip(self.text, HEADLINE_BYTES) or "the connection to its supervisor broke"
            return f"{who} was lost: {text}"
        return f"{who} (pid {self.pid}) raised {self.type}: {clip(self.text, HEADLINE_BYTES)}"

    def _place(self) -> str:
        step, phase = self.at.get("step"), self.at.get("phase")
        return "" if step is None else f" ({phase if f'step {step}' in str(phase) else f'step {step}, {phase}'})"

    @property
    def is_loss(self) -> bool:
        """Whether the rank was killed or lost, or failed as a consequence of that; then a retry may help."""
        if self.how == "exit":
            return not self._is_exit_of_its_own or self.secondary
        return self.how in ("signal", "lost", "orphaned") or self.secondary

    @property
    def _is_exit_of_its_own(self) -> bool:
        """Whether the program chose to fail, by sys.exit: argparse does for a wrong option.

        Not with 0 or a code over 128, by which a program ends for a signal that it handles.
        """
        return self.type == SystemExit.__name__ and self.exit_code != 0 and not 128 < (self.exit_code or 0) < 256

    def error(self, run_dir: str | None = None) -> TritiumError | Regroup:
        """Return the exception for the driver: Tritium's own as it was, any other as the cause of RankFailed."""
        if self.how == "regroup":
            return Regroup(self.text)
        cause = self.cause()
        if isinstance(cause, TritiumError) and self.how == "error":
            here = {"rank": self.rank, "host": self.host, "pid": self.pid, "run_dir": run_dir}
            cause.__dict__.update(here | cause.__dict__)  # A rank that the error names is the one at fault.
            cause.rank_traceback = self.traceback
            return cause
        if self.how in ("stalled", "returned"):
            return self._stalled(run_dir)
        trace = ["", f"Its traceback (rank {self.rank}):", self.traceback.rstrip()] if self.traceback else []
        output = ["", f"Its last {len(self.log)} lines of output:", *self.log] if self.log else []
        first = [output, trace] if self.type == SystemExit.__name__ else [trace, output]  # Its output has the reason.
        lines = [self.headline()[0].upper() + self.headline()[1:] + ".", *first[0], *first[1]]
        if self.others:
            lines += ["", "Meanwhile the others:", *(f"  {line}" for line in self.others)]
        error = RankFailed(
            "\n".join(lines),
            rank=self.rank,
            host=self.host,
            pid=self.pid,
            signal=self.signal,
            exit_code=self.exit_code,
            lost=self.is_loss,
            out_of_memory=self._is_out_of_memory(),
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

    def _is_out_of_memory(self) -> bool:
        killed = self.signal == "SIGKILL" and bool((self.memory or {}).get("oom_kills"))
        return killed or self.type == MemoryError.__name__

    def _stalled(self, run_dir: str | None) -> Stalled:
        lines = [self.text[0].upper() + self.text[1:]]
        if run_dir and self.how == "stalled":
            lines += ["", f"The whole stacks of every rank: {run_dir}/stacks"]
        lines += ["", ADVICE[self.how]]
        facts: dict[str, Any] = {
            "traceback": self.traceback,
            "log": list(self.log),
            "signal": None,
            "exit_code": None,
            "run_dir": run_dir,
        }
        facts |= {"rank": self.rank, "host": self.host, "pid": self.pid, "memory": None, "stacks": dict(self.stacks)}
        facts |= {"lost": False, "headline": self.headline(), "step": None, "phase": "", "seconds": 0.0}
        return Stalled("\n".join(lines), **{**facts, **self.at})

    def cause(self) -> BaseException | None:
        """Return the rank's own exception if it can be unpickled here, else None."""
        if not self.pickled:
            known = getattr(errors, self.type.removeprefix("tritium.errors."), None) if self.how == "error" else None
            return known(self.text) if known else None
        if self.type.startswith("mpi4py.") and "mpi4py.MPI" not in sys.modules:
            return None  # To unpickle it would call MPI_Init in this process.
        try:
            cause = pickle.loads(self.pickled)
        except Exception:  # noqa: BLE001 - its class may be missing here; type, text and traceback are in the message
            return None
        return cause if isinstance(cause, BaseException) else None

    def fields(self) -> dict[str, Any]:
        """Return the JSON fields: all but `stacks` and `pickled`, which is sent as the message's blob."""
        fields = dataclasses.asdict(self)
        del fields["pickled"], fields["stacks"]
        return fields

    def with_stacks(self) -> dict[str, Any]:
        """Return `fields` with every rank's stacks, cut to STACKS_BYTES in all."""
        limit = STACKS_BYTES // max(1, len(self.stacks))
        return {**self.fields(), "stacks": {str(rank): clip(text, limit) for rank, text in self.stacks.items()}}

    @classmethod
    def read(cls, fields: dict[str, Any], pickled: bytes) -> Failure:
        """The inverse of `fields` and of `with_stacks`."""
        known = {f.name for f in dataclasses.fields(cls)}
        fields = {k: v for k, v in fields.items() if k in known}
        lists = {name: tuple(fields.get(name, ())) for name in ("log", "others")}
        stacks = {int(rank): text for rank, text in fields.get("stacks", {}).items()}
        return cls(**{**fields, **lists, "stacks": stacks, "pickled": pickled})


def _is_secondary(error: BaseException) -> bool:
    """Tell whether an exception, or one in its chain, is that of a collective whose partner has died."""
    chain, seen = [error], set()
    while chain:
        one = chain.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        words = f"{type(one).__qualname__}: {clip(_shown(one, str), _BYTES['text'])}"
        if any(known.search(words) for known in patterns("secondary")):
            return True
        if _PERHAPS.search(words) and _speaker(one) in _SPEAKERS:
            return True
        chain += [other for other in (one.__cause__, one.__context__) if other is not None]
    return False


def _shown(error: BaseException, how: Callable[[BaseException], str]) -> str:
    """Return `how(error)`, or a substitute text if that raises, as a user's `__str__` may."""
    try:
        return how(error)
    except Exception as problem:  # noqa: BLE001 - see above
        return f"({type(error).__qualname__} can't be shown: {type(problem).__qualname__})"


def _speaker(error: BaseException) -> str:
    """Return the package whose code raised it; for a C extension, the package that called it."""
    frame, last = error.__traceback__, ""
    while frame is not None:
        last, frame = str(frame.tb_frame.f_globals.get("__name__", "")), frame.tb_next
    return last.partition(".")[0]
