"""What grows, and how: time a row from 1M to 16M rows, a gang from 1 to 8 ranks, a coordinator with 512 and 2,048.

    .venv/bin/python benchmarks/scale.py [--rows 1000000 4000000 16000000] [--ranks 1 2 4 8] [--gang 512 2048] [--save]

1. Rows: systems/tritium_launch.py, one epoch, two ranks: seconds from DataFrame to model, and microseconds a row. Goal:
   at most 1.1 times as long a row for 16M as for 1M.
2. Ranks, all on this machine's cores, so that only the overhead shows: seconds to launch nothing, and to launch a
   process group, on="driver", median of `--times`.
3. A coordinator in a process of its own. The ranks are simulated: real lines to it, as supervisors have, from four
   other processes on the same cores, each reporting, then ready, then telling once a second how its rank stands.
   Seconds until all have been given their numbers, and the share of a core that the coordinator takes meanwhile, over
   `--seconds`. Goals with 512: 10 s, 5 %.

`--save` writes benchmarks/results/scale.json.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from typing import Any

import _suite
import psutil

from tritium.events import Event

SIMULATORS = 4


def nothing() -> None:
    """What is launched."""


def group() -> None:
    """What is launched, with torch and a process group."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()


def launches(ranks: int, times: int) -> dict[str, float]:
    """Median seconds of both."""
    import tritium as tr

    found = {}
    for function in (nothing, group):
        seconds = []
        for _ in range(times):
            began = time.perf_counter()
            tr.launch(function, ranks=ranks, on="driver", cpus=1, progress=False)
            seconds.append(time.perf_counter() - began)
        found[function.__name__] = statistics.median(seconds)
    return found


class Silent:
    """Hears what a coordinator tells."""

    def event(self, event: Event) -> None: ...
    def output(self, rank: int, text: str) -> None: ...
    def store(self, piece: Any) -> None: ...


def coordinate(size: int, pipe: Any) -> None:
    """A coordinator: sends its address and secret, the seconds until its gang had formed, its processor seconds."""
    from tritium.gang.coordinator.coordinator import Coordinator
    from tritium.gang.stall_limit import StallLimit

    with_all = Coordinator(size, launch="L", observer=Silent(), stall_limit=StallLimit(600.0)).start()
    pipe.send((with_all.address, with_all.secret))
    with with_all.changed:
        with_all.changed.wait_for(lambda: with_all.formed)
    pipe.send(time.process_time())
    pipe.recv()
    before, began = time.process_time(), time.monotonic()
    pipe.recv()
    pipe.send((time.process_time() - before) / (time.monotonic() - began))
    with_all.close()


def simulate(address: tuple[str, int], secret: bytes, partitions: range, pipe: Any) -> None:
    """The supervisors of these partitions; says when each has been given its number, and waits for the end."""
    from tritium.gang.control.client import Client
    from tritium.gang.coordinator.stalls import RankStatus
    from tritium.gang.supervisor.supervisor import STATUS_SECONDS

    lines = []
    for partition in partitions:
        line = Client(address, secret, f"supervisor {partition}", 60.0)
        said = {"launch": "L", "attempt": 0, "host": f"host-{partition // 8}", "address": "127.0.0.1", "pid": partition}
        line.send("hello", partition=partition, port=30_000 + partition % 30_000, gpus=[], **said)
        line.send("ready", pid=partition)
        lines.append(line)
    for line in lines:
        message = line.receive()
        if message is None or message.kind != "assign" or not message.blob:
            raise RuntimeError(f"not assigned: {message}, {line.reason}")
    pipe.send("assigned")
    status = {**vars(RankStatus(heard=0.0, step=1, epoch=0, phase="training", taken=1, state="S"))}
    del status["heard"]
    while not pipe.poll(STATUS_SECONDS):
        for line in lines:
            line.send("status", **status)
    for line in lines:
        line.close()


def coordinator(size: int, seconds: float) -> dict[str, float]:
    """Seconds to form a gang of this size, and the share of a core that their status takes, over `seconds`."""
    context = multiprocessing.get_context("spawn")
    pipe, end = context.Pipe()
    server = context.Process(target=coordinate, args=(size, end))
    server.start()
    address, secret = pipe.recv()
    began = time.perf_counter()
    parts = [range(number, size, SIMULATORS) for number in range(SIMULATORS)]
    pipes = [context.Pipe() for _ in parts]
    clients = [
        context.Process(target=simulate, args=(address, secret, part, end))
        for part, (_, end) in zip(parts, pipes, strict=True)
    ]
    for client in clients:
        client.start()
    spent = pipe.recv()
    for mine, _ in pipes:
        if mine.recv() != "assigned":
            raise RuntimeError("a simulated rank was not assigned")
    formed = time.perf_counter() - began
    memory = psutil.Process(server.pid).memory_full_info().uss / 1e6
    pipe.send("count")
    time.sleep(seconds)  # the span that is measured
    pipe.send("counted")
    share = pipe.recv()
    for mine, _ in pipes:
        mine.send("end")
    for process in (*clients, server):
        process.join()
    return {"formed s": formed, "processor s until then": spent, "share of a core": share, "memory MB": memory}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="*", default=[1_000_000, 4_000_000, 16_000_000])
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--gang", type=int, nargs="*", default=[512, 2048])
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    found: dict[str, dict[str, dict[str, float]]] = {"rows": {}, "ranks": {}, "gang": {}}
    for rows in options.rows:
        one = _suite.run("tritium", "tritium_launch", "--rows", rows, "--epochs", 1)
        found["rows"][str(rows)] = {"seconds": one["seconds"], "us a row": one["seconds"] / rows * 1e6}
        print(f"{rows:>12,} rows: {one['seconds']:7.1f} s, {one['seconds'] / rows * 1e6:6.2f} us a row", flush=True)
    for ranks in options.ranks:
        one = found["ranks"][str(ranks)] = launches(ranks, options.times)
        print(f"{ranks:>12} ranks: {one['nothing']:6.2f} s, with a process group {one['group']:6.2f} s", flush=True)
    for size in options.gang:
        one = found["gang"][str(size)] = coordinator(size, options.seconds)
        print(
            f"{size:>12,} simulated ranks: formed in {one['formed s']:.1f} s, {one['processor s until then']:.1f} s of "
            f"its processor; status {one['share of a core']:.1%} of a core; {one['memory MB']:.0f} MB",
            flush=True,
        )
    if options.save:
        _suite.save("scale", found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
