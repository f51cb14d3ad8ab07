"""Scripts for horovodrun, with the calls of Horovod's public examples in their order, by `tritium run --compat`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.timeout(300)]
MNIST = """
import argparse

import torch
import torch.nn.functional as F
import torch.utils.data.distributed

import horovod.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--use-adasum", action="store_true")
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
args = parser.parse_args()

hvd.init()
torch.manual_seed(42)
torch.set_num_threads(1)

patterns = torch.rand(4, 1, 8, 8)
labels = torch.arange(400) % 4
rows = torch.utils.data.TensorDataset(patterns[labels] + 0.1 * torch.randn(400, 1, 8, 8), labels)
sampler = torch.utils.data.distributed.DistributedSampler(rows, num_replicas=hvd.size(), rank=hvd.rank())
loader = torch.utils.data.DataLoader(rows, batch_size=20, sampler=sampler)

torch.manual_seed(hvd.rank())  # rank 0's weights are what all begin with
model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 4))
scaler = 1 if args.use_adasum else hvd.size()
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * scaler, momentum=0.5)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    op=hvd.Adasum if args.use_adasum else hvd.Average,
    gradient_predivide_factor=args.gradient_predivide_factor,
)
for epoch in range(1, 4):
    model.train()
    sampler.set_epoch(epoch)
    for data, target in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
model.eval()
right = sum((model(data).argmax(1) == target).sum() for data, target in loader) / len(sampler)
right = hvd.allreduce(right.float(), name="avg_accuracy").item()
weights = hvd.allgather(torch.cat([p.detach().flatten() for p in model.parameters()])[None])
assert torch.equal(weights[0], weights[1])
if hvd.rank() == 0:
    print(f"Accuracy: {100 * right:.2f}% on {hvd.size()} ranks")
"""


@pytest.mark.parametrize("options", [[], ["--use-adasum"]], ids=["average", "adasum"])
def test_a_script_like_pytorch_mnist(tmp_path: Path, options: list[str]) -> None:
    script = tmp_path / "mnist.py"
    script.write_text(MNIST)
    command = [sys.executable, "-c", "from tritium.cli import main; main()", "run", "--compat"]
    run = subprocess.run(
        [*command, "--ranks", "2", str(script), "--lr", "0.05", *options],
        **{"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 200},
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    (accuracy,) = re.findall(r"Accuracy: ([\d.]+)% on 2 ranks", run.stdout + run.stderr)
    assert float(accuracy) > 95
