"""`tr.fetch`: files of a URL, downloaded once for a gang, with one copy for each host (rank, driver)."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pickle
import re
import secrets
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tritium import host_cache
from tritium.download import SUMS, SourceFile, download, from_web, name_of, source_of
from tritium.errors import BadSetting, FetchFailed, TritiumError, masked
from tritium.file_system import size_of
from tritium.gang.control.address import listener
from tritium.gang.rank.world import World, world
from tritium.host_cache import CacheEntry
from tritium.wire import address_text

if TYPE_CHECKING:
    from tritium.tls import Certificate

ROOT = "TRITIUM_FETCHED"
"""The variable that names the directory of all fetched files of a host."""
_DISK_PARTS = 4
"""Older files go where all together would take more than one such part of the disk."""
_in_use: dict[Path, CacheEntry] = {}
"""What this process has fetched: it is not removed before its end."""


def fetch(url: str, *, sha256: str | None = None) -> str:
    """Return the path of a copy on this host of a file or folder, which one rank downloads for the whole gang.

    All ranks of a gang call it, as they do `world.gather`. Rank 0 downloads from the source, each other host gets it
    from a host that has it, and the ranks of a host share one copy. It stays for later calls and runs while the source
    is the same, so don't write to it. In any other process it does the same for this host.

    url    : "https://…", or what fsspec supports: "s3://…", "hf://…", "file://…", and folders there.
    sha256 : the expected sum of a file, in hex. With it a copy that is there is used without asking the source.

    Raises FetchFailed, the same on every rank, where the source fails or the sum is another one, and WrongVersion where
    the library for such a URL is missing.
    """
    if not isinstance(url, str) or not url:
        raise BadSetting(f"tr.fetch takes a URL, not {url!r}.", setting="url")
    if sha256 is not None and not re.fullmatch(r"[0-9a-fA-F]{64}", sha256):
        raise BadSetting(f"sha256={sha256!r} must be 64 hexadecimal digits.", setting="sha256")
    expected, gang = sha256 and sha256.lower(), world()
    if len(gang.peers) < 2:
        return _kept(_from_source(gang, url, expected), name_of(url))
    places = _on_all(gang, lambda: _place(gang, url, expected))
    if len({place[:2] for place in places}) > 1:
        raise BadSetting("The ranks of a gang call tr.fetch with different URLs or sums.", setting="url")
    leaders = [rank for rank, place in enumerate(places) if places.index(place) == rank]
    serves = gang.rank in leaders and len(leaders) > 1
    with _serving(gang._control.certificate) if serves else nullcontext() as server:
        offers = _on_all(gang, lambda: None if gang.rank else _offered(_from_source(gang, url, expected), server))
        having = 1
        while having < len(leaders):  # All that have it give it to one more, so 100 hosts take seven rounds.
            givers = dict(zip(leaders[having : 2 * having], leaders, strict=False))
            taken = _on_all(gang, functools.partial(_taken, gang, offers, givers.get(gang.rank), server))
            offers = [new or old for new, old in zip(taken, offers, strict=True)]
            having *= 2
    return _kept(CacheEntry(_root() / offers[0].key), name_of(url))


def _on_all(gang: World, work: Callable[[], Any]) -> list[Any]:
    """Do the work of each rank, and return the results of all. Raises the first one's error on every rank."""
    try:
        result = work()
    except TritiumError as error:
        result = error
    results = [pickle.loads(blob) for blob in gang._control.all_gather("fetch", pickle.dumps(result))]
    for result in results:
        if isinstance(result, TritiumError):
            raise result
    return results


def _root() -> Path:
    return host_cache.root(ROOT, "tritium-fetched", "ranks trust the files in it")


def _place(gang: World, url: str, sha256: str | None) -> tuple[Any, ...]:
    """Return what is fetched, and where to: containers of one host may have directories of their own."""
    status = _root().stat()
    return url, sha256, gang.host, status.st_dev, status.st_ino


def _kept(entry: CacheEntry, name: str) -> str:
    if _in_use.setdefault(entry.path, entry) is not entry:
        entry.close()
    return str(entry.path / name)


# --- From the source, or from another host


def _from_source(gang: World, url: str, sha256: str | None) -> CacheEntry:
    def make(building: Path) -> Path:
        source = asked or source_of(url)
        if sha256 is not None and source.folder:
            raise BadSetting(f"sha256= is the sum of a file, and {url} is a folder.", setting="sha256")
        gang.note(f"{gang.host} fetches {masked(url)}")
        _make(gang, building, source.files, {name: sha256} if sha256 else {}, url)
        if sha256 is None and source.version and source_of(url).version != source.version:
            shutil.rmtree(building)
            raise FetchFailed(f"{url} has changed while it was fetched. Call tr.fetch again.", url=masked(url))
        return building

    name, asked = name_of(url), None
    with _words_of_source(url, gang, f"{url} can't be fetched on {gang.host}"):
        if sha256 is None:
            asked = source_of(url)
        version = (name, sha256) if asked is None else (url, asked.version or uuid.uuid4().hex)
        key = hashlib.sha256("\n".join(map(str, version)).encode()).hexdigest()[:24]
        return _entry(gang, key, name, make)


def _taken(gang: World, offers: Sequence[Offer], giver: int | None, server: FileServer | None) -> Offer | None:
    """Fetch from the host of the rank `giver`, and return the offer of this host; None where there is none."""
    if giver is None:
        return None
    peer, offer = gang.peers[giver], offers[giver]
    address = address_text((peer.address, offer.port))
    certificate = gang._control.certificate
    settings: dict[str, Any] = {"proxies": {}, "tls": certificate and certificate.for_client()}
    place = f"http{'s' * (certificate is not None)}://{address}/{offer.token}"
    files = [
        SourceFile(name, size, functools.partial(from_web, f"{place}/{number}", **settings))
        for number, (name, size, _) in enumerate(offer.files)
    ]
    sums = {name: digest for name, _, digest in offer.files}
    top = files[0].top
    words = (
        f"{gang.host} can't fetch {top} from {peer.host} at {address}, which has it (let firewalls and NetworkPolicies "
        "pass TCP between executors)"
    )

    def make(building: Path) -> Path:
        _make(gang, building, files, sums, peer.host)
        return building

    with _words_of_source(top, gang, words):
        return _offered(_entry(gang, offer.key, top, make), server)


@contextmanager
def _words_of_source(url: str, gang: World, what: str) -> Iterator[None]:
    """Raise FetchFailed for an error of the block."""
    try:
        yield
    except TritiumError:
        raise
    except Exception as error:  # noqa: BLE001 - fsspec's file systems raise errors of any type
        reason = masked(f"{type(error).__name__}: {error}")
        raise FetchFailed(f"{what}: {reason}.", url=masked(url), host=gang.host, reason=reason) from None


def _entry(gang: World, key: str, name: str, make: Callable[[Path], Path]) -> CacheEntry:
    """Return the entry of the cache; the rank is seen to wait while another process of this host makes it."""
    with gang._control.progress.within(f"waiting for another process on this host to fetch {name}", "wait"):
        return host_cache.entry(_root() / key, make)


def _make(gang: World, building: Path, files: Sequence[SourceFile], sums: dict[str, str], origin: str) -> None:
    """Download the files. Raises FetchFailed for one whose sum is another than in `sums`, and keeps none then."""
    progress, began = gang._control.progress, time.monotonic()
    limit = shutil.disk_usage(building.parent).total // _DISK_PARTS
    host_cache.remove_old(building.parent, limit - sum(file.size or 0 for file in files), size_of)
    with progress.within(f"fetching {files[0].name}"):
        digests = download(files, building, progress.touch)
    for name, expected in sums.items():
        if digests[name] != expected:
            shutil.rmtree(building)
            raise FetchFailed(
                f"{name} from {origin} has the sha256 {digests[name]}, and {expected} is expected. It is not kept.",
                url=masked(origin),
                host=gang.host,
                sha256=digests[name],
                expected=expected,
            )
    size, seconds = sum((building / name).stat().st_size for name in digests), time.monotonic() - began
    gang.note(f"{gang.host} has {files[0].top} from {masked(origin)} after {seconds:.1f} s: {size:,} bytes")


# --- To other hosts


@dataclass(frozen=True)
class Offer:
    """What a host has, for others.

    key   : the name of the directory in the cache of each host.
    files : name, size in bytes and sha256.
    """

    key: str
    files: Sequence[tuple[str, int, str]]
    port: int = 0
    token: str = ""


def _offered(entry: CacheEntry, server: FileServer | None) -> Offer:
    """Return the offer of what a host has just got, which stays until this process ends."""
    _kept(entry, "")
    sums = json.loads((entry.path / SUMS).read_text(encoding="utf-8"))
    files = [(name, (entry.path / name).stat().st_size, digest) for name, digest in sums.items()]
    if server is None:
        return Offer(entry.path.name, files)
    server.paths = [entry.path / name for name in sums]
    return Offer(entry.path.name, files, server.socket.getsockname()[1], server.token)


class FileServer(ThreadingHTTPServer):
    """Gives files to who knows the token, which travels over the gang's authenticated connections.

    certificate : the run's, by which the files are encrypted; None: they are not.
    """

    daemon_threads = True

    def __init__(self, certificate: Certificate | None) -> None:
        super().__init__(("", 0), FileRequest, bind_and_activate=False)
        self.socket.close()
        self.socket = listener("::" if socket.has_dualstack_ipv6() else "0.0.0.0")
        if certificate is not None:  # The handshake is each connection's own: none waits for another client's.
            context = certificate.for_server()
            self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.token = secrets.token_hex(16)
        self.paths: list[Path] = []

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do nothing: the other host reports a broken connection."""


class FileRequest(BaseHTTPRequestHandler):
    """Answers `GET /token/number`, also from a byte on."""

    def do_GET(self) -> None:
        """Send a file."""
        server = cast(FileServer, self.server)
        wanted = re.fullmatch(r"/(\w+)/(\d+)", self.path)
        if wanted is None or not secrets.compare_digest(wanted[1], server.token) or int(wanted[2]) >= len(server.paths):
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        first = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(first[1]) if first else 0
        with open(server.paths[int(wanted[2])], "rb") as file:
            self.send_response(HTTPStatus.PARTIAL_CONTENT if start else HTTPStatus.OK)
            self.send_header("Content-Length", str(os.fstat(file.fileno()).st_size - start))
            self.end_headers()
            self.connection.sendfile(file, start)

    def log_message(self, format: str, *args: Any) -> None:
        """Do nothing: the log shows what is fetched."""


@contextmanager
def _serving(certificate: Certificate | None) -> Iterator[FileServer]:
    with FileServer(certificate) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="tritium-fetch", daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
