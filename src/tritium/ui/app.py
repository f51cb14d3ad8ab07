"""The page as an ASGI application: read only, for who has its token (driver)."""

from __future__ import annotations

import functools
import hmac
import ipaddress
import json
import socket
from collections.abc import AsyncIterator, Callable
from importlib import resources
from typing import Any
from urllib.parse import urlsplit

import anyio
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tritium.ui import logs, prometheus
from tritium.ui.runs import Runs, RunView, log_of

LOOK_SECONDS = 0.25
"""The time between two looks at a local run directory."""
REMOTE_SECONDS = 5.0
"""The same for a store, which may charge for each."""
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Guard:
    """Refuses requests whose Host or Origin is a stranger's: a page elsewhere on the web may call a loopback address.

    names : the names by which this server is called, beside `localhost` and addresses of the loopback.
    everywhere : whether any address will do, for a server that listens on all of them; no web page has one as its name
                 while it speaks for another.
    """

    def __init__(self, app: ASGIApp, names: frozenset[str], everywhere: bool) -> None:
        self._app, self._names, self._everywhere = app, names, everywhere

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (reason := self._refused(Request(scope).headers)):
            await PlainTextResponse(reason, 403, _HEADERS)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refused(self, headers: Any) -> str:
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._is_ours(_name(f"//{host}")):
            return f"This server is not called {host!r:.200}. If it is behind another name: tritium ui --allow NAME\n"
        if origin is not None and urlsplit(origin).netloc != host:
            return "A page of another site asks.\n"
        return ""

    def _is_ours(self, name: str) -> bool:
        if name in self._names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return self._everywhere or address.is_loopback


def _name(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def application(
    runs: Runs,
    token: str,
    host: str = "127.0.0.1",
    allow: tuple[str, ...] = (),
    ending: Callable[[], bool] = lambda: False,
) -> Starlette:
    """Return the page over these runs.

    host   : the address that the server listens on.
    allow  : further names by which browsers may call it, such as a proxy's.
    ending : tells whether the server is to end, so that answers which go on for ever end, too.
    """
    on_loopback = host == "localhost" or _is_loopback(host)
    names = {"localhost", *(name.lower() for name in allow)}
    names |= set() if on_loopback else {host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}
    guarded = functools.partial(_guarded, token=token)
    routes = [
        Route("/", guarded(lambda _: _static("index.html"))),
        Route("/static/{name}", _asset),
        Route("/api/runs", guarded(lambda _: JSONResponse(runs.rows(), headers=_HEADERS))),
        Route("/metrics", guarded(lambda _: _metrics(runs))),
        Route("/api/runs/{key}/events", guarded(lambda request: _events(_view(runs, request), ending))),
        Route("/api/runs/{key}/log", guarded(lambda request: _log(request, _view(runs, request)))),
        Route("/api/runs/{key}/search", guarded(lambda request: _search(request, _view(runs, request)))),
        Route("/api/runs/{key}/stacks", guarded(lambda request: _stacks(_view(runs, request)))),
    ]
    middleware = [Middleware(Guard, frozenset(names), not on_loopback)]
    return Starlette(routes=routes, middleware=middleware, exception_handlers={_Missing: _missing})


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Missing(Exception):
    """There is no such run, log or stack."""


def _missing(_: Request, error: Exception) -> Response:
    return PlainTextResponse(f"{error}\n", 404, _HEADERS)


def _guarded(handle: Callable[[Request], Response], token: str) -> Callable[[Request], Response]:
    """Return a handler that answers who has the token alone. Starlette runs it in a thread."""

    def answer(request: Request) -> Response:
        if not hmac.compare_digest(request.query_params.get("token", "").encode(), token.encode()):
            return PlainTextResponse("Open the whole address that was printed, with its token.\n", 403, _HEADERS)
        return handle(request)

    return answer


@functools.cache
def _content(name: str) -> bytes:
    return (resources.files("tritium.ui") / "static" / name).read_bytes()


def _static(name: str) -> Response:
    return Response(_content(name), headers=_HEADERS, media_type=_TYPES[name[name.rindex(".") :]])


def _asset(request: Request) -> Response:
    name = request.path_params["name"]
    known = {entry.name for entry in (resources.files("tritium.ui") / "static").iterdir()}
    if name not in known or name[name.rindex(".") :] not in _TYPES:
        raise _Missing(f"There is no file {name!r:.200}.")
    return _static(name)


def _metrics(runs: Runs) -> Response:
    return PlainTextResponse(prometheus.text(runs), headers=_HEADERS)


def _view(runs: Runs, request: Request) -> RunView:
    view = runs.get(request.path_params["key"])
    if view is None:
        raise _Missing("There is no such run at the places of this page.")
    return view


# ---- A run, as it changes


def _events(view: RunView, ending: Callable[[], bool]) -> Response:
    headers = {**_HEADERS, "X-Accel-Buffering": "no"}
    return StreamingResponse(_changes(view, ending), headers=headers, media_type="text/event-stream")


async def _changes(view: RunView, ending: Callable[[], bool]) -> AsyncIterator[str]:
    """Yield server-sent events: each with the parts of the page that have changed since the last, None for none."""
    sent: dict[str, str] = {}
    looks = round(REMOTE_SECONDS / LOOK_SECONDS) if view.place.remote else 1
    while not ending():
        parts, more = await anyio.to_thread.run_sync(view.sections)
        texts = {name: json.dumps(part, ensure_ascii=False) for name, part in parts.items()}
        changed = {name: text for name, text in texts.items() if sent.get(name) != text}
        changed |= {name: "null" for name in sent if name not in texts}
        sent = texts
        body = ", ".join(f"{json.dumps(name)}: {text}" for name, text in changed.items())
        yield f"data: {{{body}}}\n\n" if changed else ": nothing new\n\n"
        for _ in range(0 if more else looks):
            if not ending():
                await anyio.sleep(LOOK_SECONDS)


# ---- Logs and stacks


def _log(request: Request, view: RunView) -> Response:
    name = log_of(_number(request, "rank") or 0)
    after = _number(request, "after")
    if after is not None:
        return JSONResponse(logs.page_after(view.place, name, after), headers=_HEADERS)
    return JSONResponse(logs.page_before(view.place, name, _number(request, "before")), headers=_HEADERS)


def _search(request: Request, view: RunView) -> Response:
    text = request.query_params.get("text", "")
    if not text:
        raise _Missing("There is nothing to search for.")
    name = log_of(_number(request, "rank") or 0)
    return JSONResponse(logs.search(view.place, name, text, _number(request, "after") or 0), headers=_HEADERS)


def _stacks(view: RunView) -> Response:
    names = view.place.names("stacks")
    texts = {name: view.place.read(f"stacks/{name}").decode("utf-8", "replace") for name in names}
    return JSONResponse(texts, headers=_HEADERS)


def _number(request: Request, name: str) -> int | None:
    text = request.query_params.get(name)
    if text is None:
        return None
    if not text.isascii() or not text.isdecimal():
        raise _Missing(f"{name}={text!r:.100} is no number.")
    return int(text)
