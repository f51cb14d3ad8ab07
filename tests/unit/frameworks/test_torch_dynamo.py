"""The modules that torch does not import in a rank, and that work as usual once imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.processes

PROGRAM = """
import importlib.util, json, os, sys

if sys.argv[1] == "as a rank":
    from tritium.frameworks import torch as pytorch
    importlib.util.find_spec("torch")  # as libraries do that look whether it is installed
    pytorch.prepare()
    importlib.util.find_spec("torch")
import torch
import torch.distributed as dist

torch.manual_seed(0)
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 1), rank=0, world_size=1)
plain = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
net = torch.nn.parallel.DistributedDataParallel(plain)
optimizers = [
    torch.optim.Adam(net.parameters(), lr=0.01),
    torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9),
    torch.optim.AdamW(net.parameters(), lr=0.01, foreach=False),
]
x, y = torch.rand(32, 8), torch.rand(32, 1)


def step(forward, optimizer):
    loss = torch.nn.functional.mse_loss(forward(x), y)
    optimizer.zero_grad()
    loss.backward()
    before = torch.is_grad_enabled()
    optimizer.step()
    assert torch.is_grad_enabled() == before


for optimizer in optimizers * 3:
    step(net, optimizer)
without = "torch._dynamo" not in sys.modules
trained = {name: value.tolist() for name, value in plain.state_dict().items()}

compiled = torch.compile(net, backend="eager")
for optimizer in optimizers:
    step(compiled, optimizer)
graphs = []


def backend(graph, inputs):
    graphs.append(graph)
    return graph.forward


torch.compile(optimizers[0].step, backend=backend)()
import torch._dynamo.config
import torch._dynamo.utils

torch._dynamo.config.optimize_ddp = "no_optimization"
mode = torch._dynamo.utils.get_optimize_ddp_mode()
torch.nn.parallel.DistributedDataParallel(plain)
compiled = {name: value.tolist() for name, value in plain.state_dict().items()}
same = torch._dynamo is sys.modules["torch._dynamo"]
dist.destroy_process_group()
facts = {"without": without, "trained": trained, "compiled": compiled, "mode": mode, "same": same}
print(json.dumps(facts | {"graphs": len(graphs)}))
sys.stdout.flush()
os._exit(0)
"""


def facts(how: str, store: Path) -> dict[str, Any]:
    command = [sys.executable, "-c", PROGRAM, how, str(store)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_rank_trains_without_the_compiler_and_compiles_as_ever(tmp_path: Path) -> None:
    ours, theirs = facts("as a rank", tmp_path / "ours"), facts("as ever", tmp_path / "theirs")
    assert ours["without"], "torch._dynamo was imported, which costs as much as importing torch"
    assert not theirs["without"], "torch no longer imports it by itself: frameworks/torch_dynamo.py can go"
    assert ours["trained"] == theirs["trained"]
    assert ours["compiled"] == theirs["compiled"] != ours["trained"]
    assert ours["graphs"] == theirs["graphs"]
    assert (ours["mode"], ours["same"]) == (theirs["mode"], theirs["same"]) == ("no_optimization", True)
