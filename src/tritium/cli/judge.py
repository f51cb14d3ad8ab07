"""`tritium doctor` for a cluster: from what executors have answered to findings (driver)."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tritium.cli.findings import Finding
from tritium.errors import TritiumError
from tritium.spark.cluster.base import Cluster, check_versions
from tritium.spark.inside.hangs import HANGING
from tritium.spark.memory import notes, size_of
from tritium.spark.python import NEEDED, VARIABLE

LIBRARIES = ("lzma", "pyarrow", "numpy", "pandas", "torch")
"""What executors are asked to import."""
_OF_PYTHON = ("lzma",)
_LEAST_SHM = 512 << 20  # Docker gives 64 MB, which a DataLoader with workers, or NCCL, fills.
_LEAST_DISK = 10 << 30
_LEAST_OUTSIDE = 1 << 30
"""Bytes beside the JVM's heap: torch alone takes some 0.5 GB in a rank."""
_CLOCK_SECONDS = 1.0

Answers = Sequence[Mapping[str, Any]]


# ---- The session


def spark(cluster: Cluster) -> Finding:
    """Judge the versions of Spark and of the driver's Python."""
    version = cluster.session.version
    try:
        check_versions(version, sys.version_info[:2])
    except TritiumError as error:
        return Finding("Spark", version, str(error))
    fix = "never finishes some DataFrames with Python UDFs (SPARK-58241): use 4.2.1" if version == HANGING else ""
    return Finding("Spark", f"{version}, {cluster.master}", fix, warning=True)


def settings(cluster: Cluster) -> list[Finding]:
    """Judge the settings that are known to hurt."""
    try:
        cluster.check_settings()
        problem = None
    except TritiumError as error:
        problem = Finding("settings", str(error), "see the error beside this")
    ranks = max(1, cluster.cores_of_an_executor() // int(cluster.session.setting("spark.task.cpus", "1")))
    findings = [problem, *(check(cluster.session.setting) for check in SETTINGS)]
    for text in notes(cluster.session, cluster.overhead_factors, ranks):
        findings.append(Finding("settings", text, "set it, for as many ranks as an executor will have", warning=True))
    return [finding for finding in findings if finding] or [Finding("settings", "none that is known to hurt")]


def _pyspark_memory(setting: Callable[..., str]) -> Finding | None:
    name = "spark.executor.pyspark.memory"
    if setting(name, "0") in ("", "0"):
        return None
    why = "it limits the address space of Python, of which CUDA and mapped rows need far more than memory"
    return Finding("settings", f"{name}={setting(name)}: {why}", "set spark.executor.memoryOverhead instead", True)


def _allocation(setting: Callable[..., str]) -> Finding | None:
    if setting("spark.dynamicAllocation.enabled", "false").lower() != "true":
        return None
    keeps = {
        "spark.dynamicAllocation.shuffleTracking.enabled": "true",
        "spark.shuffle.service.enabled": "false",
        "spark.decommission.enabled": "false",
    }
    if any(setting(name, default).lower() == "true" for name, default in keeps.items()):
        fix = "set spark.dynamicAllocation.enabled=false where a gang should start at once"
        return Finding("settings", "spark.dynamicAllocation.enabled=true: ranks start one by one", fix, True)
    fix = "set one of " + ", ".join(keeps)
    return Finding("settings", "spark.dynamicAllocation.enabled=true: shuffled rows go with their executor", fix)


SETTINGS = (_pyspark_memory, _allocation)


def no_slots(cluster: Cluster) -> Finding:
    """Return the error where no executor came."""
    fix = (
        "see the cluster manager's page: free cores and memory, spark.executor.memory, spark.executor.cores, "
        "spark.cores.max"
    )
    return Finding("slots", f"no executor of {cluster.master} has come", fix)


def job_failed(text: str) -> Finding:
    """Return the error where the probe did not answer."""
    fix = f"{VARIABLE} must name, on the executors, a Python {_minor(sys.version)} with pyarrow and numpy"
    if "have not ended within" in text:
        fix = "free the cluster's slots, or see the log of an executor"
    return Finding("executors", text, fix)


# ---- The executors


def executors(cluster: Cluster, answers: Answers) -> list[Finding]:
    """Judge the answers of all tasks."""
    firsts = list({answer["executor"]: answer for answer in answers if answer["first"]}.values())
    local = cluster.master.startswith("local") and not cluster.master.startswith("local-cluster")
    heap = 0 if local else size_of(cluster.session.setting("spark.executor.memory", "1g"))
    return [
        slots(answers),
        java(firsts),
        python(firsts),
        *(library(name, firsts) for name in LIBRARIES),
        *accelerators(firsts, answers, int(cluster.session.setting("spark.executor.resource.gpu.amount", "0"))),
        shared_memory(firsts),
        *local_dirs(firsts),
        memory(firsts, heap),
        *route_to_driver(firsts, cluster.executors_reach_driver),
        *routes(answers),
        *run_dir(firsts),
    ]


def slots(answers: Answers) -> Finding:
    """Say how many tasks ran at once, on how many executors, with which resources."""
    names = {answer["executor"] for answer in answers}
    resources = sorted({f"{len(ids)} {name}" for a in answers for name, ids in a["resources"].items()})
    task = f", each with {' and '.join(resources)}" if resources else ""
    return Finding("slots", f"{len(answers)} on {len(names)} executor(s){task}: {_some(sorted(names))}")


def java(firsts: Answers) -> Finding:
    """Say which Java the executors run; one that is too old could not have started them."""
    return Finding("Java there", ", ".join(sorted({str(a["java"] or "not known") for a in firsts})))


def python(firsts: Answers) -> Finding:
    """Judge the executors' Python: Spark refuses a job on another minor version than the driver's."""
    here = _minor(sys.version)
    wrong = _where(firsts, lambda a: _minor(a["python"][0]) != here)
    texts = {f"{a['python'][0]}, {a['python'][1]}" for a in firsts}
    fix = f"{wrong}: set {VARIABLE} to a Python {here} there, as the driver's" if wrong else ""
    chosen = os.environ.get(VARIABLE)
    return Finding("Spark's Python", f"{_some(sorted(texts))}; {VARIABLE}={chosen or 'not set'} on the driver", fix)


def _python_of(firsts: Answers) -> str:
    return _some(sorted({a["python"][1] for a in firsts}))


def library(name: str, firsts: Answers) -> Finding:
    """Judge a library on all executors against the driver's."""
    subject = f"{name} there"
    needed = name in (*NEEDED, *_OF_PYTHON)
    absent = _where(firsts, lambda a: a["libraries"][name]["version"] is None and a["libraries"][name]["error"])
    broken = _where(firsts, lambda a: a["libraries"][name]["version"] and a["libraries"][name]["error"])
    install = "a Python that was built with it" if name in _OF_PYTHON else f"pip install {name}"
    if broken:
        error = next(a["libraries"][name]["error"] for a in firsts if a["libraries"][name]["error"])
        return Finding(subject, f"can't be imported: {error}", f"{broken}: mend it in that Python ({install})")
    if absent:
        purpose = "every rank needs it" if needed else "only what uses it needs it"
        place = "" if name in _OF_PYTHON else f" in {_python_of(firsts)}, or {VARIABLE} of a Python that has it"
        fix = f"{absent}: {install}{place}"
        return Finding(subject, f"not installed; {purpose}", fix, warning=not needed)
    if name in _OF_PYTHON:
        return Finding(subject, "there")
    versions = sorted({str(a["libraries"][name]["version"]) for a in firsts})
    here = _version(name)
    fix = ""
    if any(_major(version) != _major(here or version) for version in versions) or len(set(versions)) > 1:
        fix = f"install one version of {name} on all: pickled objects and models may not be read by another"
    return Finding(subject, f"{', '.join(versions)}; here {here or 'not installed'}", fix, warning=True)


def accelerators(firsts: Answers, answers: Answers, of_executor: int) -> list[Finding]:
    """Judge GPUs: those of the machine, torch's build, and whether Spark has any of them to assign.

    of_executor : GPUs of an executor according to the settings.
    """
    if not any(a["gpus"] for a in firsts):
        return [Finding("GPUs there", "none (no nvidia-smi)")]
    devices = sorted({gpu for a in firsts for gpu in a["gpus"]})
    blind = _where(firsts, lambda a: bool(a["gpus"]) and a["cuda"] is not None and not a["cuda"]["available"])
    built = {str(a["cuda"]["built"]) for a in firsts if a["cuda"]}
    fix = ""
    if blind:
        fix = f"{blind}: torch is built for CUDA {', '.join(sorted(built))}, and can't use it: another torch, or driver"
    findings = [Finding("GPUs there", f"{_some(devices)}; torch for CUDA {', '.join(sorted(built)) or '?'}", fix)]
    if not of_executor:
        how = "spark.executor.resource.gpu.amount and a discovery script"
        findings.append(Finding("GPUs of tasks", "Spark assigns none", f"for gpus=1, set {how}", warning=True))
    elif not any("gpu" in a["resources"] for a in answers):
        findings.append(Finding("GPUs of tasks", f"none; ranks get them of the {of_executor} of an executor by gpus="))
    return findings


def shared_memory(firsts: Answers) -> Finding:
    """Judge /dev/shm."""
    sizes = [a["shm"]["total"] for a in firsts if a["shm"]]
    if not sizes:
        return Finding("/dev/shm", "not there")
    low = _where(firsts, lambda a: a["shm"] is not None and a["shm"]["total"] < _LEAST_SHM)
    fix = f"{low}: docker run --shm-size=2g; in Kubernetes an emptyDir of medium Memory at /dev/shm" if low else ""
    return Finding("/dev/shm", f"{_size(min(sizes))}{' and more' * (len(set(sizes)) > 1)}", fix, warning=True)


def local_dirs(firsts: Answers) -> list[Finding]:
    """Judge the directories in which Spark and ranks keep rows."""
    findings = []
    places = [(a["executor"], place, space) for a in firsts for place, space in a["dirs"].items()]
    for executor, place, space in places:
        if space is None or not space["writable"]:
            findings.append(_dir(place, executor, "can't be written", "set spark.local.dir to one that can"))
        elif space["free"] < _LEAST_DISK:
            text = f"{_size(space['free'])} free of {_size(space['total'])} ({space['kind']})"
            findings.append(_dir(place, executor, text, "spark.local.dir on a larger disk, or free it", True))
        elif space["kind"] in ("tmpfs", "ramfs"):
            text = f"is on a {space['kind']}: shuffled rows and shards take memory"
            findings.append(_dir(place, executor, text, "set spark.local.dir to a directory on a disk", True))
    if findings:
        return findings
    least = min((space["free"] for _, _, space in places), default=0)
    kinds = sorted({space["kind"] for _, _, space in places})
    return [Finding("local dirs", f"{_size(least)} free, {', '.join(kinds)}" if places else "not known")]


def _dir(place: str, executor: str, text: str, fix: str, warning: bool = False) -> Finding:
    return Finding("local dirs", f"{place} on {executor}: {text}", fix, warning)


def memory(firsts: Answers, heap: int) -> Finding:
    """Judge the limits of memory. `heap`: bytes of an executor's JVM; 0 where the driver's JVM is the executor."""
    bounds = [a["memory"]["address_space"] for a in firsts if a["memory"]["address_space"] is not None]
    if bounds:
        text = f"the address space of Python is limited to {_size(min(bounds))}"
        fix = "leave spark.executor.pyspark.memory (or ulimit -v) out; spark.executor.memoryOverhead is for Python"
        return Finding("memory", text, fix, warning=True)
    limits = [a["memory"]["cgroup"] or a["memory"]["machine"] for a in firsts]
    kind = "cgroup" if any(a["memory"]["cgroup"] for a in firsts) else "no cgroup limit; machine"
    text = f"{_size(min(limits))} ({kind}), of which {_size(heap)} for the JVM"
    if heap and min(limits) - heap < _LEAST_OUTSIDE:
        fix = f"{_size(max(0, min(limits) - heap))} are left for ranks: raise spark.executor.memoryOverhead"
        return Finding("memory", text, fix, warning=True)
    return Finding("memory", text)


def route_to_driver(firsts: Answers, needed: bool) -> list[Finding]:
    """Judge the connections from executors to the driver, and the clocks. Over Connect none is needed."""
    tried = [a for a in firsts if a["driver"]]
    if not tried:
        return []
    if refused := _where(tried, lambda a: "error" in a["driver"]):
        error = next(a["driver"]["error"] for a in tried if "error" in a["driver"])
        fix = "set spark.driver.host, or spark.tritium.driver.host, to an address of this machine that executors reach"
        if not needed:
            fix = "progress, events and output come at the end; nothing else needs it"
        return [Finding("route to driver", f"{refused}: {error}", fix, warning=not needed)]
    offsets = {a["executor"]: a["driver"]["offset"] for a in tried}
    worst = max(offsets, key=lambda name: abs(offsets[name]))
    within = max(a["driver"]["within"] for a in tried)
    off = abs(offsets[worst]) > _CLOCK_SECONDS + within
    text = f"{worst} is {-offsets[worst] * 1000:+,.0f} ms from the driver's, ±{within * 1000:,.0f} ms"
    fix = "run NTP (chrony) there: times in events, logs and the report are of each machine" if off else ""
    return [Finding("route to driver", f"open from {len(tried)} executor(s)"), Finding("clocks", text, fix, True)]


def routes(answers: Answers) -> list[Finding]:
    """Judge the connections between executors."""
    tried = [(a["executor"], peer, error) for a in answers for peer, error in a.get("peers", {}).items()]
    closed = [f"{executor} to {peer}: {error}" for executor, peer, error in tried if error]
    if closed:
        fix = "open all TCP ports between executors (firewall, network policy, security group)"
        return [Finding("between executors", _some(closed), fix)]
    return [Finding("between executors", f"{len(tried)} connections, all open")] if tried else []


def run_dir(firsts: Answers) -> list[Finding]:
    """Judge whether executors see the file that the driver has written into a run directory that is no URL."""
    unseen = _where(firsts, lambda a: a["file"] is False)
    if unseen:
        fix = "a shared disk, or a URL (s3://…), for checkpoints"
        return [Finding("run_dir there", f"{unseen}: not the driver's directory", fix, warning=True)]
    seen = any(a["file"] for a in firsts)
    return [Finding("run_dir there", "the driver's")] if seen else []


# ---- Texts


def _where(firsts: Answers, is_wrong: Callable[[Mapping[str, Any]], Any]) -> str:
    """Name the executors of which something is true; "": none."""
    names = [str(a["executor"]) for a in firsts if is_wrong(a)]
    return "all executors" if names and len(names) == len(firsts) > 1 else _some(names)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _minor(version: str) -> str:
    return ".".join(version.split()[0].split(".")[:2])


def _major(version: str) -> str:
    return version.partition(".")[0]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _size(number: float) -> str:
    return f"{number / 1e9:,.1f} GB" if number >= 1e9 else f"{number / 1e6:,.0f} MB"
