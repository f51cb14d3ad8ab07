"""A web service on a free port that misbehaves on request (a process of its own); `running()` starts it.

POST /PATH?… answers the JSON body's "x" doubled, after what PATH says; GET /counts has how often each path and x came.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

counts: Counter[str] = Counter()
times: list[float] = []
here = {"now": 0, "most": 0}
tokens = ["token-1"]


@contextmanager
def running() -> Iterator[str]:
    """Yield the URL of a service, which ends with the block."""
    with subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


def counted(url: str) -> dict[str, Any]:
    """Return what the service has counted, and let it begin anew."""
    counted: dict[str, Any] = httpx.get(f"{url}/counts").json()
    return counted


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    body = b""
    while (message := await receive()).get("more_body"):
        body += message["body"]
    body += message.get("body", b"")
    path = scope["path"].strip("/")
    if path == "counts":
        result = {"counts": dict(counts), "times": list(times), "most": here["most"]}
        counts.clear(), times.clear(), here.update(most=0)
        await answer(send, 200, result)
        return
    x = json.loads(body)["x"] if body else 0
    counts[path] += 1
    counts[f"{path} {x}"] += 1
    times.append(time.monotonic())
    await behave(path, x, counts[f"{path} {x}"], dict(scope["headers"]), send)


async def behave(path: str, x: int, call: int, headers: dict[bytes, bytes], send: Any) -> None:
    first = call == 1
    if path == "busy" and first and x % 10 == 0:
        await answer(send, 429, "later", {"retry-after": "1"})
    elif path == "closed":
        await answer(send, 429, "tomorrow", {"retry-after": "86400"})
    elif path == "broken" and first:
        await answer(send, 500, "oh")
    elif path == "always-broken" and x == 3:
        await answer(send, 503, "down")
    elif path == "once-missing" and x == 3 and first:
        await answer(send, 404, "not yet")
    elif path == "missing" and x == 3:
        await answer(send, 404, f"nothing here for {headers.get(b'authorization', b'').decode()}")
    elif path == "cut" and first:
        start = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"100")]}
        await send(start)
        await send({"type": "http.response.body", "body": b'{"y": 1'})  # uvicorn ends the connection
    elif path == "words" and x == 3:
        await answer(send, 200, {"y": "three"})
    elif path == "token" and headers.get(b"authorization") != b"Bearer token-2":
        await answer(send, 401, "who are you?")
    else:
        if path == "slow" and first:
            await asyncio.sleep(30)
        elif path == "takes-time":
            here["now"] += 1
            here["most"] = max(here["most"], here["now"])
            await asyncio.sleep(0.05)
            here["now"] -= 1
        await answer(send, 200, {"y": 2 * x})


async def answer(send: Any, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
    named = {"content-type": "application/json", **(headers or {})}
    pairs = [(name.encode(), value.encode()) for name, value in named.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})


if __name__ == "__main__":
    import uvicorn

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        print(listening.getsockname()[1], flush=True)
        config = uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1)
        uvicorn.Server(config).run(sockets=[listening])
