"""docs/benchmarks.md, its plot, and docs/measurements.md, of benchmarks/results/*.json: python benchmarks/_page.py"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _suite
import control
import first_step
import horovod_optimizer
import keras_estimator
import loop
import real_tables
import rossmann
import train
import train_jax
import trees

PAGE, PLOT = _suite.ROOT / "docs" / "benchmarks.md", "benchmarks-train.svg"
FIGURES = PAGE.with_name("measurements.md")
HEAD = f"""# Benchmarks

![Seconds from DataFrame to model]({PLOT})

Seconds from a Spark DataFrame to a trained model: 1,000,000 rows × 64 floats, three epochs of a small network, two
ranks on two cores. A bar is the median, a dot is a run.

**The ideal** is the sum of what no system can avoid: the transform and a shuffle in Spark, the import of the framework
in two processes, and the training loop over tensors in RAM. Tritium can be faster than this sum. It does these parts at
the same time, and averages the gradients of one host in shared memory; PyTorch's DDP, in the ideal, sends them by TCP.
"""
COMPARISON = """## Comparison

The second column is Tritium's time. The others are multiples of it, from the same run of the same script: at 2 × a
system takes twice as long as Tritium, below 1 × it is faster.
[Measurements](measurements.md) has every figure, with its command.

| task | Tritium | the ideal | others |
|---|---|---|---|"""
MISSED = """## Goals that were missed

| what | goal | measured |
|---|---|---|"""
BOUNDS = "[Decision 011](decisions/011-where-the-time-went.md) has profiles that show what limits these figures."
METHOD = """## How it was measured

- The systems of a table took turns on one machine, each in a process and an environment of its own. On another machine
  expect other seconds, and similar ratios. Figures are medians; the measurements have the least and the most, too.
- `benchmarks/environments/` pins the versions. The first paragraph of each file in `benchmarks/systems/` says how its
  system was used, and what was decided in its favour.
- `make bench` measures all again, and writes this page from `benchmarks/results/`.
- Nothing was measured on many machines.
"""
EVERY = """# Measurements

Every figure behind the [benchmarks](benchmarks.md). Beside each command stand its date, commit and machine.
"""
SECONDS = {"seconds": ("seconds", ".1f")}
TRAINED = {**SECONDS, "loop s": ("loop", ".1f"), "mean squared error": ("mse", ".4f")}
COMPARED = (  # task, results, key of a run, its unit, Tritium's name there, results with the ideal beside it
    ("PyTorch, `launch`", "train", "seconds", "s", "Tritium, launch", "train_ideal"),
    ("PyTorch, `TorchEstimator`", "train", "seconds", "s", "Tritium, TorchEstimator", "train_ideal"),
    ("JAX, `launch`", "train_jax", "seconds", "s", train_jax.OURS, "train_jax"),
    ("`KerasEstimator`", "keras", "seconds", "s", keras_estimator.OURS, "keras"),
    ("`KerasEstimator`, Rossmann's sales", "rossmann", "seconds", "s", "Tritium, KerasEstimator", "rossmann"),
    ("`LightGBMRegressor`", "trees", "seconds", "s", trees.OURS, "trees"),
    ("A table with words, images, nulls", "real_tables", "seconds", "s", real_tables.AS_IT_IS, "real_tables"),
    ("Start of two ranks with a process group", "launch", "group", "s", "Tritium", "launch"),
    ("Reading images", "images", "seconds", "s", "Tritium", "images"),
    ("Scoring a table", "inference", "seconds", "s", "Tritium", "inference"),
    ("Scoring a stream, 99th percentile", "stream", "p99 ms", "ms", "Tritium", "stream"),
)
ESTIMATORS = {  # results -> title, columns
    "train_jax": ("JAX", TRAINED),
    "keras": ("Keras", TRAINED),
    "rossmann": ("Rossmann's sales", {**SECONDS, "RMSPE, validation": ("rmspe", ".4f")}),
    "trees": ("Trees", TRAINED),
    "real_tables": ("A table with words, images and nulls", {**SECONDS, "loss of the last epoch": ("loss", ".4f")}),
}
AS_BYTES = (  # case, side that it is compared with, how many times as fast it is wanted
    ("exchange 600k x 512, Parquet", "numbers", 1.5),
    ("exchange 600k x 512, Parquet", "mapInArrow", 1.3),
    ("exchange 600k x 512, kept", "numbers", 1.5),
    ("exchange 600k x 512, kept", "mapInArrow", 1.3),
    ("exchange 2M x 64 columns", "numbers", 1.25),
    ("scoring 150k x 512, cached", "predict_batch_udf", 1.5),
    ("scoring 600k x 512, cached", "predict_batch_udf", 1.5),
    ("scoring 600k x 512, Parquet", "predict_batch_udf", 1.2),
    ("scoring 2M x 64, Parquet", "predict_batch_udf", 1.7),
)
NAMES = {"nothing": "the query without a model"}  # system → its name in the comparison
SIDES = {"numbers": "the same, number by number", "mapInArrow": "Spark's `mapInArrow`"}
SAME = ("python", "numpy")  # versions that are not worth a word


@dataclass(frozen=True)
class Goal:
    """What was measured, and whether that is what was wanted; those that don't hold are rows of a table."""

    what: str
    wanted: str
    measured: str
    holds: bool

    def row(self) -> str:
        """In Markdown."""
        return f"| {self.what} | {self.wanted} | {self.measured} |"


def results() -> dict[str, Any]:
    """Name of a benchmark → what it has saved."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in _suite.RESULTS.glob("*.json")}


def at_most(what: str, limit: float, measured: float | None, unit: str = "") -> Goal:
    """A goal that is met by a small number; None: what was to be measured has failed."""
    return judged(what, f"≤ {limit:g}{unit}", measured, unit, lambda found: found <= limit)


def at_least(what: str, limit: float, measured: float | None, unit: str = "") -> Goal:
    """A goal that is met by a large number; None: what was to be measured has failed."""
    return judged(what, f"≥ {limit:g}{unit}", measured, unit, lambda found: found >= limit)


def judged(what: str, wanted: str, measured: float | None, unit: str, holds: Callable[[float], bool]) -> Goal:
    """For `at_most` and `at_least`."""
    if measured is None:
        return Goal(what, wanted, "failed", False)
    return Goal(what, wanted, f"{measured:.2f}{unit}", holds(measured))


def medians(systems: Mapping[str, Any], key: str) -> dict[str, float]:
    """Name of a system → the median of a number of its runs, without systems that have none."""
    return {name: value for name, runs in systems.items() if (value := _suite.median(runs, key))}


def training(systems: Mapping[str, Any], rounds: Mapping[str, Any]) -> Iterator[Goal]:
    """Of each way to train with Tritium: beside the ideal in `rounds`, and beside the peers in `systems`."""
    seconds, ideal, loops = medians(systems, "seconds"), medians(rounds, "seconds"), medians(rounds, "loop")
    peers = {name: value for name, value in seconds.items() if name != "ideal" and name not in train.OURS}
    best = min(peers, key=lambda name: peers[name])
    for name in train.OURS:
        ours = seconds.get(name)
        of_ideal = _suite.ratio(ideal.get(name), ideal.get("ideal"))
        yield at_most(f"{name}: DataFrame → model, warm session, of the ideal", 1.10, of_ideal, " ×")
        if ours is None or name not in ideal:
            continue
        # By round: the machine changes its speed from one to the next by more than is looked for.
        pairs = zip(rounds[name], rounds["ideal"], strict=False)  # of a side that failed there are fewer
        more = [one["seconds"] - other["seconds"] for one, other in pairs if "seconds" in one and "seconds" in other]
        what = f"{name}: DataFrame → model, more than the ideal in the same round, median of {len(more)}"
        yield at_most(what, 0.5, statistics.median(more), " s")
        yield at_least(f"{name}: faster than the best peer ({best})", 1.5, peers[best] / ours, " ×")
        if "horovod.spark" in peers:
            yield at_least(f"{name}: faster than horovod.spark", 2.5, peers["horovod.spark"] / ours, " ×")
        speed = loops["ideal"] / loops[name]
        yield at_least(f"{name}: the loop alone, as a share of its speed over tensors in RAM", 0.97, speed)


def goals(found: Mapping[str, Any]) -> Iterator[Goal]:
    """Those whose benchmark has been run."""
    if one := found.get("train"):
        yield from training(one["systems"], found.get("train_ideal", one)["systems"])
        if memory := one.get("memory"):
            own = medians(memory, "without the JVM MB")
            least = min(value for name, value in own.items() if name not in train.OURS)
            used = min(own[name] for name in train.OURS if name in own)
            yield at_most("peak memory of the tree without Spark's JVM, of the best peer's", 0.6, used / least, " ×")
    if one := found.get("loop"):
        for name in ("full", "stream"):
            for epoch in loop.EPOCHS:
                ram, seconds = (_suite.median(one["systems"][each], epoch) for each in ("in RAM", name))
                what = f'the loop with "{name}", {epoch}, as a share of its speed over RAM'
                yield at_least(what, 0.97, _suite.ratio(ram, seconds))
    if one := found.get("batch"):
        yield at_most("a batch of 1024 × 64 out of the shard, of `index_select` in RAM", 1.3, one["batch"], " ×")
        yield at_least("the loop over a complete shard, as a share of its speed over RAM", 0.97, one["loop"])
    if one := found.get("first_step"):
        for name, runs in one["systems"].items():
            step = _suite.median(runs, "seconds")
            imported, read = (_suite.median(runs, key) or 0.0 for key in ("import", "read"))
            limit = round(first_step.goal(name, imported, read), 2)
            yield at_most(f"first step after the map stages, {name}", limit, step, " s")
    if one := found.get("launch"):
        runs = one["systems"]["Tritium"]
        nothing, group, imported = (_suite.median(runs, key) for key in ("nothing", "group", "import"))
        yield at_most("launch of nothing", 0.5, nothing, " s")
        more = None if group is None or imported is None else group - imported
        yield at_most("launch with a process group, above the import of torch in as many processes", 0.5, more, " s")
    if one := found.get("control"):
        for ranks, rows in one["ranks"].items():
            for what, ratio in zip(control.MEASURED, rows["ratio"], strict=True):
                yield at_most(f"TLS: {what}, {ranks} ranks, of the time without", 1.1, ratio, " ×")
    if one := found.get("memory"):
        ranks = one["ratio"]["rank"]["private"]
        yield at_most("private memory of a rank, 16M rows against 1M", 1.1, ranks, " ×")
    if one := found.get("scale"):
        rows = sorted(one["rows"].items(), key=lambda item: int(item[0]))
        if len(rows) > 1:
            growth = rows[-1][1]["us a row"] / rows[0][1]["us a row"]
            yield at_most(f"time a row, {int(rows[-1][0]):,} rows against {int(rows[0][0]):,}", 1.1, growth, " ×")
        if gang := one["gang"].get("512"):
            yield at_most("a coordinator forms 512 ranks", 10, gang["formed s"], " s")
            yield at_most("its share of a core while they send their status", 5, gang["share of a core"] * 100, " %")
    if one := found.get("exchange"):
        sides = one["kinds"]["array"]["sides"]
        speed = sides["full"]["of spark less start"]
        yield at_least("exchange to the ranks, less the launch, of the speed of Spark's own shuffle", 0.95, speed)
        kept = sides["kept"]["MB/s less start"]
        yield at_least("packed floats to the ranks without a shuffle, less the launch", 400, kept, " MB/s")
    if one := found.get("as_bytes"):
        for case, side, wanted in AS_BYTES:
            if seconds := one["cases"].get(case, {}).get("seconds"):
                what = f"{case}, arrays as bytes: faster than {SIDES.get(side, f'`{side}`')}"
                yield at_least(what, wanted, seconds[side] / seconds["bytes"], " ×")
    if one := found.get("inference"):
        seconds = {name: _suite.median(runs, "seconds") for name, runs in one["systems"].items()}
        ideal, udf = (_suite.ratio(seconds[name], seconds["Tritium"]) for name in ("ideal", "predict_batch_udf"))
        yield at_least("inference, as a share of the ideal's speed", 0.85, ideal)
        yield at_least("inference, faster than predict_batch_udf", 1.7, udf, " ×")
    if one := found.get("stream"):
        p99 = {name: _suite.median(runs, "p99 ms") for name, runs in one["systems"].items()}
        for name in ("no-op UDF", "nothing"):
            what = f"streaming, 99th percentile against the same query with {name} in the model's place"
            yield at_most(what, 1.3, _suite.ratio(p99["Tritium"], p99[name]), " ×")

    if one := found.get("horovod_optimizer"):
        base, ours = (statistics.median(one["passes"][way]) for way in horovod_optimizer.WAYS)
        yield at_least("the loop with tritium.compat's hvd.DistributedOptimizer, of DDP's speed", 0.9, base / ours)
    if one := found.get("train_jax"):
        seconds = {name: _suite.median(runs, "seconds") for name, runs in one["systems"].items()}
        of_ideal = _suite.ratio(seconds[train_jax.OURS], seconds["ideal"])
        yield at_most("JAX under launch: DataFrame → model, of the ideal", 1.10, of_ideal, " ×")
    if one := found.get("mpi"):
        for size in one["sizes"]:
            what = f"a world of {size['ranks']} MPI ranks, above mpirun of the same MPICH"
            yield at_most(what, 0.3, size["launch"] - size["mpirun"], " s")
    if one := found.get("keras"):
        yield from against(one["systems"], keras_estimator.OURS, "horovod.spark", 2)
    if one := found.get("rossmann"):
        for name in [name for name in one["systems"] if name != rossmann.THEIRS]:
            faster, error = rossmann.of_horovod(one["systems"], name)
            yield at_least(f"{name}, on Rossmann's sales: faster than horovod.spark", 2, faster, " ×")
            yield at_most(f"{name}, on Rossmann's sales: the validation error, of horovod.spark's", 1.05, error, " ×")
    if one := found.get("trees"):
        yield from against(one["systems"], trees.OURS, "SynapseML", 1)
    if one := found.get("real_tables"):
        as_it_is, by_hand = (
            _suite.median(one["systems"].get(name, []), "seconds")
            for name in (real_tables.AS_IT_IS, real_tables.BY_HAND)
        )
        what = "TorchEstimator with strings, images and nulls, of the same prepared in Spark by hand"
        yield at_most(what, 1.1, _suite.ratio(as_it_is, by_hand), " ×")


def against(systems: Mapping[str, Any], ours: str, peer: str, faster: float) -> Iterator[Goal]:
    """Of an estimator: at most 1.15 × its ideal, and so many times as fast as a peer."""
    seconds = {name: _suite.median(systems.get(name, []), "seconds") for name in (ours, "ideal", peer)}
    yield at_most(f"{ours}: DataFrame → model, of the ideal", 1.15, _suite.ratio(seconds[ours], seconds["ideal"]), " ×")
    yield at_least(f"{ours}: faster than {peer}", faster, _suite.ratio(seconds[peer], seconds[ours]), " ×")


def compared(found: Mapping[str, Any]) -> Iterator[str]:
    """A row for each task: Tritium's median, and how many times as long the ideal and the others take."""
    for task, name, key, unit, ours, beside in COMPARED:
        if not (systems := found.get(name, {}).get("systems")):
            continue
        middle = {system: _suite.median(runs, key) for system, runs in systems.items()}
        own = middle.pop(ours, None)
        others = [name for name in middle if name != "ideal" and not name.lower().startswith("tritium")]
        others.sort(key=lambda other: middle[other] or float("inf"))
        cells = [f"{NAMES.get(other, other)} {times(middle[other], own)}" for other in others]
        near = found.get(beside, found[name])["systems"]
        ideal = times(_suite.median(near.get("ideal", []), key), _suite.median(near.get(ours, []), key), "–")
        value = "failed" if own is None else f"{own:.1f} {unit}" if unit == "s" else f"{own:.0f} {unit}"
        yield f"| {task} | {value} | {ideal} | {', '.join(cells) or '–'} |"


def times(other: float | None, own: float | None, missing: str = "failed") -> str:
    """How many times as long as Tritium another takes; `missing` where one of them has no figure."""
    return missing if (ratio := _suite.ratio(other, own)) is None else f"{ratio:.2f} ×"


def table(
    title: str, one: Mapping[str, Any], columns: Mapping[str, tuple[str, str]], memory: Mapping[str, Any] | None = None
) -> Iterator[str]:
    """A system a row; columns: title → (key of a run, format); memory: a run of each system with its peaks."""
    yield from heading(title, one)
    titles = [*columns, *(["peak memory, MB", "… without the JVM"] if memory else []), "runs"]
    yield f"| system | {' | '.join(titles)} |\n|---|{'---|' * len(titles)}"
    for name, runs in one["systems"].items():
        if any("error" in run for run in runs):
            yield f"| {name} | " + "failed | " * (len(titles) - 1) + f"{len(runs)} |"
            continue
        cells = []
        for key, form in columns.values():
            values = _suite.spread(runs, key)
            cells.append("–" if values is None else spread(values, form))
        for key in ("tree MB", "without the JVM MB") if memory else ():
            peak = _suite.median(memory.get(name, []) if memory else [], key)
            cells.append("–" if peak is None else f"{peak:.0f}")
        yield f"| {name} | {' | '.join(cells)} | {len(runs)} |"
    yield ""


def spread(values: tuple[float, float, float], form: str) -> str:
    """Median, least and most of some runs, where they differ."""
    middle, least, most = (format(value, form) for value in values)
    return middle if least == most else f"{middle} ({least} – {most})"


def alike(names: Mapping[str, str], form: str) -> dict[str, tuple[str, str]]:
    """Columns of a `table`, title → key of a run, all of one format."""
    return {title: (key, form) for title, key in names.items()}


def heading(title: str, one: Mapping[str, Any], text: str = "") -> Iterator[str]:
    """The title, the command, when and where it ran, and what there is to say."""
    machine = one["machine"]
    yield f"### {title}\n\n`{one['command']}` ({machine['date']}, {machine['commit']}, {_machine(machine)})\n"
    if text:
        yield f"{text}\n"


def _machine(machine: Mapping[str, Any]) -> str:
    return re.split(r"[ (]", str(machine["processor"]).removeprefix("an "))[0]  # its maker, or its kind


def machines(found: Mapping[str, Any]) -> Iterator[str]:
    """A line for each machine, and one for the versions of what was compared."""
    versions: dict[str, set[str]] = {}
    lines = {}
    for _, one in sorted(found.items()):
        machine = one["machine"]
        java = re.findall(r"[\d.]+", str(machine["java"]))
        lines[_machine(machine)] = (
            f"- {_machine(machine)}: {machine['cores']} cores of {machine['processor']}, {machine['memory GB']} GB, "
            f"Python {machine['python']}, Java {java[0] if java else '?'}"
        )
        for run in [run for runs in one.get("systems", {}).values() for run in runs]:
            for name, version in run.get("versions", {}).items():
                if name not in SAME:
                    versions.setdefault(name, set()).add(version)
    yield from lines.values()
    if versions:
        numbers = (f"{name} {' and '.join(sorted(numbers))}" for name, numbers in sorted(versions.items()))
        yield f"- Versions: {', '.join(numbers)}"
    yield ""


def page(found: Mapping[str, Any]) -> Iterator[str]:
    """The lines of docs/benchmarks.md."""
    yield HEAD
    yield COMPARISON
    yield from compared(found)
    yield ""
    if missed := [goal for goal in goals(found) if not goal.holds]:
        yield MISSED
        yield from (goal.row() for goal in missed)
        yield f"\n{BOUNDS}\n"
    yield METHOD


def figures(found: Mapping[str, Any]) -> Iterator[str]:
    """The lines of docs/measurements.md."""
    yield EVERY
    yield from machines(found)
    for title, part in (("Training", trained), ("Scoring and streams", scored), ("Single parts", parts)):
        if lines := list(part(found)):
            yield f"## {title}\n"
            yield from lines


def trained(found: Mapping[str, Any]) -> Iterator[str]:
    """The benchmarks from a DataFrame to a model."""
    if one := found.get("train"):
        yield from table("From a DataFrame to a model", one, TRAINED, one.get("memory"))
    if one := found.get("train_ideal"):
        yield from table("What Tritium adds to the ideal", one, TRAINED)
    for name, (title, columns) in ESTIMATORS.items():
        if one := found.get(name):
            yield from table(title, one, columns)
    if one := found.get("horovod_optimizer"):
        text = "Seconds of a pass of 2 ranks over tensors in RAM, in the same two processes in turn."
        yield from heading("Horovod's optimizer beside DDP", one, text)
        yield "| way | seconds | runs |\n|---|---|---|"
        for way, passes in one["passes"].items():
            seconds = spread((statistics.median(passes), min(passes), max(passes)), ".2f")
            yield f"| {way} | {seconds} | {len(passes)} |"
        yield ""
    if one := found.get("images"):
        yield from table("Images", one, alike({"seconds": "seconds", "loop s": "loop"}, ".1f"))
    if one := found.get("gpu"):
        text = (
            f"{one['gpu']}, torch {one['torch']}. Training: an MLP of 512-1024-1024-1 in bf16, batches of 4096 rows of "
            "512 floats; the first way copies nothing, as all rows lie in the GPU's memory. Scoring: the same MLP on "
            "rows of Spark's cache, by four tasks that share the GPU."
        )
        yield from heading("On a GPU", one, text)
        yield "| what | way | rows/s | ratio |\n|---|---|---|---|"
        for what in ("training", "scoring"):
            speeds = one.get(what, {}).get("rows/s", {})
            for way, speed in speeds.items():
                yield f"| {what} | {way} | {speed:,.0f} | {speed / next(iter(speeds.values())):.2f} |"
        yield ""


def scored(found: Mapping[str, Any]) -> Iterator[str]:
    """The benchmarks of trained models."""
    if one := found.get("inference"):
        yield from table("Scoring", one, alike({"seconds": "seconds", "the first pass, s": "cold"}, ".2f"))
    if one := found.get("stream"):
        names = {"p50, ms": "p50 ms", "p99, ms": "p99 ms", "events/s": "events/s"}
        yield from table("Kafka to Kafka", one, alike(names, ".0f"))


def parts(found: Mapping[str, Any]) -> Iterator[str]:
    """The benchmarks of what a training consists of."""
    if one := found.get("launch"):
        names = {"nothing, s": "nothing", "with a process group, s": "group", "import of torch twice, s": "import"}
        yield from table("Launch of two ranks", one, alike(names, ".2f"))
    if one := found.get("mpi"):
        yield from heading("A world of MPI", one)
        yield "| ranks | mpirun, s | launch, s |\n|---|---|---|"
        for size in one["sizes"]:
            yield f"| {size['ranks']} | {size['mpirun']:.2f} | {size['launch']:.2f} |"
        yield ""
    if one := found.get("control"):
        yield from heading("Control connections, in the clear and under TLS", one)
        yield "| ranks | | gather, ms | gather of 4 MB a rank, ms | a file, MB/s | logs/s |\n|---|---|---|---|---|---|"
        for ranks, rows in one["ranks"].items():
            for way, form in (("plain", control.FORMS), ("TLS", control.FORMS), ("ratio", control.TIMES)):
                cells = (cell.format(value) for cell, value in zip(form, rows[way], strict=True))
                yield f"| {ranks} | {'the time, ×' if way == 'ratio' else way} | {' | '.join(cells)} |"
        yield ""
    if one := found.get("loop"):
        names = {f"{epoch}, s": epoch for epoch in loop.EPOCHS}
        yield from table("The loop alone, epoch by epoch", one, alike(names, ".2f"))
    if one := found.get("first_step"):
        names = {"first step, s": "seconds", "import of torch twice, s": "import", "two tasks read it, s": "read"}
        yield from table("First step after the map stages", one, alike(names, ".2f"))
    if one := found.get("exchange"):
        yield from exchanged(one)
    if one := found.get("as_bytes"):
        yield from as_bytes(one)
    if one := found.get("memory"):
        text = "MB, the largest process of each kind; what is mapped is the page cache's."
        yield from heading("Memory against rows", one, text)
        yield "| rows | process | private | mapped |\n|---|---|---|---|"
        for size in one["sizes"]:
            for kind, peak in size["peaks"].items():
                yield f"| {size['rows']:,} | {kind} | {peak['private']:.0f} | {peak['mapped']:.0f} |"
        yield ""
    if one := found.get("scale"):
        yield from scaled(one)


def exchanged(one: Mapping[str, Any]) -> Iterator[str]:
    """The exchange beside Spark's own shuffle."""
    text = (
        "MB/s, warm, beside Spark's own shuffle of the same columns into nothing. In brackets: less the launch of a "
        "gang without rows."
    )
    yield from heading("Exchange", one, text)
    yield "| source | Spark's shuffle | full | stream |\n|---|---|---|---|"
    for kind, rows in one["kinds"].items():
        sides = rows["sides"]
        cells = [f"{sides[s]['MB/s']:.0f} ({sides[s]['MB/s less start']:.0f})" for s in ("full", "stream")]
        yield f"| {kind} ({rows['MB']:.0f} MB) | {sides['spark']['MB/s']:.0f} | {' | '.join(cells)} |"
    kept, direct = (one["kinds"]["array"]["sides"][side] for side in ("kept", "direct"))
    yield (
        f"\nWithout a shuffle, kept rows of `array` reach the ranks at {kept['MB/s']:.0f} MB/s "
        f"({kept['MB/s less start']:.0f}); Spark's `mapInArrow`, which drops them, takes {direct['MB/s']:.0f}.\n"
    )


def as_bytes(one: Mapping[str, Any]) -> Iterator[str]:
    """Arrays that leave the JVM as bytes, beside the two other ways."""
    text = (
        "Seconds, median of the warm passes in one session, in turn. An exchange is a launch of two ranks that wait "
        f"for all rows, less one without rows ({one['launch']:.2f} s)."
    )
    yield from heading("Arrays as bytes", one, text)
    yield "| what | MB | as bytes | number by number | Spark's own |\n|---|---|---|---|---|"
    for case, measured in one["cases"].items():
        (peer,) = set(measured["seconds"]) - {"bytes", "numbers"}
        ours, numbers, theirs = (f"{measured['seconds'][side]:.2f}" for side in ("bytes", "numbers", peer))
        yield f"| {case} | {measured['MB']:.0f} | {ours} | {numbers} | {theirs} `{peer}` |"
    yield ""


def scaled(one: Mapping[str, Any]) -> Iterator[str]:
    """More rows, more ranks, more simulated ranks."""
    yield from heading("Scale", one)
    yield "| rows | seconds | µs a row |\n|---|---|---|"
    for rows, measured in one["rows"].items():
        yield f"| {int(rows):,} | {measured['seconds']:.1f} | {measured['us a row']:.2f} |"
    yield "\n| ranks on these cores | launch of nothing, s | with a process group, s |\n|---|---|---|"
    for ranks, measured in one["ranks"].items():
        yield f"| {ranks} | {measured['nothing']:.2f} | {measured['group']:.2f} |"
    yield "\n| simulated ranks | formed, s | status, share of a core | memory, MB |\n|---|---|---|---|"
    for size, measured in one["gang"].items():
        share = measured["share of a core"]
        yield f"| {size} | {measured['formed s']:.1f} | {share:.1%} | {measured['memory MB']:.0f} |"
    yield ""


def text(found: Mapping[str, Any]) -> str:
    """docs/benchmarks.md."""
    return "\n".join(page(found)).rstrip() + "\n"


def figures_text(found: Mapping[str, Any]) -> str:
    """docs/measurements.md."""
    return "\n".join(figures(found)).rstrip() + "\n"


def plot(one: Mapping[str, Any], path: Path) -> None:
    """A bar a system: the median, and every run as a dot."""
    import matplotlib
    from matplotlib.figure import Figure

    runs = {name: [run["seconds"] for run in all_ if "seconds" in run] for name, all_ in one["systems"].items()}
    runs = {name: values for name, values in runs.items() if values}
    middle = {name: statistics.median(values) for name, values in runs.items()}
    order = sorted(middle, key=lambda name: middle[name])
    figure = Figure(figsize=(9, 0.45 * len(order) + 1), layout="constrained")
    axes = figure.subplots()
    colours = ["#888888" if name == "ideal" else "#1f77b4" if name in train.OURS else "#d8a657" for name in order]
    axes.barh(order, [middle[name] for name in order], color=colours)
    for row, name in enumerate(order):
        axes.plot(runs[name], [row] * len(runs[name]), "k.", markersize=4)
    axes.invert_yaxis()
    axes.set(xlabel=f"seconds from DataFrame to model, {one['rows']:,} rows × {one['epochs']} epochs")
    with matplotlib.rc_context({"svg.hashsalt": "tritium"}):  # the same results make the same file
        figure.savefig(path, metadata={"Date": None})


def main() -> int:
    found = results()
    if not found:
        print("There are no results yet: python benchmarks", file=sys.stderr)
        return 1
    PAGE.write_text(text(found), encoding="utf-8")
    FIGURES.write_text(figures_text(found), encoding="utf-8")
    if "train" in found:
        plot(found["train"], PAGE.with_name(PLOT))
    print(f"written: {PAGE.relative_to(_suite.ROOT)}, {FIGURES.relative_to(_suite.ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
