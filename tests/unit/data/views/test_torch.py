"""A shard as a torch dataset: lengths, coverage and positions; ranks are Shards of one process."""

from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from tritium.errors import BadSetting, EmptyShard
from unit.data.test_shard import Gang, deal

UNEVEN = [[7, 4], 3], [[3, 9, 5], 2], [[300, 1, 301], 2]


def rows_of(items: list[dict[str, Any]]) -> list[int]:
    return [row for item in items for row in item["row"].reshape(-1).tolist()]


@pytest.mark.parametrize(("partitions", "size"), UNEVEN)
def test_a_loader_has_the_batches_of_an_epoch_each_time_it_is_iterated(partitions: list[int], size: int) -> None:
    shards = deal(partitions, size)
    with Gang.filled(shards) as gang:
        loaders = [shard.loader(batch_size=4, seed=3, scale_col="scale") for shard in gang.shards]
        steps = -(-max(map(len, shards)) // 4)
        orders = []
        for _ in range(2):
            taken = [list(loader) for loader in loaders]
            assert [len(loader) for loader in loaders] == [len(items) for items in taken] == [steps] * size
            # with `scale`, the mean over ranks of a step's means is the mean of all its rows
            for step in zip(*taken, strict=True):
                means = [item["scale"] * item["x"][:, 0].mean() for item in step]
                real = torch.cat([item["x"][:, 0] for item in step if item["scale"] > 0])
                assert torch.isclose(sum(means) / size, real.mean())
            every = [row for items in taken for row in rows_of([item for item in items if item["scale"] > 0])]
            assert sorted(every) == sorted(np.concatenate(shards).tolist())
            orders.append(every)
        assert orders[0] != orders[1]
        assert [counts["epoch"] for counts in gang.shards[0].report()] == [0, 1]


@pytest.mark.parametrize(("partitions", "size"), UNEVEN)
def test_single_rows_are_equally_many_on_every_rank(partitions: list[int], size: int) -> None:
    shards = deal(partitions, size)
    with Gang.filled(shards) as gang:
        for _ in range(2):
            for shard, ids in zip(gang.shards, shards, strict=True):
                dataset = shard.dataset(seed=5)
                items = list(dataset)
                assert isinstance(dataset, IterableDataset)
                assert len(items) == len(dataset) == max(map(len, shards))
                assert items[0]["row"].shape == ()
                assert items[0]["x"].shape == (2,)
                assert sorted(rows_of(items[: len(ids)])) == ids.tolist()
                assert set(rows_of(items[len(ids) :])) <= set(ids.tolist())


def test_a_loader_of_torchs_own_makes_batches_of_single_rows() -> None:
    with Gang.filled(deal([10], 2)) as gang:
        loader = DataLoader(gang.shards[0].dataset(), batch_size=2)
        assert [len(batch["row"]) for batch in loader] == [2, 2, 1]
        assert len(loader) == 3


def test_a_position_continues_with_the_rows_not_yet_seen_on_every_rank() -> None:
    with Gang.filled(deal([13, 6], 2)) as gang:
        whole = [[list(loader) for _ in range(2)] for loader in (s.loader(batch_size=3) for s in gang.shards)]
        loaders = [shard.loader(batch_size=3) for shard in gang.shards]
        assert loaders[1].state_dict()["step"] == 0
        for loader in loaders:
            batches = iter(loader)
            next(batches)
            next(batches)
            del batches
        state = json.loads(json.dumps(loaders[0].state_dict()))
        assert (state["epoch"], state["step"]) == (0, 2)
        for rank, shard in enumerate(gang.shards):  # rank 0's state, on both
            again = shard.loader(batch_size=3)
            again.load_state_dict(state)
            assert rows_of(list(again)) == rows_of(whole[rank][0][2:])
            assert again.state_dict()["epoch"] == 1
            assert rows_of(list(again)) == rows_of(whole[rank][1])
            again.dataset.set_epoch(0)
            assert rows_of(list(again)) == rows_of(whole[rank][0])


def test_a_position_of_other_batches_starts_its_epoch_over_aloud() -> None:
    with Gang.filled(deal([13], 1)) as gang:
        messages: list[str] = []
        shard = gang.shards[0]
        shard.notify = messages.append  # type: ignore[method-assign]
        loader = shard.loader(batch_size=3)
        next(iter(loader))
        other = shard.loader(batch_size=4)
        other.load_state_dict(loader.state_dict())
        assert len(list(other)) == 4
        assert "epoch 1 starts over: batch_size=4 (was 3)" in messages[0]


def test_the_position_of_the_shard_is_that_of_its_dataset() -> None:
    with Gang.filled(deal([13], 1)) as gang:
        shard = gang.shards[0]
        items = iter(shard.dataset(batch_size=4))
        next(items)
        state = shard.state()
        assert (state["epoch"], state["step"]) == (0, 1)
        following = next(iter(shard.epochs(1, batch_size=4, resume=state)))
        assert rows_of([next(iter(following))]) == rows_of([next(items)])


def test_the_first_epoch_of_a_stream_is_taken_while_rows_arrive() -> None:
    with Gang(1, prepared="stream", window=4) as gang:
        items = iter(gang.shards[0].dataset(batch_size=2))
        gang.deliver(0, np.arange(8))
        assert set(rows_of([next(items), next(items)])) == {0, 1, 2, 3}
        gang.deliver(0, np.arange(8, 10), ended=True)
        assert len(rows_of(list(items))) == 6
        assert gang.shards[0].report()[0]["used"] == 10


def test_a_setting_that_can_not_be_is_refused_at_once() -> None:
    with Gang.filled(deal([13], 1)) as gang:
        shard = gang.shards[0]
        with pytest.raises(BadSetting, match=r"'train'.*remainder='drop' is a setting of batches.*batch_size="):
            shard.dataset(remainder="drop")
        with pytest.raises(BadSetting, match="scale_col='x' is the name of a column"):
            shard.loader(batch_size=2, scale_col="x")
        with pytest.raises(BadSetting, match="batch_size=0 must be a whole number of at least 1"):
            shard.loader(batch_size=0)
        with pytest.raises(BadSetting, match=r"can't be read by workers.*num_workers=0"):
            pickle.dumps(shard.dataset())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_workers": 2}, r"shard 'train' can't be read by workers of a DataLoader.*Take num_workers=0"),
        ({"drop_last": True}, r"drop_last=True is a setting of torch's DataLoader. Take remainder=\"drop\"\.$"),
        ({"pin_memory": True}, r"DataLoader\(shard.dataset\(batch_size=…\), batch_size=None, pin_memory=…\)"),
        ({"shufle": True}, r"no setting 'shufle' of a loader. Did you mean 'shuffle'"),
    ],
)
def test_a_setting_of_torchs_loader_is_said(settings: dict[str, Any], said: str) -> None:
    with Gang.filled(deal([13], 1)) as gang, pytest.raises(BadSetting, match=said):
        gang.shards[0].loader(batch_size=4, **settings)


def test_settings_that_torchs_loader_has_anyway_change_nothing() -> None:
    with Gang.filled(deal([13], 1)) as gang:
        defaults = {"num_workers": 0, "pin_memory": False, "drop_last": False, "collate_fn": None}
        loader = gang.shards[0].loader(batch_size=4, seed=1, **defaults)
        assert sum(len(item["row"]) for item in loader) == 13
        own = DataLoader(gang.shards[0].dataset(batch_size=4), batch_size=None, collate_fn=lambda item: item["row"])
        assert sum(len(rows) for rows in own) == 13


def test_an_empty_shard_is_the_same_error_as_of_epochs() -> None:
    with Gang.filled([np.arange(3), np.arange(0)]) as gang:
        for shard in gang.shards:
            with pytest.raises(EmptyShard, match=r"rank 1 of 2 received no rows of 'train'"):
                len(shard.loader(batch_size=2))
