"""Files of a URL, over HTTP or by fsspec, downloaded so that a broken connection is continued (any process)."""

from __future__ import annotations

import base64
import errno
import functools
import hashlib
import http.client
import json
import os
import re
import shutil
import socket
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from tritium.errors import BadSetting, TritiumError, WrongVersion
from tritium.file_system import opened, size_of

if TYPE_CHECKING:
    import ssl

SUMS = ".sha256.json"
"""The file with the sums of the others."""
_CHUNK = 1 << 22
_AT_ONCE = 8
_TRIES = 5
"""So many connections may fail in a row before a byte comes."""
_SILENT_SECONDS = 60.0
_LAST = (FileNotFoundError, PermissionError, IsADirectoryError, ValueError, TritiumError, CancelledError)
"""What another try does not change."""


@dataclass(frozen=True)
class SourceFile:
    """A file of a source.

    name : its path below the directory of the download.
    size : bytes; None where the source does not say, so that the file can't be continued.
    open : returns the content from a byte on, and the byte at which it begins: 0 where the source has no ranges.
    """

    name: str
    size: int | None
    open: Callable[[int], tuple[BinaryIO, int]]

    @property
    def top(self) -> str:
        """The name of the file, or of the folder that it is in."""
        return self.name.partition("/")[0]


@dataclass(frozen=True)
class Source:
    """What is at a URL.

    version : a text that changes with the content (ETag, modification time); "" where the source has none.
    folder  : whether the URL is a folder of these files.
    """

    version: str
    files: Sequence[SourceFile]
    folder: bool = False


def name_of(url: str) -> str:
    """Return the name of the file or folder at a URL, as a name for here."""
    path = url.partition("://")[2] if "://" in url else url
    if url.startswith(("http://", "https://")):
        path = urllib.parse.unquote(urllib.parse.urlsplit(url).path)
    return re.sub(r"[^\w.@+=-]", "_", path.rstrip("/").rpartition("/")[2]).lstrip(".") or "file"


def source_of(url: str) -> Source:
    """Ask what is at a URL. Raises WrongVersion where the library for it is missing; other errors are the source's."""
    failures = 0
    while True:
        try:
            return _source_of(url)
        except Exception as error:  # noqa: BLE001 - fsspec's file systems raise errors of any type
            failures += 1
            _wait_after(error, failures)


def _source_of(url: str) -> Source:
    name = name_of(url)
    if url.startswith(("http://", "https://")):
        version, size = _facts_of_web(url)
        return Source(version, [SourceFile(name, size, functools.partial(from_web, url))])
    try:
        files, path = opened(url)
    except ImportError as error:
        raise WrongVersion(
            f"{url} needs a library that {sys.executable} on {socket.gethostname()} does not have: {error}.",
            library=error.name,
        ) from None
    except ValueError as error:
        raise BadSetting(f"tr.fetch can't read {url!r}: {error}.", setting="url") from None

    def stored(offset: int, key: str) -> tuple[BinaryIO, int]:
        file: BinaryIO = files.open(key, "rb")
        file.seek(offset)
        return file, offset

    facts = files.info(path)
    root, folder = str(facts["name"]), facts["type"] == "directory"
    content = dict(sorted(files.find(root, detail=True).items())) if folder else {root: facts}
    content = {key: info for key, info in content.items() if info.get("type") != "directory"}
    if not content:
        raise FileNotFoundError(f"There are no files in {path}")
    if any(".." in key.split("/") for key in content):
        raise ValueError(f"{path} has names with '..', which would be outside of it here")
    listed = [
        SourceFile(name + key[len(root) :] * folder, info.get("size"), functools.partial(stored, key=key))
        for key, info in content.items()
    ]
    return Source(str(content), listed, folder)


def from_web(
    url: str, offset: int, *, proxies: Mapping[str, str] | None = None, tls: ssl.SSLContext | None = None
) -> tuple[BinaryIO, int]:
    """Return the content at an HTTP URL from a byte on, and the byte at which it begins.

    proxies : {} for none; None for those of the environment.
    tls     : how an https server is checked; None: as this machine does.
    """
    answer = _ask(url, f"bytes={offset}-" if offset else None, proxies, tls)
    return answer, offset if answer.status == http.HTTPStatus.PARTIAL_CONTENT else 0


def _facts_of_web(url: str) -> tuple[str, int | None]:
    """Return version and size of what is at an HTTP URL, by its first byte: a signed URL may be for GET alone."""
    try:
        with _ask(url, "bytes=0-0") as answer:
            return _version(answer.headers), _total(answer.headers, answer.length)
    except urllib.error.HTTPError as error:
        if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise
        return _version(error.headers), _total(error.headers, None)  # It is empty.


def _version(headers: Message) -> str:
    return headers["ETag"] or headers["Last-Modified"] or ""


def _total(headers: Message, size: int | None) -> int | None:
    total = str(headers["Content-Range"]).rpartition("/")[2]
    return int(total) if total.isdecimal() else size


def _ask(
    url: str, wanted: str | None, proxies: Mapping[str, str] | None = None, tls: ssl.SSLContext | None = None
) -> http.client.HTTPResponse:
    parts = urllib.parse.urlsplit(url)
    user, _, place = parts.netloc.rpartition("@")
    request = urllib.request.Request(parts._replace(netloc=place, fragment="").geturl())
    if user:  # It is not for the servers to which this one redirects.
        code = base64.b64encode(urllib.parse.unquote(user).encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {code}")
    if wanted is not None:
        request.add_header("Range", wanted)
    handlers: list[urllib.request.BaseHandler] = [
        urllib.request.ProxyHandler(None if proxies is None else dict(proxies))
    ]
    if tls is not None:
        handlers.append(urllib.request.HTTPSHandler(context=tls))
    opener = urllib.request.build_opener(*handlers)
    answer: http.client.HTTPResponse = opener.open(request, timeout=_SILENT_SECONDS)
    return answer


def download(files: Sequence[SourceFile], folder: Path, on_bytes: Callable[[], object]) -> dict[str, str]:
    """Make `folder` of these files, and a file of their sums, name → sha256, which are returned.

    What an interrupted call has left in the folder is continued. Raises the source's own errors, and the disk's.
    """
    folder.mkdir(exist_ok=True)
    needed = sum(file.size or 0 for file in files) - size_of(folder)
    if needed > (free := shutil.disk_usage(folder).free):
        raise OSError(errno.ENOSPC, f"{needed:,} bytes are needed in {folder.parent}, and {free:,} are free")
    stopped = threading.Event()

    def check() -> None:
        if stopped.is_set():
            raise CancelledError
        on_bytes()

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        tasks = {file.name: pool.submit(_downloaded, file, folder / file.name, check) for file in files}
        try:
            sums = {name: task.result() for name, task in tasks.items()}
        except BaseException:  # Also an interrupt: the others end at their next bytes.
            stopped.set()
            pool.shutdown(cancel_futures=True)
            raise
    (folder / SUMS).write_text(json.dumps(sums), encoding="utf-8")
    return sums


def _downloaded(file: SourceFile, path: Path, on_bytes: Callable[[], object]) -> str:
    """Download a file, or the rest of it, and return the sum of all of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    digest, failures = hashlib.sha256(), 0

    def copy(stream: BinaryIO, out: BinaryIO | None = None) -> None:
        read = getattr(stream, "read1", stream.read)  # What came before a connection breaks is not lost.
        while chunk := read(_CHUNK):
            if out is not None:
                out.write(chunk)
            digest.update(chunk)
            on_bytes()

    with open(path, "r+b", opener=lambda name, flags: os.open(name, flags | os.O_CREAT, 0o600)) as out:
        if file.size is None:
            out.truncate(0)
        copy(out)
        while (start := out.tell()) != file.size:
            try:
                stream, begins = file.open(start)
                with stream:
                    if begins != start:
                        out.seek(0)
                        out.truncate()
                        digest = hashlib.sha256()
                    copy(stream, out)
                if file.size is None:
                    break
                if out.tell() != file.size:
                    raise ConnectionError(f"{file.name} ended after {out.tell():,} of {file.size:,} bytes")
            except Exception as error:  # noqa: BLE001 - fsspec's file systems raise errors of any type
                failures = 0 if out.tell() > start else failures + 1
                _wait_after(error, failures)
    return digest.hexdigest()


def _wait_after(error: Exception, failures: int) -> None:
    """Wait before another try. Raises the error after _TRIES, or where another try can't change it."""
    refused = isinstance(error, urllib.error.HTTPError) and error.code < 500 and error.code not in (408, 429)
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if failures >= _TRIES or refused or full or isinstance(error, _LAST):
        raise error
    if failures:
        time.sleep(0.25 * 2**failures)
