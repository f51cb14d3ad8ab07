"""Call a web service once for each row, with retries and limits (Spark's Python worker).

Requests run in one event loop in a thread of its own, so that those in flight go on while Spark's worker waits for
rows, or for someone to take the results.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import random
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any

import pyarrow as pa

from tritium.errors import RequestFailed, WrongVersion, masked

RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
"""The statuses after which the same request may succeed."""
CALL_KEYS = frozenset({"method", "url", "params", "headers", "json", "data", "content"})
"""What `request` may return beside a body: a dict with "method", and any of the others, as of `httpx.request`."""
_SHOWN = 200
"""Characters of a service's answer in an error."""


@dataclass(frozen=True, kw_only=True)
class Calls:
    """What a task does for its rows. The meaning of the fields is that of `tr.http_transformer`."""

    url: str
    request: Callable[[dict[str, Any]], Any]
    response: Callable[[Any], Any] | None
    headers: Mapping[str, str] | Callable[[], Mapping[str, str]] | None
    arrow_type: pa.DataType
    on_error: str
    concurrency: int
    timeout: float
    retries: int
    backoff: float
    max_backoff: float
    rate: float | None
    """Requests a second of this task."""
    max_requests: int | None
    """Requests of this task."""


def call(payload: bytes, batches: Iterator[pa.StructArray]) -> Iterator[pa.StructArray]:
    """Yield (value, error) for every row in order, as the function of the UDF.

    payload : the `Calls`, pickled.
    batches : rows as structs of the input columns.

    Arrays are short, so that a `limit` calls the service for hardly more rows than it takes.
    """
    calls: Calls = pickle.loads(payload)
    kind = pa.struct([("value", calls.arrow_type), ("error", pa.string())])
    at_once = 4 * calls.concurrency
    seen = 0
    with _Loop() as loop, _Service(calls, loop) as service:
        for batch in batches:
            answers = [
                loop.start(service.answer(row, number)) for number, row in enumerate(batch.to_pylist(), start=seen)
            ]
            seen += len(answers)
            for start in range(0, len(answers), at_once):
                pairs = [answer.result() for answer in answers[start : start + at_once]]
                yield pa.array([{"value": value, "error": error} for value, error in pairs], kind)
            if not answers:
                yield pa.array([], kind)


class _Loop:
    """An event loop that runs in a thread until the block ends, which cancels what has not ended."""

    def __enter__(self) -> _Loop:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="tritium-http", daemon=True)
        self._thread.start()
        return self

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a coroutine in the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def __exit__(self, *error: object) -> None:
        self.start(_cancel_others()).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class _Failed(Exception):
    """A row has no value. `wait`: seconds after which the service asked to be called again; None: it did not."""

    def __init__(self, text: str, *, again: bool = False, wait: float | None = None, status: int | None = None) -> None:
        super().__init__(text)
        self.again, self.wait, self.status = again, wait, status


class _Service:
    """The service as one task calls it: its connections, its rate, and what is left of its requests."""

    def __init__(self, calls: Calls, loop: _Loop) -> None:
        try:
            import httpx
        except ModuleNotFoundError as error:
            raise WrongVersion(
                "This executor lacks httpx, with which a web service is called: pip install 'tritium[http]' there.",
                library="httpx",
            ) from error
        self._httpx, self._calls, self._loop = httpx, calls, loop
        self._slots = asyncio.Semaphore(calls.concurrency)
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(calls.timeout, pool=None),
            limits=httpx.Limits(max_connections=calls.concurrency, max_keepalive_connections=calls.concurrency),
        )
        self._headers: dict[str, str] | None = None
        self._secrets: set[str] = set()
        self._requests = 0
        self._next_turn = self._not_before = 0.0
        self._failure: RequestFailed | None = None

    def __enter__(self) -> _Service:
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.start(_cancel_others()).result()
        self._loop.start(self._client.aclose()).result()

    async def answer(self, row: dict[str, Any], number: int) -> tuple[Any, str | None]:
        """Return the value of a row, or None and why it has none. Raises RequestFailed with `on_error="fail"`."""
        async with self._slots:
            if self._failure is not None:
                raise self._failure
            try:
                return await self._value(row), None
            except _Failed as error:
                text = masked(self._without_secrets(str(error)))
                if self._calls.on_error != "fail":
                    return None, text
                self._failure = _failure(self._calls, number, text, error.status)
            raise self._failure

    async def _value(self, row: dict[str, Any]) -> Any:
        arguments = self._arguments(row)
        attempts, renewed = 0, not callable(self._calls.headers)
        while True:
            await self._turn()
            attempts += 1
            try:
                return self._read(await self._send(arguments))
            except _Failed as error:
                renews = error.status == 401 and not renewed
                if not (error.again or renews) or attempts > self._calls.retries:
                    tried = f" ({attempts} attempts)" if attempts > 1 else ""
                    raise _Failed(f"{error}{tried}", status=error.status) from None
                wait = min(self._calls.max_backoff, self._calls.backoff * 2 ** (attempts - 1)) * random.uniform(0.5, 1)
                if error.wait is not None:
                    if error.wait > self._calls.max_backoff:
                        raise _Failed(
                            f"{error}; the service asks to wait {error.wait:.0f} s, and max_backoff is "
                            f"{self._calls.max_backoff:g} s",
                            status=error.status,
                        ) from None
                    # The other rows of this task would be refused, too.
                    self._not_before = max(self._not_before, self._loop.loop.time() + error.wait)
                    wait = 0.0
                if renews:
                    self._headers, renewed, wait = None, True, 0.0
            await asyncio.sleep(wait)

    def _arguments(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of `httpx.AsyncClient.build_request`."""
        with self._users("request"):
            body = self._calls.request(row)
        if isinstance(body, Mapping) and "method" in body and set(body) <= CALL_KEYS:
            return {"url": self._calls.url, **body}
        form = "content" if isinstance(body, str | bytes) else "json"
        return {"method": "POST", "url": self._calls.url, form: body}

    async def _turn(self) -> None:
        """Wait until the service may be called, and count the request. Raises _Failed when none is left."""
        limit, now = self._calls.max_requests, self._loop.loop.time()
        while now < self._not_before:
            await asyncio.sleep(self._not_before - now)
            now = self._loop.loop.time()
        if limit is not None and self._requests >= limit:
            raise _Failed(f"no request is left: this task's share of max_requests is {limit}")
        self._requests += 1
        if self._calls.rate is not None:
            turn = max(now, self._next_turn)
            self._next_turn = turn + 1 / self._calls.rate
            await asyncio.sleep(turn - now)

    async def _send(self, arguments: dict[str, Any]) -> Any:
        """Return the service's answer. Raises _Failed for none, and for a status that is no success."""
        headers = {**self._common_headers(), **(arguments.get("headers") or {})}
        self._secrets |= set(map(str, headers.values()))
        try:
            request = self._client.build_request(**{**arguments, "headers": headers})
            answer = await asyncio.wait_for(self._client.send(request), self._calls.timeout)
        except (asyncio.TimeoutError, self._httpx.TimeoutException):
            raise _Failed(f"no answer within timeout={self._calls.timeout:g} s", again=True) from None
        except (self._httpx.UnsupportedProtocol, self._httpx.LocalProtocolError, TypeError, ValueError) as error:
            raise _Failed(f"the request can't be made: {type(error).__name__}: {error}") from None
        except self._httpx.RequestError as error:
            raise _Failed(f"{type(error).__name__}: {error}".removesuffix(": "), again=True) from None
        if answer.is_success:
            return answer
        status = answer.status_code
        body = " ".join(answer.text.split())
        text = f"{status} {answer.reason_phrase}" + (f": {body[:_SHOWN]}" if body else "")
        raise _Failed(text, again=status in RETRIED, wait=_retry_after(answer), status=status)

    def _common_headers(self) -> dict[str, str]:
        if self._headers is None:
            with self._users("headers"):
                headers = self._calls.headers
                self._headers = dict(headers() if callable(headers) else headers or {})
        return self._headers

    def _read(self, answer: Any) -> Any:
        """Return the value that `response` makes of the answer. Raises _Failed where it does not fit the type."""
        with self._users("response"):
            value = answer.text if self._calls.response is None else self._calls.response(answer)
        try:
            pa.scalar(value, self._calls.arrow_type)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            raise _Failed(
                f"response= returned {value!r:.100} ({type(value).__name__}), which is no {self._calls.arrow_type}"
            ) from None
        return value

    @contextlib.contextmanager
    def _users(self, name: str) -> Iterator[None]:
        """Raise _Failed, with the place in the user's code, for an exception of a function of the user's."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything, and that is one row's error
            place = traceback.extract_tb(error.__traceback__)[-1]
            raise _Failed(
                f"{name}= raised {type(error).__name__}: {error} ({place.filename}, line {place.lineno})"
            ) from None

    def _without_secrets(self, text: str) -> str:
        """Return `text` without the values of headers, which a service may have sent back."""
        words = {part for secret in self._secrets for part in (secret, secret.rpartition(" ")[2]) if len(part) > 3}
        for word in sorted(words, key=len, reverse=True):
            text = text.replace(word, "***")
        return text


def _failure(calls: Calls, number: int, text: str, status: int | None) -> RequestFailed:
    from pyspark import TaskContext

    task = TaskContext.get()
    place = f"row {number}" + ("" if task is None else f" of partition {task.partitionId()}")
    return RequestFailed(
        f"{masked(calls.url)} gave no value for {place}: {text}. on_error='column' or 'null' of tr.http_transformer "
        "goes on without it; retries=, timeout= and max_backoff= say how long it is tried.",
        url=masked(calls.url),
        status=status,
        row=number,
    )


def _retry_after(answer: Any) -> float | None:
    """Return the seconds of a Retry-After header, which is a number or a date; None without a valid one."""
    value = answer.headers.get("retry-after", "")
    if value.isdigit():
        return float(value)
    with contextlib.suppress(ValueError, TypeError):
        date = parsedate_to_datetime(value)
        return max(0.0, (date.replace(tzinfo=date.tzinfo or timezone.utc) - datetime.now(timezone.utc)).total_seconds())
    return None
