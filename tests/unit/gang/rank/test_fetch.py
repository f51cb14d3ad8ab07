"""`tr.fetch`: once for a gang, one copy for each host, continued where a connection breaks."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import machines
import object_stores
import tritium as tr
from tritium import host_cache
from tritium.download import from_web
from tritium.errors import BadSetting, FetchFailed, RankFailed, WrongVersion
from tritium.file_system import size_of
from tritium.gang.driver.certificate import new_certificate
from tritium.gang.rank import fetch as fetching

QUIET: dict[str, Any] = {"on": "driver", "progress": False, "output": "none"}
CONTENT = os.urandom(3_000_000)


class Web(ThreadingHTTPServer):
    """A web server with one file.

    cuts   : at so many bytes each of the next answers ends, with its connection.
    ranges : whether it knows them. tag : the ETag; None: neither this nor a length. status : of answers.
    held   : set when an answer has been cut; it then waits for `released` before its connection ends.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.content, self.tag, self.ranges, self.status = CONTENT, '"1"', True, 200
        self.cuts: list[int] = []
        self.asked: list[str] = []
        """The `Range` of each request for content, "" for all of it."""
        self.headers: list[dict[str, str]] = []
        self.held, self.released = threading.Event(), threading.Event()
        self.released.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/data/bikes%20of%202026.csv?day=1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        assert isinstance(sys.exc_info()[1], ConnectionError)  # Who asks for the size alone hangs up.


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        web = self.server
        assert isinstance(web, Web)
        wanted = self.headers.get("Range", "")
        web.headers.append(dict(self.headers))
        if wanted != "bytes=0-0":
            web.asked.append(wanted)
        if web.status != 200:
            self.send_error(web.status, "not today")
            return
        first, _, last = wanted.removeprefix("bytes=").partition("-") if web.ranges else ("", "", "")
        body = web.content[int(first or 0) : int(last) + 1 if last else None]
        self.send_response(206 if first else 200)
        if web.tag:
            self.send_header("ETag", web.tag)
            self.send_header("Content-Length", str(len(body)))
        if first:
            self.send_header("Content-Range", f"bytes {first}-{int(first) + len(body) - 1}/{len(web.content)}")
        self.end_headers()
        if wanted == "bytes=0-0" or not web.cuts:
            self.wfile.write(body)
            return
        self.wfile.write(body[: web.cuts.pop(0)])
        web.held.set()
        web.released.wait(30)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def web() -> Iterator[Web]:
    with Web() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.released.set()
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "cache"
    monkeypatch.setenv(fetching.ROOT, str(folder))
    monkeypatch.setattr(fetching, "_in_use", {})
    yield folder
    for entry in fetching._in_use.values():
        entry.close()


def kept(cache: Path) -> list[Path]:
    return [path for path in cache.glob("*") if path.is_dir()]


def on_own_hosts(url: str, cache: Path, ranks_each: int, sha256: str | None = None) -> tuple[str, bytes]:
    """Fetch as on hosts of so many ranks, each with a cache of its own."""
    os.environ[fetching.ROOT] = f"{cache}-{tr.world().rank // ranks_each}"
    path = tr.fetch(url, sha256=sha256)
    return path, Path(path).read_bytes()


@pytest.mark.processes
@pytest.mark.parametrize("tls", [False, True])
def test_a_gang_downloads_once_and_each_host_has_one_copy(tls: bool, web: Web, cache: Path, tmp_path: Path) -> None:
    for run in ("first", "second"):
        answers = tr.launch(
            on_own_hosts, ranks=10, args=(web.url, cache, 2), run_dir=str(tmp_path / run), tls=tls, **QUIET
        )  # Five hosts are three rounds: one to one, two to two, one to one.
        assert {content for _, content in answers} == {CONTENT}
        paths = [path for path, _ in answers]
        assert [Path(path).parents[1].name for path in paths] == [f"cache-{rank // 2}" for rank in range(10)]
        assert len(set(paths)) == 5
        assert {Path(path).name for path in paths} == {"bikes_of_2026.csv"}
        assert web.asked == [""]
    first, second = (
        [note for note in json.loads((tmp_path / run / "report.json").read_text())["notes"] if " has bikes" in note]
        for run in ("first", "second")
    )
    assert len(first) == 5
    assert sum("http://" in note for note in first) == 1
    assert all(note.endswith(" s: 3,000,000 bytes") for note in first)
    assert not second


def test_under_tls_a_host_gives_files_to_who_trusts_the_runs_certificate_and_in_no_other_way(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(CONTENT)
    certificate = new_certificate()
    with fetching._serving(certificate) as server:
        server.paths = [tmp_path / "weights"]
        port = server.socket.getsockname()[1]
        place = f"://127.0.0.1:{port}/{server.token}/0"
        silent = socket.create_connection(("127.0.0.1", port))  # It keeps nobody else waiting.
        with silent, from_web(f"https{place}", 1000, proxies={}, tls=certificate.for_client())[0] as content:
            assert content.read() == CONTENT[1000:]
        for scheme, tls in (("http", None), ("https", None), ("https", new_certificate().for_client())):
            with pytest.raises(OSError, match=r"CERTIFICATE_VERIFY_FAILED|closed connection|reset by peer"):
                from_web(scheme + place, 0, proxies={}, tls=tls)


@pytest.mark.skipif(not machines.can_make_hosts(), reason="this process may not make network namespaces")
def test_hosts_that_reach_each_other_by_another_network_than_the_driver(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(CONTENT)

    def train(url: str, folder: str) -> None:
        world = tr.world()
        os.environ[fetching.ROOT] = f"{folder}/{world.host}"
        path = tr.fetch(url)
        assert Path(path).read_bytes() == CONTENT
        assert len(set(world.gather(path))) == len({peer.host for peer in world.peers}) == 2

    notes = machines.run_on_hosts(train, f"file://{tmp_path}/weights", str(tmp_path), each=2, cable="own")
    assert sum(" fetches file://" in note for note in notes) == 1
    assert sum(" has weights from " in note for note in notes) == 2


@pytest.mark.parametrize("ranges", [True, False])
def test_a_connection_that_breaks_is_continued(ranges: bool, web: Web) -> None:
    web.cuts, web.ranges = [1_000_000, 1_500_000], ranges
    assert Path(tr.fetch(web.url)).read_bytes() == CONTENT
    assert web.asked == ["", "bytes=1000000-", f"bytes={2_500_000 if ranges else 1_500_000}-"]


@pytest.mark.processes
def test_a_rank_that_is_killed_while_it_fetches_ends_the_gang_and_the_next_attempt_continues(
    web: Web, cache: Path
) -> None:
    def train(url: str, kill: bool) -> bytes:
        if kill and tr.world().rank == 0:
            threading.Thread(target=kill_when_there, args=(os.getpid(),), daemon=True).start()
        return Path(tr.fetch(url)).read_bytes()

    def kill_when_there(pid: int) -> None:
        while sum(path.stat().st_size for path in cache.glob("*.part/*")) != 1_000_000:
            if not cache.parent.exists():
                return
        os.kill(pid, signal.SIGKILL)

    web.cuts = [1_000_000]
    web.released.clear()
    with pytest.raises(RankFailed) as caught:
        tr.launch(train, ranks=3, args=(web.url, True), retries=0, **QUIET)
    assert (caught.value.rank, caught.value.signal) == (0, "SIGKILL")
    web.released.set()
    assert tr.launch(train, ranks=3, args=(web.url, False), **QUIET) == [CONTENT] * 3
    assert web.asked == ["", "bytes=1000000-"]
    assert [path.suffix for path in kept(cache)] == [""]


def test_a_wrong_sum_is_an_error_with_both_and_a_right_one_needs_no_source(web: Web, cache: Path) -> None:
    right, wrong = hashlib.sha256(CONTENT).hexdigest(), "0" * 64
    with pytest.raises(FetchFailed, match=f"has the sha256 {right}, and {wrong} is expected. It is not kept") as caught:
        tr.fetch(web.url, sha256=wrong)
    assert (caught.value.sha256, caught.value.expected) == (right, wrong)
    assert not kept(cache)
    path = tr.fetch(web.url, sha256=right.upper())
    web.status, requests = 503, len(web.headers)
    assert tr.fetch(web.url.replace("day=1", "day=2"), sha256=right) == path
    assert len(web.headers) == requests


@pytest.mark.processes
@pytest.mark.parametrize("fault", ["source", "sum"])
def test_every_rank_raises_the_sources_own_words(fault: str, web: Web, cache: Path) -> None:
    def train(url: str, sha256: str | None) -> str:
        try:
            on_own_hosts(url, cache, 1, sha256)
        except FetchFailed as error:
            return str(error)
        raise AssertionError

    if fault == "source":
        web.status = 404
    url = web.url.replace("http://", "http://me:word@") + "&token=hidden"
    answers = tr.launch(train, ranks=3, args=(url, "0" * 64 if fault == "sum" else None), **QUIET)
    assert len(set(answers)) == 1
    assert ("HTTP Error 404: not today" if fault == "source" else "is expected") in answers[0]
    assert "http://***@127.0.0.1" in answers[0]
    assert "word" not in answers[0]
    assert "hidden" not in answers[0]
    assert web.headers[0]["Authorization"] == f"Basic {base64.b64encode(b'me:word').decode()}"


def test_a_source_that_fails_now_and_then_is_asked_again(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    def recover(seconds: float) -> None:
        web.status = 200

    monkeypatch.setattr("time.sleep", recover)
    web.status = 503
    assert Path(tr.fetch(web.url)).read_bytes() == CONTENT
    assert len(web.headers) == 4  # A refusal, the size, the content, and whether it is the same after that.


def test_a_source_that_has_changed_is_fetched_again(web: Web, cache: Path) -> None:
    first = tr.fetch(web.url)
    assert tr.fetch(web.url) == first
    web.content, web.tag = CONTENT[::-1], '"2"'
    second = tr.fetch(web.url)
    assert Path(second).read_bytes() == CONTENT[::-1]
    assert Path(first).read_bytes() == CONTENT
    assert web.asked == ["", ""]


def test_a_source_that_changes_meanwhile_is_an_error(web: Web, cache: Path) -> None:
    web.cuts = [1_000_000]
    web.released.clear()
    with ThreadPoolExecutor(1) as pool:
        path = pool.submit(tr.fetch, web.url)
        assert web.held.wait(30)
        web.content, web.tag = CONTENT[::-1], '"2"'
        web.released.set()
        with pytest.raises(FetchFailed, match="has changed while it was fetched"):
            path.result()
    assert not kept(cache)


def test_without_length_and_version_it_is_fetched_at_each_call(web: Web) -> None:
    web.tag = ""
    paths = {tr.fetch(web.url) for _ in range(2)}
    assert len(paths) == 2
    assert {Path(path).read_bytes() for path in paths} == {CONTENT}


def test_calls_at_the_same_time_download_once(web: Web) -> None:
    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(tr.fetch, [web.url] * 4))) == 1
    assert web.asked == [""]


def test_an_empty_file(web: Web) -> None:
    web.content = b""
    assert Path(tr.fetch(web.url)).read_bytes() == b""


def test_a_folder_of_files(tmp_path: Path) -> None:
    source = tmp_path / "model"
    for name in ("config.json", "weights/1.bin", "weights/2.bin", "weights/empty"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(name.encode() * (not name.endswith("empty")))
    folder = Path(tr.fetch(f"file://{source}"))
    assert folder.name == "model"
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == {
        str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()
    }
    assert (folder / "weights/2.bin").read_bytes() == b"weights/2.bin"
    assert str(folder) == tr.fetch(f"file://{source}")
    (source / "weights/1.bin").write_bytes(b"other")
    assert Path(tr.fetch(f"file://{source}"), "weights/1.bin").read_bytes() == b"other"
    with pytest.raises(BadSetting, match="is a folder"):
        tr.fetch(str(source), sha256="0" * 64)


@pytest.mark.processes
def test_an_object_store(cache: Path) -> None:
    with object_stores.server() as address:
        env = object_stores.bucket(address)

        def put(name: str, content: bytes) -> None:
            import s3fs

            s3fs.S3FileSystem().pipe(f"bucket/{name}", content)

        def train() -> tuple[bytes, bytes]:
            if tr.world().rank == 0:
                put("model/weights.bin", CONTENT)
                put("model/config.json", b"{}")
            tr.world().barrier()
            file, _ = on_own_hosts("s3://bucket/model/weights.bin", cache, 1)
            return Path(file).read_bytes(), Path(tr.fetch("s3://bucket/model"), "config.json").read_bytes()

        assert tr.launch(train, ranks=2, env=env, **QUIET) == [(CONTENT, b"{}")] * 2

        def missing() -> str:
            with contextlib.suppress(FetchFailed):
                tr.fetch("s3://bucket/none.bin")
                return "fetched"
            return "refused"

        assert tr.launch(missing, ranks=2, env=env, **QUIET) == ["refused"] * 2


@pytest.mark.parametrize(
    ("url", "sha256", "says"),
    [
        (7, None, "takes a URL, not 7"),
        ("", None, "takes a URL, not ''"),
        ("https://host/a", "abc", "sha256='abc' must be 64 hexadecimal digits"),
        ("nosuch://host/a", None, "Protocol not known: nosuch"),
    ],
)
def test_what_is_no_source_is_refused(url: Any, sha256: str | None, says: str) -> None:
    with pytest.raises(BadSetting, match=says):
        tr.fetch(url, sha256=sha256)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(WrongVersion, match=r"gs://bucket/a needs a library that .* does not have: .*gcsfs"):
        tr.fetch("gs://bucket/a")


@pytest.mark.processes
def test_ranks_that_want_different_files_are_an_error_on_all(web: Web) -> None:
    def train(url: str) -> str:
        with pytest.raises(BadSetting, match="with different URLs") as caught:
            tr.fetch(f"{url}&rank={tr.world().rank}")
        return str(caught.value)

    assert len(set(tr.launch(train, ranks=2, args=(web.url,), **QUIET))) == 1
    assert not web.headers


def test_older_files_go_and_those_in_use_stay(tmp_path: Path) -> None:
    def make(building: Path) -> Path:
        building.mkdir()
        (building / "file").write_bytes(bytes(100))
        return building

    entries = [host_cache.entry(tmp_path / str(number), make) for number in range(4)]
    for number, entry in enumerate(entries):
        os.utime(entry.path, (number, number))
        if number:
            entry.close()
    host_cache.remove_old(tmp_path, 250, size_of)
    assert sorted(path.name for path in kept(tmp_path)) == ["0", "2", "3"]
    entries[0].close()
    host_cache.remove_old(tmp_path, 250, size_of)
    assert sorted(path.name for path in kept(tmp_path)) == ["2", "3"]
