"""Fixtures of all tests: a Spark session, the clusters of the contract, and the check that nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import hypothesis
import pytest

import bounds
import class_archive
import clusters
import durations
import leaks
import warm
from durations import pytest_addoption  # noqa: F401 - a hook
from tritium import aliases

gc.disable()  # until all is collected: importing makes millions of objects, and nothing to collect

# A private directory for all that tests and Spark write, set before any JVM starts.
PLACE = Path(tempfile.mkdtemp(prefix="tritium-tests-"))
LEAN = Path(__file__).parent / "lean"
for _name in ("tmp", "scratch", "runs", "cwd"):
    PLACE.joinpath(_name).mkdir()
os.environ.update(
    TMPDIR=str(PLACE / "tmp"),
    SPARK_LOCAL_DIRS=str(PLACE / "scratch"),
    TRITIUM_RUNS=str(PLACE / "runs"),
    TRITIUM_TEST=str(os.getpid()),
    TRITIUM_TEST_WARM=f"tritium-test-warm-{os.getpid()}",
    PYSPARK_PYTHON=sys.executable,
    PYSPARK_DRIVER_PYTHON=sys.executable,
    SPARK_LOCAL_IP="127.0.0.1",
    MAVEN_OPTS=clusters.SHORT_LIVED,
    OMP_WAIT_POLICY="PASSIVE",  # threads of OpenMP that spin keep the other test processes from their core
)
os.environ.setdefault("TRITIUM_CACHE", str(PLACE / "cache"))  # one for all processes of these tests
tempfile.tempdir = None
if str(LEAN) not in os.environ.get("PYTHONPATH", ""):
    # For every Python from here on, and for this one.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(LEAN), os.environ.get("PYTHONPATH")]))
    runpy.run_path(str(LEAN / "sitecustomize.py"))
clusters.use_in_jvms(clusters.SHORT_LIVED)
PIPES = os.environ.pop("TRITIUM_TEST_PIPES", "")
SEED = int(os.environ.get("TRITIUM_TEST_SEED", "0"))
FIGURES = os.environ.get("TRITIUM_FAULT_FIGURES", "")
UNTIL = float(os.environ.get("TRITIUM_TESTS_UNTIL", "inf"))  # seconds since 1970

with contextlib.suppress(ImportError):
    import triton  # noqa: F401 - before TensorFlow, which Keras imports: after it, torch's optimizers crash the process

# How long an example takes, and how long it takes to draw one, depends on what else runs on the machine.
hypothesis.settings.register_profile("tritium", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("tritium")

_elsewhere: dict[str, clusters.Elsewhere] = {}
_LIMIT = pytest.StashKey[float]()  # seconds for a test elsewhere


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Repeat, for `make faults`, the tests of faults without rounds of their own (TRITIUM_FAULT_ROUNDS)."""
    repeats = int(os.environ.get("TRITIUM_FAULT_REPEATS", "1"))
    own = {"seed", "rounds"} & set(metafunc.fixturenames)
    if repeats > 1 and not own and Path(metafunc.module.__file__).parent.name == "faults":
        metafunc.fixturenames.append("repeat")
        metafunc.parametrize("repeat", range(repeats))


@pytest.fixture(scope="session", autouse=True)
def _own_working_directory() -> Iterator[None]:
    before = os.getcwd()
    os.chdir(PLACE / "cwd")
    yield
    os.chdir(before)


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """Yield a session on this process's kind of cluster: `local[2]`, unless the test asks for `cluster`."""
    with clusters.session(clusters.KIND) as session:
        yield session


@pytest.fixture(params=clusters.CONTRACT)
def cluster(request: pytest.FixtureRequest, spark: Any) -> Any:
    """Return the session on each kind of cluster in turn, four of them by default; `cluster.kind` says which.

    A test for other kinds: `@pytest.mark.parametrize("cluster", ["standalone-gpus"], indirect=True)`.
    """
    assert request.param == clusters.KIND
    return OnCluster(request.param, spark)


class OnCluster:
    def __init__(self, kind: str, spark: Any) -> None:
        self.kind = kind
        self.spark = spark


class _Forgetful(set[str]):
    def add(self, element: str) -> None: ...


@pytest.fixture
def saved_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what the test saves be as another process's, which is not trusted by its checksums."""
    monkeypatch.setattr("tritium.model.trust._saved_checksums", _Forgetful())


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.config.getoption("usepdb"):  # A debugger leaves its handler of Ctrl-C, and may end all in the middle.
        yield
        return
    if {"spark", "cluster"} & set(request.fixturenames):
        request.getfixturevalue("spark")  # what the session leaves is not the test's
    if "there" in request.fixturenames:  # tests/chaos
        request.getfixturevalue("there")
    # As the test before in this file left it, if only fixtures of single tests have run since: a trace takes 10 ms.
    before = _left.pop(request.path, None) or leaks.Trace.now(_strangers())
    _left.clear()
    yield
    found, now = before.left_and_now(_strangers(), whole=request.node.stash.get(_WHOLE, True))
    if found:
        pytest.fail("the test left behind:\n  " + "\n  ".join(found), pytrace=False)
    _left[request.path] = now


_left: dict[Path, leaks.Trace] = {}  # the file of the last test, and the state after it
_WHOLE = pytest.StashKey[bool]()  # whether `_left` may be forgotten before the next test


def _shares(item: pytest.Item, following: pytest.Item | None) -> bool:
    """Return whether the next test begins with what this one leaves, as no fixture of several tests begins or ends."""
    if following is None or following.parent is not item.parent:
        return False
    return set(getattr(following, "fixturenames", ())) <= set(getattr(item, "fixturenames", ()))


class _Shared:
    """Forgets the state after the last test when a fixture that is not one test's begins or ends.

    A plugin, since hooks of a conftest.py are not called for fixtures of the whole session.
    """

    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        if fixturedef.scope != "function":
            _left.clear()

    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        if fixturedef.scope != "function":
            _left.clear()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Shared())
    if tuple(map(int, version("pyspark").split(".")[:2])) < (4, 2):
        # It leaves sockets to the garbage collector, and its Connect client the threads of a pool.
        config.addinivalue_line("filterwarnings", "ignore:unclosed <socket:ResourceWarning")
        leaks.PYSPARK_THREADS += ("concurrent.futures",)
    config.pluginmanager.register(durations.Durations(config))


@pytest.fixture(autouse=True)
def _random_numbers() -> None:
    """Let random numbers, such as a module's first weights, not depend on which tests ran before in this process."""
    random.seed(SEED)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(SEED)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(SEED)


@pytest.fixture(autouse=True)
def _no_names_of_others() -> Iterator[None]:
    """Undo `import tritium.compat` after a test: others skip where Horovod is not installed."""
    yield
    _forget_aliases()


def _forget_aliases() -> None:
    if names := aliases.active():
        aliases._active.clear()
        for name in [name for name in sys.modules if name.partition(".")[0] in names]:
            del sys.modules[name]
        sys.modules.pop("tritium.compat", None)  # importing it again adds them again


# Tests of what ranks do, not of how they start.
WARM = ("unit/ml", "compat", "frameworks", "estimators", "spark", "pages", "faults")
NOT_WARM = (
    "test_compiling.py",  # torch's compiler forks processes itself
    "faults/test_any_moment.py",
    "faults/test_connections.py",
    "faults/test_many_launches.py",
    "faults/test_python_killed.py",
    "spark/test_cluster.py",
    "spark/test_launch_spark.py",
)


@pytest.fixture(scope="session")
def _warm() -> Iterator[warm.Warm | None]:
    processes = warm.Warm() if sys.platform == "linux" else None
    yield processes
    if processes is not None:
        processes.close()


@pytest.fixture(autouse=True)
def _imported_once(request: pytest.FixtureRequest, _warm: warm.Warm | None) -> Iterator[None]:
    """Let the launches of a test in WARM import their framework once for all."""
    place = _place(request.path)
    uses = place.startswith(WARM) and not place.endswith(NOT_WARM) and not FIGURES
    marker = request.node.get_closest_marker("imports")
    imports = marker.args if marker is not None else ()
    with _warm.used(imports) if _warm is not None and uses else contextlib.nullcontext():
        yield


def _place(path: Path) -> str:
    return path.relative_to(Path(__file__).parent).as_posix()


def _strangers() -> set[int]:
    return {process.pid for process in _elsewhere.values()} | leaks.STRANGERS


# --- tests on other kinds of cluster: sent to a pytest process that has one


def _kind(item: pytest.Item) -> str:
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("cluster", "local") if callspec else "local"


def _limit(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0] if marker and marker.args else item.config.getini("timeout") or 240)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from scheduling import ByCluster

    gc.enable()  # in this process, which collects no tests itself
    config.option.loadscopereorder = False  # in the order of `pytest_collection_modifyitems`
    return ByCluster(config, log)


@pytest.hookimpl(trylast=True)  # after -k and -m have left their items
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = [*clusters.KINDS, *clusters.EXTRA]
    items.sort(key=lambda item: order.index(_kind(item)))  # stable: one cluster at a time
    kinds = {_kind(item) for item in items}
    if len(kinds) == 1 and not PIPES and "PYTEST_XDIST_WORKER" not in os.environ:
        (clusters.KIND,) = kinds  # Tests of one kind alone run in this process, where a debugger reaches them.
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: _kind(item) == "local")  # the slowest start first
    for item in items:
        if _kind(item) != clusters.KIND:
            item.stash[_LIMIT] = _limit(item)
            item.add_marker(pytest.mark.timeout(0), append=False)  # the other process keeps the time


def pytest_collection_finish(session: pytest.Session) -> None:
    _forget_aliases()  # of files that import tritium.compat: the first test would find Horovod
    places = [_place(item.path) for item in session.items]
    if not session.config.option.collectonly and not all(place.startswith("unit/") for place in places):
        try:
            class_archive.write(clusters.SHORT_LIVED)
        except (OSError, RuntimeError, subprocess.SubprocessError) as problem:
            print(f"The tests go on, slower: {problem}", file=sys.__stderr__)  # pytest captures the other
        clusters.use_in_jvms(f"{clusters.SHORT_LIVED} {class_archive.options()}")
    # Spare the collector of garbage what was imported, torch above all: a full collection takes 5 ms, not 350.
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what has not begun when the time is over: machines differ, and a run that is cut off says nothing."""
    if time.time() > UNTIL:
        pytest.skip("no time was left for it (TRITIUM_TESTS_UNTIL)")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    kind = _kind(item)
    item.stash[_WHOLE] = not _shares(item, nextitem)
    if kind == clusters.KIND:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    following = nextitem.nodeid if nextitem is not None and _kind(nextitem) == kind else None
    for report in _reports(item, kind, following):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    if following is None:
        _end(kind)
    return True


def _reports(item: pytest.Item, kind: str, following: str | None) -> list[Any]:
    config = item.config
    try:
        if kind not in _elsewhere:
            files = sorted({str(other.path) for other in item.session.items if _kind(other) == kind})
            options = [text for rule in config.getoption("pythonwarnings") or () for text in ("-W", rule)]
            _elsewhere[kind] = clusters.Elsewhere(kind, files, config.rootpath, options)
        answers = _elsewhere[kind].run(item.nodeid, following, item.stash[_LIMIT] + 60)
        for answer in answers:
            if isinstance(answer["longrepr"], list):  # where a test was skipped, and why: JSON has no tuples
                answer["longrepr"] = tuple(answer["longrepr"])
        from_json = config.hook.pytest_report_from_serializable
        return [from_json(config=config, data=answer) for answer in answers]
    except RuntimeError as problem:
        _end(kind)
        where = item.location
        return [pytest.TestReport(item.nodeid, where, {}, "failed", str(problem), "call", (), 0.0)]


def _end(kind: str) -> None:
    if process := _elsewhere.pop(kind, None):
        process.close()


class _Answers:
    """The plugin in the other process that sends every report of a test to the main one."""

    def __init__(self, config: pytest.Config, answers: int) -> None:
        self.config = config
        self.answers = answers

    def send(self, line: str) -> None:
        data = line.encode() + b"\n"
        while data:
            data = data[os.write(self.answers, data) :]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        to_json = self.config.hook.pytest_report_to_serializable
        self.send(json.dumps(to_json(config=self.config, report=report)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    if not PIPES:
        return None
    if session.testsfailed:
        raise session.Interrupted(f"{session.testsfailed} errors during collection")
    requests, answers = map(int, PIPES.split(","))
    plugin = _Answers(session.config, answers)
    session.config.pluginmanager.register(plugin)
    items = {item.nodeid: item for item in session.items}
    for number in (requests, answers):
        os.set_inheritable(number, False)
    with open(requests, encoding="utf-8") as lines:
        for line in lines:
            nodeid, following = json.loads(line)
            session.config.hook.pytest_runtest_protocol(item=items[nodeid], nextitem=items.get(following))
            plugin.send("done")
    os.close(answers)
    return True


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print, at the end of `make faults`, the time from each fault to its outcome."""
    if FIGURES and not PIPES and Path(FIGURES).exists():
        terminalreporter.section("seconds from the fault to its outcome")
        for row in bounds.table(Path(FIGURES).read_text().splitlines()):
            terminalreporter.write_line(row)


def pytest_unconfigure() -> None:
    for kind in list(_elsewhere):
        _end(kind)
    shutil.rmtree(PLACE, ignore_errors=True)
