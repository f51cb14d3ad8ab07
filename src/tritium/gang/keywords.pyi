"""Settings as keywords, for type checkers and editors: written by scripts/keywords.py."""

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from tritium.frameworks.framework import Framework
from tritium.gang.settings import Logs, OnStall, Output, Where

class GangKeywords(TypedDict, total=False):
    """The fields of `Gang`."""

    ranks: int | tuple[int, int]
    """World size: how many ranks are started together, each as one Spark task. (least, most): as many as there are
    slots for, also when the gang is formed again after a loss."""
    cpus: int | None
    """CPU cores of a rank: the cores of its Spark task, and the threads of OpenMP and torch. None: as
    `spark.task.cpus` says."""
    gpus: float
    """GPUs of a rank, assigned by Spark: a whole number, or a fraction up to 0.5 of one that as many ranks share. A
    rank never falls back to the CPU."""
    accelerator: str
    """The Spark resource that `gpus` counts, as in `spark.executor.resource.gpu.amount`. Another name, as "npu" or
    "fpga", gives ranks those devices."""
    gpu_type: str | Sequence[str] | None
    """The kind of GPU that every rank must have, "H100", or a list: a part of the name that NVIDIA gives it. Checked
    before the function is called. None: any."""
    mixed: Literal["refuse", "allow"]
    """Whether GPUs of several kinds may train together: "refuse" ends such a gang before the function is called, as
    each step waits for the slowest one; "allow" lets it train."""
    env: Mapping[str, str]
    """Environment variables set in every rank before anything is imported."""
    run_dir: str | None
    """Where events, logs, the report and what the ranks store are written: any fsspec path. None: a new directory
    under `$TRITIUM_RUNS`, or under `tritium-runs` here."""
    retries: int
    """How often the gang is started again after a loss (a killed rank, a lost executor or host, lost map output),
    from the newest checkpoint. An exception of the function is raised at once."""
    persist: bool
    """Whether the rows that are dealt to the ranks stay in Spark's block storage until the run has ended, so that a
    retry reads them there instead of computing the source again. A lost executor takes a part of them along: then
    all are computed again."""
    start_timeout: float
    """Seconds within which every rank must have started, slots included."""
    replacement_timeout: float | None
    """Seconds for which a gang that could start with fewer ranks, `ranks=(least, most)`, waits for replacements of
    lost executors, and any gang whose session has lost some since its last launch. One that is formed again and has
    too few slots waits for `start_timeout`. None: 60 on Kubernetes, 30 on YARN, elsewhere 15."""
    max_runtime: float | None
    """Seconds after which the run ends itself, its retries included: the ranks save a checkpoint (see
    `World.preempted`), and the launch raises MaxRuntimeReached. None: it may take any time."""
    stall_timeout: float
    """Seconds without progress after which a rank is considered hung."""
    on_stall: OnStall
    """What is done when a rank hangs: "end" the gang with the error `Stalled`, or only "report" it, with the stacks
    of every rank in the run directory."""
    framework: str | Framework | None
    """The framework that ranks are set up for: its name, or an object with its settings. A rank imports it while its
    rows arrive, and connects it to the other ranks. There are torch, lightning, huggingface, keras, tensorflow, jax,
    lightgbm, mpi, horovod. None: torchrun's variables alone, which are enough for torch."""
    on: Where
    """Where the ranks run: "cluster" (Spark tasks), "driver" (child processes on this machine, no JVM), "here" (this
    process, one rank: for a debugger), or the name of a launcher that another package adds."""
    output: Output
    """Whose stdout and stderr is shown live: "all", "rank 0" or "none"."""
    logs: Logs
    """How ranks write what Python's `logging` is given, with the levels of the driver: 'text', in the driver's
    format where it has one, or 'json', a line of JSON for each record, with its rank."""
    trace: bool | str
    """Whether to measure where each rank's steps spend their time: the report then says so, with one line on what
    they wait for, and trace.json in the run directory is a timeline of all ranks. Costs a few microseconds for every
    module of the model and step; on a GPU, each section waits for its end. "torch": torch's profiler runs in steps 5
    to 9, too, and the timeline has its operators and kernels; "torch:100-104": in these steps."""
    progress: bool
    """Whether progress is shown: a live display on a terminal, plain lines elsewhere."""
    ui: bool | None
    """Whether the driver serves a page for the browser that shows its runs while they go on, until the driver ends.
    Its address is printed. Needs the extra `ui`. None: where the session has `spark.tritium.ui=true`, and the driver
    that extra."""
    tls: bool | None
    """Whether the connections of the ranks' tasks to the driver, and those of `tr.fetch` between hosts, are
    encrypted: TLS 1.3 with a certificate of the run, which travels with its job. The driver needs the extra `tls`.
    None: where Spark encrypts its own connections, and the driver has that extra."""
    env_packages: str | Sequence[str]
    """Packages of the ranks alone: the path of a requirements file, or its lines; wheels of this machine by their
    paths. They are installed once on each host, by uv or pip as these are set up there, and come before those of the
    executors' Python."""
    py_files: Sequence[str]
    """Python files, packages (directories) and zips of the user's that the ranks can import."""
