"""`Gang`: the settings of a gang, shared by `launch` and every estimator (any process)."""

from __future__ import annotations

import dataclasses
import inspect
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Literal, TypeVar, get_args

from tritium.accelerators import GPU
from tritium.errors import BadSetting
from tritium.frameworks import NAMES, find
from tritium.frameworks.framework import Framework
from tritium.hints import nearest, question
from tritium.observe.trace import profiled
from tritium.shown import call, changed_fields

F = TypeVar("F", bound=Callable[..., Any])

Where = Literal["cluster", "driver", "here"]
ENTRY_POINTS = "tritium.launchers"
"""The group of entry points with further values of `on`."""
Output = Literal["all", "rank 0", "none"]
Logs = Literal["text", "json"]
OnStall = Literal["end", "report"]

_RESOURCE = re.compile(r"[A-Za-z][\w-]*")
_LONGEST_SECONDS = 1e9  # Locks and selectors refuse timeouts much longer than these 31 years.
ELSEWHERE = {
    **dict.fromkeys(("num_workers", "num_processes", "num_proc", "num_procs", "num_ranks"), "ranks"),
    **dict.fromkeys(("np", "nproc", "nprocs", "n_procs", "nproc_per_node", "world_size", "num_tasks"), "ranks"),
    **dict.fromkeys(("use_gpu", "num_gpus", "gpus_per_rank", "num_gpus_per_worker", "resources_per_worker"), "gpus"),
    **dict.fromkeys(("accelerator_type", "gpu_kind", "gpu_types", "gpu_name"), "gpu_type"),
    **dict.fromkeys(("resource", "resource_name", "accelerator_resource", "device_type"), "accelerator"),
    **dict.fromkeys(("num_cpus", "cpus_per_rank", "threads"), "cpus"),
    **dict.fromkeys(("max_restarts", "max_failures", "max_retries"), "retries"),
    **dict.fromkeys(("environment", "env_vars", "environ"), "env"),
}
"""Name in another launcher → the setting here."""
FRAMEWORKS_ELSEWHERE = {
    **dict.fromkeys(("pytorch", "ddp", "nccl", "gloo"), "torch"),
    **dict.fromkeys(("tf", "tf2", "mwms"), "tensorflow"),
    **dict.fromkeys(("hf", "transformers", "accelerate"), "huggingface"),
    **dict.fromkeys(("pl", "pytorch_lightning", "pytorch-lightning"), "lightning"),
    **dict.fromkeys(("lgbm", "lgb"), "lightgbm"),
    **dict.fromkeys(("mpi4py", "mpich", "openmpi"), "mpi"),
    **dict.fromkeys(("hvd",), "horovod"),
    **dict.fromkeys(("flax", "optax", "equinox"), "jax"),
}
"""Another name → the framework."""


def showing(*sources: type) -> Callable[[F], F]:
    """Decorate a function: its signature shows the fields of these dataclasses instead of its **keywords.

    Notebooks use the signature for completion and help. Type checkers and editors read `keywords.pyi`.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        kept = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        fields = [f for source in sources for f in dataclasses.fields(source)]
        shown = [
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=_default(f), annotation=f.type)
            for f in fields
        ]
        function.__signature__ = signature.replace(parameters=[*kept, *shown])  # type: ignore[attr-defined]
        return function

    return decorate


def _default(shown: dataclasses.Field[Any]) -> Any:
    if shown.default_factory is not dataclasses.MISSING:
        return shown.default_factory()
    return inspect.Parameter.empty if shown.default is dataclasses.MISSING else shown.default


def _field(default: Any, doc: str) -> Any:
    if callable(default):
        return field(default_factory=default, metadata={"doc": doc})
    return field(default=default, metadata={"doc": doc})


def as_int(value: Any) -> Any:
    """Return a whole number (also NumPy's) as an int; anything else unchanged."""
    try:
        return value if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return value


@dataclass(frozen=True, kw_only=True)
class Gang:
    """The settings of a gang. `launch` and every estimator take `gang=`, or these fields directly as keywords."""

    ranks: int | tuple[int, int] = _field(
        1,
        "World size: how many ranks are started together, each as one Spark task. (least, most): as many as there are "
        "slots for, also when the gang is formed again after a loss.",
    )
    cpus: int | None = _field(
        None,
        "CPU cores of a rank: the cores of its Spark task, and the threads of OpenMP and torch. "
        "None: as `spark.task.cpus` says.",
    )
    gpus: float = _field(
        0,
        "GPUs of a rank, assigned by Spark: a whole number, or a fraction up to 0.5 of one that as many ranks share. "
        "A rank never falls back to the CPU.",
    )
    accelerator: str = _field(
        "gpu",
        'The Spark resource that `gpus` counts, as in `spark.executor.resource.gpu.amount`. Another name, as "npu" or '
        '"fpga", gives ranks those devices.',
    )
    gpu_type: str | Sequence[str] | None = _field(
        None,
        'The kind of GPU that every rank must have, "H100", or a list: a part of the name that NVIDIA gives it. '
        "Checked before the function is called. None: any.",
    )
    mixed: Literal["refuse", "allow"] = _field(
        "refuse",
        'Whether GPUs of several kinds may train together: "refuse" ends such a gang before the function is called, as '
        'each step waits for the slowest one; "allow" lets it train.',
    )
    env: Mapping[str, str] = _field(dict, "Environment variables set in every rank before anything is imported.")
    run_dir: str | None = _field(
        None,
        "Where events, logs, the report and what the ranks store are written: any fsspec path. "
        "None: a new directory under `$TRITIUM_RUNS`, or under `tritium-runs` here.",
    )
    retries: int = _field(
        2,
        "How often the gang is started again after a loss (a killed rank, a lost executor or host, lost map output), "
        "from the newest checkpoint. An exception of the function is raised at once.",
    )
    persist: bool = _field(
        False,
        "Whether the rows that are dealt to the ranks stay in Spark's block storage until the run has ended, so that a "
        "retry reads them there instead of computing the source again. A lost executor takes a part of them along: "
        "then all are computed again.",
    )
    start_timeout: float = _field(600.0, "Seconds within which every rank must have started, slots included.")
    replacement_timeout: float | None = _field(
        None,
        "Seconds for which a gang that could start with fewer ranks, `ranks=(least, most)`, waits for replacements of "
        "lost executors, and any gang whose session has lost some since its last launch. One that is formed again and "
        "has too few slots waits for `start_timeout`. None: 60 on Kubernetes, 30 on YARN, elsewhere 15.",
    )
    max_runtime: float | None = _field(
        None,
        "Seconds after which the run ends itself, its retries included: the ranks save a checkpoint (see "
        "`World.preempted`), and the launch raises MaxRuntimeReached. None: it may take any time.",
    )
    stall_timeout: float = _field(
        600.0,
        "Seconds without progress after which a rank is considered hung.",
    )
    on_stall: OnStall = _field(
        "end",
        'What is done when a rank hangs: "end" the gang with the error `Stalled`, or only "report" it, '
        "with the stacks of every rank in the run directory.",
    )
    framework: str | Framework | None = _field(
        None,
        "The framework that ranks are set up for: its name, or an object with its settings. A rank imports it while "
        f"its rows arrive, and connects it to the other ranks. There are {', '.join(NAMES)}. None: torchrun's "
        "variables alone, which are enough for torch.",
    )
    on: Where = _field(
        "cluster",
        'Where the ranks run: "cluster" (Spark tasks), "driver" (child processes on this machine, no JVM), '
        '"here" (this process, one rank: for a debugger), or the name of a launcher that another package adds.',
    )
    output: Output = _field("all", 'Whose stdout and stderr is shown live: "all", "rank 0" or "none".')
    logs: Logs = _field(
        "text",
        "How ranks write what Python's `logging` is given, with the levels of the driver: 'text', in the driver's "
        "format where it has one, or 'json', a line of JSON for each record, with its rank.",
    )
    trace: bool | str = _field(
        False,
        "Whether to measure where each rank's steps spend their time: the report then says so, with one line on what "
        "they wait for, and trace.json in the run directory is a timeline of all ranks. Costs a few microseconds for "
        'every module of the model and step; on a GPU, each section waits for its end. "torch": torch\'s profiler '
        'runs in steps 5 to 9, too, and the timeline has its operators and kernels; "torch:100-104": in these steps.',
    )
    progress: bool = _field(True, "Whether progress is shown: a live display on a terminal, plain lines elsewhere.")
    ui: bool | None = _field(
        None,
        "Whether the driver serves a page for the browser that shows its runs while they go on, until the driver ends. "
        "Its address is printed. Needs the extra `ui`. None: where the session has `spark.tritium.ui=true`, and the "
        "driver that extra.",
    )
    tls: bool | None = _field(
        None,
        "Whether the connections of the ranks' tasks to the driver, and those of `tr.fetch` between hosts, are "
        "encrypted: TLS 1.3 with a certificate of the run, which travels with its job. The driver needs the extra "
        "`tls`. None: where Spark encrypts its own connections, and the driver has that extra.",
    )
    env_packages: str | Sequence[str] = _field(
        tuple,
        "Packages of the ranks alone: the path of a requirements file, or its lines; wheels of this machine by their "
        "paths. They are installed once on each host, by uv or pip as these are set up there, and come before those of "
        "the executors' Python.",
    )
    py_files: Sequence[str] = _field(
        tuple, "Python files, packages (directories) and zips of the user's that the ranks can import."
    )

    def __post_init__(self) -> None:
        wrong = list(self._wrong())
        if wrong:
            raise BadSetting("Gang: " + " ".join(wrong), settings=wrong)

    def __repr__(self) -> str:
        return call("Gang", changed_fields(self))

    @property
    def least(self) -> int:
        """The least world size."""
        return self.ranks[0] if isinstance(self.ranks, tuple) else self.ranks

    @property
    def most(self) -> int:
        """The largest world size."""
        return self.ranks[1] if isinstance(self.ranks, tuple) else self.ranks

    def _wrong(self) -> Any:
        if isinstance(self.ranks, list | tuple):  # Params of Spark ML keep no tuples.
            object.__setattr__(self, "ranks", tuple(map(as_int, self.ranks)))
        for name in ("ranks", "cpus", "retries"):
            object.__setattr__(self, name, as_int(getattr(self, name)))
        if isinstance(self.ranks, tuple):
            whole = len(self.ranks) == 2 and all(isinstance(n, int) and not isinstance(n, bool) for n in self.ranks)
            if not whole or not 1 <= self.ranks[0] <= self.ranks[1]:
                yield f"ranks={self.ranks!r} must be a whole number, or (least, most) with 1 <= least <= most."
        for name, least in (("ranks", 1), ("cpus", 1), ("retries", 0)):
            value = getattr(self, name)
            if (value is None and name == "cpus") or isinstance(value, tuple):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                yield f"{name}={value!r} must be a whole number of at least {least}."
        yield from self._wrong_accelerators()
        places = get_args(Where)
        for name, choices in (
            ("on", places if self.on in places else (*places, *entry_points(group=ENTRY_POINTS).names)),
            ("output", ("all", "rank 0", "none")),
            ("logs", ("text", "json")),
            ("on_stall", ("end", "report")),
            ("mixed", ("refuse", "allow")),
            *((name, (None, True, False)) for name in ("tls", "ui")),
            *((name, (True, False)) for name in ("persist", "progress")),
        ):
            if getattr(self, name) not in choices:
                yield f"{name}={getattr(self, name)!r} is unknown; choose one of {', '.join(map(repr, choices))}."
        yield from self._wrong_framework()
        yield from self._wrong_trace()
        if self.on == "here" and self.ranks not in (1, (1, 1)):
            yield f'on="here" runs in this process, so ranks={self.ranks} must be 1; on="driver" starts several.'
        for name in ("start_timeout", "stall_timeout", "replacement_timeout", "max_runtime"):
            value = getattr(self, name)
            if value is None and name in ("replacement_timeout", "max_runtime"):
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                yield f"{name}={value!r} must be a number of seconds above 0."
            elif value > _LONGEST_SECONDS:
                object.__setattr__(self, name, _LONGEST_SECONDS)
        for key, value in dict(self.env).items():
            if not isinstance(key, str) or not isinstance(value, str):
                yield f"env[{key!r}]={value!r}: names and values must be strings."
            elif not key or "=" in key or "\0" in key + value:
                yield f"env[{key!r}]={value!r}: a name must not be empty or hold '=', and neither may hold a NUL."
        if self.env_packages and self.on == "here":
            yield 'env_packages= is for processes of ranks, and on="here" has none; on="driver" starts them.'
        lines = self.env_packages if isinstance(self.env_packages, list | tuple) else [self.env_packages]
        if not all(isinstance(line, str) for line in lines):
            yield f"env_packages={self.env_packages!r} must be the path of a requirements file, or a list of its lines."
        if isinstance(self.py_files, str):
            yield f"py_files={self.py_files!r} must be a list of paths."

    def _wrong_accelerators(self) -> Any:
        gpus, name = as_int(self.gpus), self.accelerator
        number = isinstance(gpus, int | float) and not isinstance(gpus, bool)
        if not number or not (0 < gpus <= 0.5 or (gpus >= 0 and gpus % 1 == 0)):
            yield (
                f"gpus={gpus!r} must be a whole number of at least 0, or a fraction of a GPU that ranks share, up to "
                "0.5."
            )
        else:
            object.__setattr__(self, "gpus", int(gpus) if gpus % 1 == 0 else float(gpus))
        if not isinstance(name, str) or not _RESOURCE.fullmatch(name):
            yield f'accelerator={name!r} must be the name of a resource in Spark, as "gpu", "npu" or "fpga".'
        elif name != GPU and not gpus:
            yield f"accelerator={name!r} needs gpus=, the number of them that a rank has: gpus=1."
        elif name != GPU and self.on in ("driver", "here"):
            yield f"accelerator={name!r}: only Spark tells where those are, and on={self.on!r} starts no Spark task."

        kinds = [self.gpu_type] if isinstance(self.gpu_type, str) else self.gpu_type
        if kinds is None:
            return
        if not isinstance(kinds, list | tuple) or not kinds or not all(isinstance(k, str) and k.strip() for k in kinds):
            yield f'gpu_type={self.gpu_type!r} must be a part of a GPU\'s name, as "H100", or a list of such.'
        elif not gpus or name != GPU:
            yield f"gpu_type={self.gpu_type!r} needs GPUs: gpus=1."
        elif self.on == "here":
            yield f'gpu_type={self.gpu_type!r} is checked when ranks start; on="here" starts none, on="driver" does.'

    def _wrong_framework(self) -> Any:
        if isinstance(self.framework, list | tuple | set):
            yield f"framework={self.framework!r}: a gang has one framework. Name the one that connects the ranks."
        elif isinstance(self.framework, type) and issubclass(self.framework, Framework):
            yield f"framework={self.framework.__name__} is a class; write framework={self.framework.__name__}()."
        elif isinstance(self.framework, str) and self.framework not in NAMES:
            near = FRAMEWORKS_ELSEWHERE.get(self.framework.lower()) or nearest(self.framework, NAMES)
            known = question(near) if near else f" There are: {', '.join(map(repr, NAMES))}."
            yield f"framework={self.framework!r} is unknown.{known}"
        elif self.framework is not None and not isinstance(self.framework, str | Framework):
            yield f"framework={self.framework!r:.80} must be one of {', '.join(map(repr, NAMES))}, or None."
        elif (framework := find(self.framework)) is not None:
            yield from framework.wrong(self.least if isinstance(self.ranks, int | tuple) else 1)
            if profiled(self.trace) and not framework.tensors:
                others = [repr(name) for name in NAMES if getattr(find(name), "tensors", False)]
                yield (
                    f"trace={self.trace!r} is torch's profiler, for framework={', '.join(others)} or None. With "
                    f"{framework.name!r}, trace= is True or False."
                )

    def _wrong_trace(self) -> Any:
        if self.trace not in (True, False) and not profiled(self.trace):
            yield (
                f"trace={self.trace!r} is unknown; choose one of True, False, 'torch', or 'torch:100-104' for torch's "
                "profiler in other steps than 5 to 9."
            )
        elif self.on == "here" and self.trace:
            yield (
                f'trace={self.trace!r} hooks into torch, which on="here" would leave in this process; on="driver" can '
                "be traced."
            )

    @classmethod
    def fields(cls) -> tuple[str, ...]:
        """Return the names of the settings, in order."""
        return tuple(f.name for f in dataclasses.fields(cls))

    @classmethod
    def of(cls, gang: Gang | None, changes: Mapping[str, Any]) -> Gang:
        """Return `gang` (or the defaults) with `changes`.

        Raises BadSetting for a `gang` of another type, and for an unknown name, with the nearest known one.
        """
        if gang is not None and not isinstance(gang, cls):
            raise BadSetting(
                f"gang={gang!r:.80} is no tritium.Gang. What the function takes is passed as args=({gang!r:.80},), and "
                "the number of ranks as ranks=2.",
                setting="gang",
            )
        for name in changes:
            if name not in cls.fields():
                near = ELSEWHERE.get(name) or nearest(name, cls.fields())
                hint = question(near) if near else f" There are: {', '.join(cls.fields())}."
                raise BadSetting(f"There is no setting {name!r} of a gang.{hint}", setting=name)
        return dataclasses.replace(gang or cls(), **changes)
