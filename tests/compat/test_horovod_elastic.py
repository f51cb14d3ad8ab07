"""`horovod.torch.elastic`: ranks that are killed, collectives that fail, and a gang that has become smaller."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import tritium as tr
from tritium.errors import RankFailed

pytestmark = [pytest.mark.timeout(300), pytest.mark.imports("torch")]
TWO: dict[str, Any] = {"ranks": 2, "on": "driver", "progress": False, "output": "none"}
ROWS = 48


def training(where: str, die_at: int | None = None) -> Any:
    """Train for two epochs of 48 rows as Horovod's users do; rank 1 is killed once, after its batch `die_at`."""
    import torch

    import tritium.compat.horovod.torch as hvd

    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(range(ROWS), shuffle=True)
    loader: Any = torch.utils.data.DataLoader(torch.arange(float(ROWS)).reshape(-1, 1), batch_size=4, sampler=sampler)
    seen = Path(where) / f"seen-{hvd.rank()}"
    resets: list[int] = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        begun = [state.epoch, state.batch, len(state.history)]
        (Path(where) / f"began-{hvd.rank()}").write_text(json.dumps(begun))
        while state.epoch < 2:
            for rows in loader:
                state.optimizer.zero_grad()
                (state.model(rows / ROWS) - rows).square().mean().backward()
                state.optimizer.step()
                with seen.open("a") as file:
                    file.writelines(f"{state.epoch} {int(row)}\n" for row in rows)
                state.batch += 1
                state.history.append(state.batch)
                state.sampler.record_batch(0, len(rows))
                if state.batch == die_at and hvd.rank() == 1 and not (Path(where) / "died").exists():
                    world = tr.world()
                    world.checkpoint.wait()  # so that the test knows what was written
                    (Path(where) / "died").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                state.commit()
            state.epoch += 1
            state.sampler.set_epoch(state.epoch)
            state.commit()

    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0, history=[], what={1, 2})
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])
    train(state)
    weights = [p.tolist() for p in model.parameters()]
    return hvd.rank(), state.batch, state.history, weights, resets, state.what


def test_a_killed_rank_costs_what_was_not_committed(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    at = {"env": {"TRITIUM_COMMIT_SECONDS": "0"}}
    whole = tr.launch(training, args=(str(tmp_path / "whole"),), run_dir=str(tmp_path / "a"), **TWO, **at)
    killed = tr.launch(training, args=(str(tmp_path / "killed"), 8), run_dir=str(tmp_path / "b"), **TWO, **at)
    assert [one[1] for one in whole] == [12, 12]
    assert [one[4] for one in whole] == [[], []]
    # it continued after the 7 batches that were committed, with the rows that follow: nothing else differs
    assert json.loads((tmp_path / "killed" / "began-0").read_text()) == [1, 7, 7]
    assert [one[4] for one in killed] == [[2], [2]]
    assert [one[:4] for one in killed] == [one[:4] for one in whole]
    assert killed[0][5] == {1, 2}


def test_fewer_ranks_share_the_rows_that_are_left(tmp_path: Path) -> None:
    at = {"env": {"TRITIUM_COMMIT_SECONDS": "0"}, "run_dir": str(tmp_path / "run"), "retries": 0}
    with pytest.raises(RankFailed, match=r"Rank 1 .* was killed by SIGKILL"):
        tr.launch(training, args=(str(tmp_path), 8), **TWO, **at)
    before = [line for rank in "01" for line in (tmp_path / f"seen-{rank}").read_text().splitlines()[: 7 * 4]]
    for rank in "01":
        (tmp_path / f"seen-{rank}").unlink()
    ((_, batches, history, _, resets, what),) = tr.launch(training, args=(str(tmp_path), 8), **TWO | {"ranks": 1}, **at)
    after = (tmp_path / "seen-0").read_text().splitlines()
    assert json.loads((tmp_path / "began-0").read_text()) == [1, 7, 7]
    assert sorted(before + after) == sorted(f"{epoch} {row}" for epoch in range(2) for row in range(ROWS))
    assert (batches, history, resets, what) == (17, [*range(1, 18)], [1], {1, 2})


def failing(times: int) -> Any:
    """Fail in a collective, whose shapes differ, in the first `times` calls."""
    import torch

    import tritium.compat.horovod.torch as hvd
    from tritium.compat.horovod.common.exceptions import HorovodInternalError

    hvd.init()
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    calls, found, resets = [0], [], [0]

    @hvd.elastic.run
    def train(state: Any) -> None:
        calls[0] += 1
        found.append(state.batch)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 2)).sum().backward()
            optimizer.step()
            state.batch += 1
            if state.batch == 1:
                state.commit()
        if calls[0] <= times:
            hvd.allreduce(torch.ones(2 + hvd.rank()), name="differs")

    def on_reset() -> None:
        resets[0] += 1

    state = hvd.elastic.TorchState(model, optimizer, batch=0)
    state.register_reset_callbacks([on_reset])
    try:
        train(state)
    except HorovodInternalError as error:
        return str(error), calls, found, resets
    return state.batch, calls, found, resets, [p.tolist() for p in model.parameters()]


def test_a_collective_that_fails_is_done_again_from_the_last_commit() -> None:
    first, second = tr.launch(failing, args=(2,), **TWO)
    assert first == second
    assert first[:4] == (4, [3], [0, 1, 1], [2])
    (text, calls, *_), _ = tr.launch(failing, args=(9,), env={"TRITIUM_RESET_LIMIT": "1"}, **TWO)
    assert "differs" in text
    assert calls == [2]


def test_restore_goes_to_the_last_commit_and_an_interrupt_calls_again() -> None:
    def alone() -> Any:
        import torch

        import tritium.compat.horovod.torch as hvd
        from tritium.compat.horovod.common.elastic import HostsUpdatedInterrupt

        hvd.init()
        scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1.0), 1)
        state = hvd.elastic.TorchState(scheduler=scheduler, batch=0, lines=["a"])
        calls = []

        @hvd.elastic.run
        def train(state: Any, more: int) -> Any:
            calls.append(more)
            state.batch = 1
            state.lines.append("b")
            state.commit()
            if len(calls) == 1:
                raise HostsUpdatedInterrupt
            state.batch = 2
            state.lines.append("c")
            state.scheduler.step()
            state.restore()
            return state.batch, state.lines, state.scheduler.last_epoch, calls

        return train(state, 5)

    assert tr.launch(alone, **TWO | {"ranks": 1}) == [(1, ["a", "b", "b"], 0, [5, 5])]
