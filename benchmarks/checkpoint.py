"""What a checkpoint costs the training: two DDP ranks with a model of 100 MB, with and without saving, interleaved.

    .venv/bin/python benchmarks/checkpoint.py [--megabytes 100] [--optimizer sgd adam] [--steps 20] [--pairs 6]

A pair is a block of steps without a save and a block of as many with one save after the first step, `wait()` included,
so that whatever the background thread takes from the training is counted; every other pair has them the other way
round. The cost of a save is the difference of the two blocks' seconds. Printed: its median, as a share of the step time
at one save a minute (goal: below 2 %), how long the call itself takes (the snapshot), how long until the manifest is
written, and what a call costs by the clock when no save is due (`every="1min"`). Adam's state is three times the model.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from typing import Any

RANKS, BATCH, WIDTH = 2, 32, 64
GOAL = 0.02  # of the step time, at one save a minute


def train(megabytes: float, kind: str, steps: int, pairs: int) -> dict[str, Any]:
    """In a rank."""
    import torch
    import torch.distributed as dist

    import tritium as tr

    world = tr.world()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    hidden = int((megabytes * 1e6 / 4 / 4) ** 0.5)
    layers = [torch.nn.Linear(WIDTH, hidden), torch.nn.ReLU()]
    for _ in range(4):
        layers += [torch.nn.Linear(hidden, hidden), torch.nn.ReLU()]
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers, torch.nn.Linear(hidden, 1)))
    made = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[kind]
    optimizer = made(net.parameters(), lr=1e-4)
    x, y = torch.rand(BATCH, WIDTH), torch.rand(BATCH, 1)
    total = [0]

    def step() -> None:
        loss = torch.nn.functional.mse_loss(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total[0] += 1

    def state() -> dict[str, Any]:
        return {"module": net.module.state_dict(), "optimizer": optimizer.state_dict()}

    calls: list[float] = []

    def block(saving: bool) -> float:
        dist.barrier()
        began = time.perf_counter()
        for number in range(steps):
            step()
            if saving and number == 0:
                called = time.perf_counter()
                world.checkpoint.save(state, total[0], own={"rng": torch.get_rng_state()}, keep=1)
                calls.append(time.perf_counter() - called)
        world.checkpoint.wait()
        dist.barrier()
        return time.perf_counter() - began

    block(saving=True)  # memory is reserved, the disk is awake
    calls.clear()
    found = []
    for pair in range(pairs):
        order = (False, True) if pair % 2 == 0 else (True, False)
        seconds = {saving: block(saving) for saving in order}
        found.append((seconds[False], seconds[True]))
    began = time.perf_counter()
    for _ in range(2000):
        world.checkpoint.save(state, total[0], every="1min")
    idle = (time.perf_counter() - began) / 2000
    dist.destroy_process_group()
    return {"pairs": found, "call": statistics.median(calls), "idle": idle}


def measure(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    import tritium as tr

    with tempfile.TemporaryDirectory(prefix="tritium-bench-", dir=options.dir) as folder:
        args = (options.megabytes, kind, options.steps, options.pairs)
        results = tr.launch(
            train, ranks=RANKS, args=args, on="driver", framework="torch", cpus=1, run_dir=folder, progress=False
        )
        with open(f"{folder}/events.jsonl", encoding="utf-8") as lines:
            saved = [event for event in map(json.loads, lines) if event["kind"] == "checkpoint"][1:]
    pairs = results[0]["pairs"]
    costs = [with_save - without for without, with_save in pairs]
    cost = statistics.median(costs)
    return {
        "state MB": round(saved[0]["bytes"] / 1e6, 1),
        "step s": round(statistics.median(without for without, _ in pairs) / options.steps, 4),
        "cost s": round(cost, 3),
        "costs s": [round(c, 3) for c in sorted(costs)],
        "share at one a minute": round(cost / 60, 5),
        "call s": round(max(result["call"] for result in results), 4),
        "until written s": round(statistics.median(event["seconds"] for event in saved), 3),
        "call not due us": round(max(result["idle"] for result in results) * 1e6, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=100.0)
    parser.add_argument("--optimizer", nargs="+", choices=("sgd", "adam"), default=["sgd", "adam"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--dir", default=None, help="where the run directory is made; the default is the temporary one")
    options = parser.parse_args()
    found = {kind: measure(kind, options) for kind in options.optimizer}
    print(f"model of {options.megabytes:g} MB, {RANKS} ranks, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for kind, facts in found.items():
        verdict = "below" if facts["share at one a minute"] < GOAL else "ABOVE"
        print(
            f"{kind:<5} state {facts['state MB']:6.1f} MB, step {facts['step s']:.3f} s: a save costs "
            f"{facts['cost s']:.2f} s, {facts['share at one a minute']:.2%} at one a minute ({verdict} {GOAL:.0%}); "
            f"the call takes {facts['call s']:.3f} s, the manifest is there after {facts['until written s']:.2f} s; "
            f"a call that is not due takes {facts['call not due us']:.0f} us"
        )
    print(json.dumps({"benchmark": "checkpoint", "megabytes": options.megabytes, **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
