"""Checkpoints: the state in its two files, their store, and `world.checkpoint` in gangs without a JVM."""

from __future__ import annotations

import itertools
import json
import math
import os
import pickle
import random
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tritium as tr
from tritium.checkpoint.checkpoints import Clock
from tritium.checkpoint.format import MANIFEST, _digest, own
from tritium.checkpoint.state import Snapshot, outline, unpack
from tritium.checkpoint.store import Store
from tritium.errors import BadSetting, CheckpointFailed, MaxRuntimeReached, ModelError, RankFailed, TritiumError
from tritium.model.engines import registry
from tritium.model.engines.torch_leaf import TorchTensor

TORCH = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.complex64, torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.uint16, torch.uint32, torch.uint64),
]
NUMPY = [
    "<f8",
    "<f4",
    "<f2",
    ">f4",
    ">i8",
    "<c8",
    "<c16",
    "<i8",
    "|i1",
    "<u2",
    "|b1",
    "<U3",
    "|S5",
    "<M8[ns]",
    "<m8[s]",
]


def packed(state: Any, snapshot: Snapshot | None = None) -> tuple[bytes, bytearray]:
    taken = (snapshot or Snapshot()).take(state, "state")
    return taken.structure, bytearray(b"".join(taken.pieces()))


def there_and_back(state: Any) -> Any:
    return unpack(*packed(state))


def same(one: Any, other: Any) -> bool:
    """Return whether values, types and bits are equal."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(
            same(a, b) and same(one[a], other[b]) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        bits = [t.detach().contiguous().reshape(-1).view(torch.uint8) if t.numel() else t for t in (one, other)]
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)
    if isinstance(one, np.ndarray | np.generic):
        return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())
    if isinstance(one, float):
        return np.float64(one).tobytes() == np.float64(other).tobytes() or (math.isnan(one) and math.isnan(other))
    return bool(one == other)


def tensor(dtype: torch.dtype, shape: list[int], seed: int) -> torch.Tensor:
    count = math.prod(shape) * dtype.itemsize
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), generator=torch.Generator().manual_seed(seed))
    return data.to(torch.uint8).view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def array(dtype: str, shape: list[int], seed: int) -> Any:
    if np.dtype(dtype).kind in "US":
        return np.full(shape, "ab", dtype)
    return np.random.default_rng(seed).integers(0, 100, shape).astype(dtype)


shapes = st.lists(st.integers(0, 4), max_size=3)
seeds = st.integers(0, 1 << 30)
keys = st.one_of(st.text(max_size=4), st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False))
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 200), 1 << 200),
    st.floats(),
    st.text(max_size=5),
    st.builds(tensor, st.sampled_from(TORCH), shapes, seeds),
    st.builds(array, st.sampled_from(NUMPY), shapes, seeds),
    st.builds(lambda dtype, seed: array(dtype, [1], seed)[0], st.sampled_from(NUMPY), seeds),
)
states = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(st.text(max_size=3), inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=8,
)


class TestState:
    @given(states, states)
    @settings(max_examples=150)
    def test_every_value_and_type_comes_back(self, one: Any, other: Any) -> None:
        snapshot = Snapshot()
        for state in (one, other, {"a": one, "b": [other]}):  # the same memory again and again
            assert same(unpack(*packed(state, snapshot)), state)

    def test_a_snapshot_is_not_changed_by_what_comes_after(self) -> None:
        weight, rows = torch.ones(4), np.arange(4)
        snapshot = Snapshot().take({"weight": weight, "rows": rows}, "state")
        weight.zero_()
        rows[:] = 9
        state = unpack(snapshot.structure, bytearray(b"".join(snapshot.pieces())))
        assert state["weight"].tolist() == [1, 1, 1, 1]
        assert state["rows"].tolist() == [0, 1, 2, 3]
        state["weight"] += 1  # what is loaded can be written to
        state["rows"] += 1

    def test_a_kind_of_tensor_that_wants_locked_memory_gets_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What happens with tensors on a GPU, without one."""
        calls: list[Any] = []

        class OnDevice(TorchTensor):
            def locks(self, value: Any) -> bool:
                return bool(value.ndim == 2)

            def locked(self, size: int) -> tuple[Any, np.ndarray[Any, Any]]:
                calls.append(size)
                memory = np.empty(size, np.uint8)
                return memory, memory

            def wait(self, values: Any) -> None:
                calls.append(len(list(values)))

        monkeypatch.setattr(registry, "kinds", lambda: [OnDevice()])
        snapshot, small = Snapshot(), {"a": torch.ones(3), "n": np.ones(2)}
        large = {"a": torch.ones(3), "b": torch.ones(4, 5)}
        for state in (small, large, large):
            assert torch.equal(unpack(*packed(state, snapshot))["a"], torch.ones(3))
        assert calls == [1, 92, 2, 2], "locked once, when the first tensor wants it, and waited for each time"

    def test_a_real_optimizer_module_and_generators(self) -> None:
        net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).bfloat16()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=10)
        net(torch.ones(4, 3).bfloat16()).sum().backward()
        optimizer.step()
        scheduler.step()
        state = {
            "net": net.state_dict(),
            "optimizer": optimizer.state_dict(),
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": np.random.default_rng(3).bit_generator.state,
            "legacy": np.random.RandomState(3).get_state(),
            "parameters": list(net.parameters()),
        }
        back = there_and_back(state)
        assert same(back, {**state, "net": OrderedDict(state["net"])})
        assert set(back["optimizer"]["state"]) == {0, 1, 2, 3}
        optimizer.load_state_dict(back["optimizer"])
        net.load_state_dict(back["net"])
        random.Random().setstate(back["python"])
        torch.Generator().set_state(back["torch"])

    def test_tied_weights_are_written_once(self) -> None:
        weight = torch.ones(1000)
        structure, data = packed({"one": weight, "two": weight.detach(), "other": weight[:500]})
        assert len(data) < 1000 * 4 + 500 * 4 + 500
        back = unpack(structure, data)
        assert back["one"] is back["two"]
        assert same(back["other"], weight[:500])

    def test_views_that_are_not_contiguous(self) -> None:
        base = torch.arange(12.0).reshape(3, 4)
        state = {"t": base.t(), "step": base[:, ::2], "conj": torch.tensor([1 + 2j]).conj(), "row": np.ones((3, 4)).T}
        back = there_and_back(state)
        assert torch.equal(back["t"], base.t())
        assert torch.equal(back["step"], base[:, ::2])
        assert back["conj"].tolist() == [1 - 2j]
        assert back["row"].shape == (4, 3)

    def test_an_outline_has_everything_but_tensors_and_arrays(self) -> None:
        structure, _ = packed({"w": torch.ones(2), "rows": np.ones(3), "about": {"seed": 1, 2: (None, "x")}})
        assert outline(structure) == {"w": None, "rows": None, "about": {"seed": 1, 2: (None, "x")}}

    def test_the_tensors_can_be_read_by_the_library(self, tmp_path: Path) -> None:
        from safetensors.torch import load_file

        _, data = packed({"net": {"w": torch.ones(2), "b": torch.zeros(1).bfloat16()}, "net.w": torch.zeros(1)})
        tmp_path.joinpath("x.safetensors").write_bytes(data)
        found = load_file(tmp_path / "x.safetensors")
        assert sorted(found) == ["net.b", "net.w", "net.w#2"]
        assert found["net.w"].tolist() == [1, 1]

    @pytest.mark.parametrize(
        ("state", "said"),
        [
            ({"optimizer": [0, 1, {"x": {1}}]}, r"state\['optimizer'\]\[2\]\['x'\] is a builtins.set\. A checkpoint"),
            ({"a": b"bytes"}, r"state\['a'\] is a builtins.bytes"),
            ({"a": ({1: Path()},)}, r"state\['a'\]\[0\]\[1\] is a pathlib"),
            ({"a": np.array([None])}, r"state\['a'\] is a NumPy value of dtype object"),
            ({"a": np.zeros(1, [("x", "f4")])}, r"state\['a'\] is a NumPy value of dtype \[\('x'"),
            ({"a": torch.ones(2).to_sparse()}, r"state\['a'\] is a torch.float32 tensor of layout torch.sparse_coo"),
            ({"a": torch.ones(2, device="meta")}, r"state\['a'\] is a torch.float32 tensor .* on meta"),
            ({"a": {(1, 2): 3}}, r"A key of state\['a'\] is \(1, 2\), a tuple"),
        ],
    )
    def test_what_can_not_be_kept_is_named_with_its_path(self, state: Any, said: str) -> None:
        with pytest.raises(BadSetting, match=said):
            Snapshot().take(state, "state")

    @pytest.mark.parametrize(
        ("name", "changes"),
        [
            ("none", {"shape": [0, 1 << 62, 8]}),
            ("none", {"shape": [0, 1 << 70]}),
            ("array", {"shape": [0, 1 << 62, 8]}),
            ("bytes", {"shape": [-2, -2]}),
            ("bytes", {"parameter": True}),  # Integers have no gradient.
            ("bytes", {"dtype": "load"}),
            ("bytes", {"torch": ["bytes"]}),
        ],
    )
    def test_a_tree_that_no_save_writes_is_refused(self, name: str, changes: dict[str, Any]) -> None:
        state = {"none": torch.empty(0), "array": np.empty(0), "bytes": torch.ones(4, dtype=torch.int8)}
        structure, data = packed(state)
        tree = json.loads(structure)
        tree["state"]["dict"][name] |= changes
        with pytest.raises(ModelError, match="damaged"):
            unpack(json.dumps(tree).encode(), data)

    def test_strings_of_no_bytes_take_none(self) -> None:
        structure, data = packed({"array": np.empty(0)})
        tree = json.loads(structure)
        tree["state"]["dict"]["array"] |= {"shape": [10**12], "dtype": "|S0"}
        assert unpack(json.dumps(tree).encode(), data)["array"].nbytes == 0

    def test_a_state_within_itself(self) -> None:
        state: list[Any] = []
        state.append(state)
        with pytest.raises(BadSetting, match=r"nested more than 100 deep. Does own contain itself"):
            Snapshot().take(state, "own")


def put(store: Store, step: int, size: int = 2, keep: int = 2) -> str:
    """Save as a gang does, one rank after the other. Returns the checkpoint's name."""
    name, sums = store.prepare(step), {}
    state = {"weight": torch.full((50,), float(step)), "step": step}
    sums.update(store.write(name, "replicated", Snapshot().take(state, "state")))
    for rank in range(size):
        sums.update(store.write(name, own(rank), Snapshot().take({"rank": rank, "at": np.arange(step)}, "own")))
    store.commit(name, size, sums)
    store.prune(keep)
    return name


class TestStore:
    def test_the_newest_is_loaded_and_older_ones_go(self, tmp_path: Path) -> None:
        store = Store(str(tmp_path))
        assert store.newest() == (None, [])
        for step in (0, 5, 10, 15):
            put(store, step)
        assert store.names() == ["000000000015", "000000000010"]
        assert sorted(os.listdir(tmp_path / "checkpoints")) == ["000000000010", "000000000015"]
        loaded, reasons = store.newest()
        assert loaded is not None
        assert (loaded.step, loaded.size, loaded.path, reasons) == (15, 2, f"{tmp_path}/checkpoints/000000000015", [])
        assert same(dict(loaded), {"weight": torch.full((50,), 15.0), "step": 15})
        assert same(loaded.own, [{"rank": rank, "at": np.arange(15)} for rank in range(2)])
        manifest = json.loads(tmp_path.joinpath("checkpoints", "000000000015", "manifest.json").read_text())
        assert sorted(manifest["files"]) == sorted(
            f"{part}.{kind}" for part in ("replicated", "own-0", "own-1") for kind in ("json", "safetensors")
        )

    @pytest.mark.parametrize("url", ["memory://bucket/run", "file://{}", "{}"])
    def test_any_file_system(self, url: str, tmp_path: Path) -> None:
        store = Store(url.format(tmp_path))
        put(store, 1)
        put(store, 2, keep=1)
        assert store.names() == ["000000000002"]
        loaded, _ = Store(url.format(tmp_path)).newest()
        assert loaded is not None
        assert loaded["step"] == 2
        if url.startswith("memory"):
            fsspec.filesystem("memory").rm("/bucket", recursive=True)

    @pytest.mark.parametrize("url", ["memory://bucket/run", "file://{}", "{}"])
    def test_a_transaction_of_the_users_does_not_hold_a_save_back(self, url: str, tmp_path: Path) -> None:
        """As Lightning's ModelCheckpoint makes one in the main thread while a checkpoint is saved by another."""
        files = fsspec.core.url_to_fs(url.format(tmp_path))[0]
        try:
            with files.transaction:
                store = Store(url.format(tmp_path))
                put(store, 1)
                put(store, 2, keep=1)
                loaded, reasons = Store(url.format(tmp_path)).newest()
            assert loaded is not None
            assert (loaded["step"], reasons, store.names()) == (2, [], ["000000000002"])
        finally:
            if url.startswith("memory"):
                files.rm("/bucket", recursive=True)

    def test_signs_of_patterns_in_the_run_directory_stand_for_themselves(self) -> None:
        """A pattern `lr[0.1]` is `lr0`, too."""
        store, other = Store("memory://bucket/lr[0.1]"), Store("memory://bucket/lr0")
        try:
            for step in (1, 2, 3):
                put(other, step, keep=3)
                put(store, step, keep=1)
            assert store._directories() == ["000000000003"]
            assert other.names() == ["000000000003", "000000000002", "000000000001"]
        finally:
            fsspec.filesystem("memory").rm("/bucket", recursive=True)

    def test_a_step_that_is_saved_again_takes_the_place_of_the_first(self, tmp_path: Path) -> None:
        store = Store(str(tmp_path))
        put(store, 5)
        assert put(store, 7) == "000000000007"
        assert put(store, 7) == "000000000007-2"
        assert store.names() == ["000000000007-2", "000000000005"]
        assert put(store, 7) == "000000000007-3"

    def test_leftovers_of_a_save_that_was_cut_short_are_said_and_removed(self, tmp_path: Path) -> None:
        store = Store(str(tmp_path))
        put(store, 5)
        store.write(store.prepare(9), "replicated", Snapshot().take({"a": torch.ones(3)}, "state"))
        store = Store(str(tmp_path))
        loaded, reasons = store.newest()
        assert loaded is not None
        assert loaded.step == 5
        assert len(reasons) == 1
        assert "000000000009 was never completed" in reasons[0]
        put(store, 9, keep=1)
        assert sorted(os.listdir(tmp_path / "checkpoints")) == ["000000000009"]

    def test_a_later_checkpoint_that_was_not_loaded_is_not_written_over(self, tmp_path: Path) -> None:
        put(Store(str(tmp_path)), 100)
        with pytest.raises(BadSetting, match=r"holds a checkpoint of step 100, later than step 10 .*load\(\) first"):
            Store(str(tmp_path)).prepare(10)

    def test_a_damaged_one_makes_room_for_the_next(self, tmp_path: Path) -> None:
        put(Store(str(tmp_path)), 10)
        put(Store(str(tmp_path)), 20)
        tmp_path.joinpath("checkpoints", "000000000020", "own-1.json").write_bytes(b"{}")
        store = Store(str(tmp_path))
        loaded, reasons = store.newest()
        assert loaded is not None
        assert loaded.step == 10
        assert "own-1.json" in reasons[0]
        assert " 2 bytes, and " in reasons[0]
        put(store, 15)  # earlier than the damaged one, which does not count
        assert store.names() == ["000000000015", "000000000010"]

    @pytest.mark.parametrize("changes", [{"size": 10**12}, {"size": 0}, {"step": 19}, {"files": []}])
    def test_a_manifest_that_no_save_writes_is_skipped(self, changes: dict[str, Any], tmp_path: Path) -> None:
        put(Store(str(tmp_path)), 10)
        file = tmp_path / "checkpoints" / put(Store(str(tmp_path)), 20) / MANIFEST
        manifest = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({**manifest, "sha256": _digest(manifest)}))
        loaded, (reason,) = Store(str(tmp_path)).newest()
        assert loaded is not None
        assert loaded.step == 10
        assert "manifest.json of the checkpoint" in reason

    def test_a_path_that_is_no_directory(self, tmp_path: Path) -> None:
        tmp_path.joinpath("checkpoints").write_text("a file")
        with pytest.raises(CheckpointFailed, match=r"checkpoints/000000000001 could not be written: ") as caught:
            put(Store(str(tmp_path)), 1)
        assert caught.value.path == f"{tmp_path}/checkpoints/000000000001"
        again = pickle.loads(pickle.dumps(caught.value))
        assert (str(again), again.path, again.free) == (str(caught.value), caught.value.path, caught.value.free)

    def test_a_store_that_does_not_answer_is_no_damage(self, tmp_path: Path) -> None:
        store = Store(str(tmp_path))
        put(store, 1)
        name = put(store, 2)

        def refuse(*_: Any, **__: Any) -> Any:
            raise PermissionError(13, "Permission denied")

        store._files.open, opened = refuse, store._files.open
        try:
            with pytest.raises(CheckpointFailed, match=r"can't be read: PermissionError.*It is left as it is"):
                store.newest()
        finally:
            store._files.open = opened
        assert store.damaged == {}
        assert store.names()[0] == name

    def test_a_store_that_fails_once_loses_no_checkpoint(self, tmp_path: Path) -> None:
        store = Store(str(tmp_path))
        name = put(store, 1)

        def refuse(path: str, **more: Any) -> Any:
            if path.endswith(MANIFEST):
                raise TimeoutError("SlowDown: reduce your request rate")
            return info(path, **more)

        store._files.info, info = refuse, store._files.info
        try:
            for look in (store.candidates, lambda: store.prepare(2), lambda: store.prune(1)):
                with pytest.raises(CheckpointFailed, match="can't be listed: TimeoutError: SlowDown"):
                    look()
            store.discard(name)
        finally:
            store._files.info = info
        assert store.damaged == {}
        assert store.names() == [name]

    def test_a_file_with_the_name_of_a_checkpoint_is_none(self, tmp_path: Path) -> None:
        store = Store(str(tmp_path))
        put(store, 1)
        tmp_path.joinpath("checkpoints", "000000000002").touch()
        assert store.names() == ["000000000001"]


class TestClock:
    @given(
        size=st.integers(1, 3),
        every=st.floats(1.0, 20.0),
        step=st.floats(0.001, 2.0),
        seed=seeds,
    )
    @settings(max_examples=60)
    def test_ranks_agree_and_the_interval_is_kept(self, size: int, every: float, step: float, seed: int) -> None:
        """Clocks of several ranks, each a little off, driven in lockstep, as a collective in each step would."""
        time, chance, poster = [0.0], random.Random(seed), posters(size)
        clocks = [Clock(poster(rank), now=lambda rank=rank: time[0] * (1 + rank * 1e-3) + rank) for rank in range(size)]
        saved, calls = [0.0], int(10 * every / step)
        for _ in range(calls):
            time[0] += step * chance.uniform(0.9, 1.1)
            decisions = {clock.due(every) for clock in clocks}
            assert len(decisions) == 1, "ranks disagree"
            if decisions.pop():
                saved.append(time[0])
        waits = [b - a for a, b in itertools.pairwise(saved)]
        early, late = 3 * step, min(1.0, every / 4) * 1.25 + 3 * step
        assert all(0.95 * every - early <= wait <= 1.05 * every + late for wait in waits), (every, step, waits)
        assert len(waits) >= 3

    @given(
        size=st.integers(1, 3),
        every=st.sampled_from([5.0, math.inf]),
        step=st.floats(0.001, 2.0),
        after=st.floats(0.0, 30.0),
        seed=seeds,
    )
    @settings(max_examples=60)
    def test_ranks_agree_soon_that_their_gang_ends(
        self, size: int, every: float, step: float, after: float, seed: int
    ) -> None:
        """The announcement reaches each rank at another time, some of them perhaps never."""
        time, chance, poster = [0.0], random.Random(seed), posters(size)
        reaches = [after + chance.choice([0.0, 0.5, 0.5, 100.0]) for _ in range(size)]
        reaches[chance.randrange(size)] = after
        clocks = [
            Clock(poster(rank), lambda rank=rank: time[0] >= reaches[rank], lambda: time[0]) for rank in range(size)
        ]
        for _ in range(int((after + 10.0 + 10 * step) / step)):
            time[0] += step * chance.uniform(0.9, 1.1)
            decisions = {clock.due(every) and clock.noticed for clock in clocks}
            assert len(decisions) == 1, "ranks disagree"
            if decisions.pop():
                break
        assert after <= time[0] <= after + 2.5 + 4 * step, (after, time[0], step)


def posters(size: int) -> Callable[[int], Callable[[bytes], Callable[[], list[bytes]]]]:
    """Return a function that makes the all-gather of each rank."""
    meetings: dict[int, dict[int, bytes]] = {}

    def poster(rank: int) -> Callable[[bytes], Callable[[], list[bytes]]]:
        count = [0]

        def post(value: bytes) -> Callable[[], list[bytes]]:
            gather = meetings.setdefault(count[0], {})
            gather[rank] = value
            count[0] += 1
            return lambda: [gather[r] for r in range(size)]

        return post

    return poster


def launch(fn: Callable[..., Any], run_dir: Path | str | None, ranks: int = 2, **more: Any) -> list[Any]:
    on = more.pop("on", "driver")
    return tr.launch(fn, ranks=ranks, on=on, run_dir=str(run_dir), **{"progress": False, "output": "none", **more})


def counting(steps: int, every: Any = 2, keep: int = 2) -> Any:
    """Continue from the last checkpoint. Return what was loaded."""
    world = tr.world()
    found = world.checkpoint.load()
    start = 0 if found is None else found.step
    weight = np.zeros(1000) if found is None else found["weight"]
    for step in range(start + 1, start + steps + 1):
        weight = weight + step
        world.checkpoint.save({"weight": weight}, step, own=lambda: {"rank": world.rank}, every=every, keep=keep)
    world.checkpoint.wait()
    if found is None:
        return None
    return found.step, found.size, found.own, float(found["weight"][0]), os.path.basename(found.path)


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in run_dir.joinpath("events.jsonl").read_text().splitlines()]
    return [event for event in found if event["kind"] == kind]


class TestInAGang:
    @pytest.mark.processes
    def test_saved_by_two_loaded_by_three_then_here(self, tmp_path: Path) -> None:
        assert launch(counting, tmp_path, args=(5,)) == [None, None]
        one = (4, 2, [{"rank": 0}, {"rank": 1}], 1 + 2 + 3 + 4.0, "000000000004")
        assert launch(counting, tmp_path, ranks=3, args=(4,)) == [one] * 3
        two = (8, 3, [{"rank": r} for r in range(3)], sum(range(9)), "000000000008")
        assert launch(counting, tmp_path, ranks=1, args=(2,), on="here") == [two]
        assert sorted(os.listdir(tmp_path / "checkpoints")) == ["000000000008", "000000000010"]
        assert [event["step"] for event in events(tmp_path, "checkpoint")] == [2, 4, 6, 8, 10]
        last = events(tmp_path, "checkpoint")[-1]
        assert last["bytes"] > 8000
        assert last["seconds"] >= 0
        assert last["path"] == f"{tmp_path}/checkpoints/000000000010"
        report = json.loads(tmp_path.joinpath("report.json").read_text())
        assert report["checkpoint"]["step"] == 10
        assert report["notes"] == [f"continues from the checkpoint of step 8 in {tmp_path}/checkpoints/000000000008"]

    @pytest.mark.processes
    def test_a_relative_run_dir_is_the_drivers(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)

        def elsewhere() -> None:
            os.chdir("/")
            counting(2)

        launch(elsewhere, "mine")
        assert os.listdir(tmp_path / "mine" / "checkpoints") == ["000000000002"]

    @pytest.mark.processes
    def test_what_could_not_be_written_is_removed_before_any_rank_ends_the_gang(self, tmp_path: Path) -> None:
        def train() -> None:
            world = tr.world()
            store = world.checkpoint._store
            write, discard = store.write, store.discard

            def full(name: str, *arguments: Any) -> Any:
                write(name, *arguments)
                raise CheckpointFailed("the disk is full", path=name)

            def late(name: str) -> None:
                time.sleep(1.0)  # the other rank has long raised its error
                discard(name)

            if world.rank == 0:
                store.write, store.discard = full, late  # type: ignore[method-assign]
            world.checkpoint.save({"x": 1}, 1)
            world.checkpoint.wait()

        with pytest.raises(CheckpointFailed, match="the disk is full"):
            launch(train, tmp_path)
        assert os.listdir(tmp_path / "checkpoints") == []

    @pytest.mark.processes
    def test_the_last_save_is_there_though_nobody_waits(self, tmp_path: Path) -> None:
        def train() -> list[bool]:
            save = tr.world().checkpoint.save
            return [save({"step": step}, step, every=3, keep=9) for step in (0, 1, 3, 4, 7, 8, 9)]

        assert launch(train, tmp_path) == [[False, False, True, False, True, False, True]] * 2
        loaded, _ = Store(str(tmp_path)).newest()
        assert loaded is not None
        assert (loaded.step, dict(loaded), loaded.own) == (9, {"step": 9}, [None, None])

    def test_a_gang_that_grows_keeps_as_many_as_it_was_told(self, tmp_path: Path) -> None:
        def train() -> bool:
            checkpoint = tr.world().checkpoint
            if checkpoint.load() is not None:
                return True  # started again, as if with more ranks
            for step in (1, 2, 3):
                checkpoint.save({"step": step}, step, keep=10)
            control = checkpoint._control
            control.elastic = control.could_be_more = True  # what the coordinator says once Spark has more slots
            checkpoint.regroup({"step": 4}, 4, keep=10)
            return False

        assert launch(train, tmp_path, ranks=1, on="here") == [True]
        assert [int(name) for name in Store(str(tmp_path)).names()] == [4, 3, 2, 1]

    @pytest.mark.processes
    def test_by_time_all_ranks_agree(self, tmp_path: Path) -> None:
        def train() -> tuple[list[int], float]:
            import time

            world, saved, began = tr.world(), [], time.monotonic()
            for step in range(300):
                world.barrier()
                if world.checkpoint.save({"step": step}, step, every=0.2, keep=1):
                    saved.append(step)
                if world.rank == step % 2:
                    time.sleep(0.004)
            return saved, time.monotonic() - began

        (one, seconds), (two, _) = launch(train, tmp_path)
        assert one == two
        assert 2 <= len(one) <= seconds / 0.2 + 1

    @pytest.mark.processes
    @pytest.mark.parametrize(("ranks", "on"), [(2, "driver"), (1, "here")])
    @pytest.mark.parametrize("every", [10_000, "1h"])
    def test_at_max_runtime_it_is_saved_and_continued(self, ranks: int, on: str, every: Any, tmp_path: Path) -> None:
        def train() -> int:
            import time

            world = tr.world()
            loaded = world.checkpoint.load()
            if loaded is not None:
                return loaded.step
            assert world.preempted is None
            for step in range(1_000_000):
                world.barrier()
                time.sleep(0.01)
                world.checkpoint.save({"step": step}, step, every=every)
            return -1

        with pytest.raises(MaxRuntimeReached, match=r"max_runtime=1\.5 s(.|\n)*Newest checkpoint: step") as caught:
            launch(train, tmp_path, ranks, on=on, max_runtime=1.5)
        assert caught.value.limit == 1.5
        (saved,) = events(tmp_path, "checkpoint")
        assert launch(train, tmp_path, ranks, on=on, max_runtime=60) == [saved["step"]] * ranks

    @pytest.mark.processes
    def test_a_function_that_saves_nothing_is_ended_after_max_runtime(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def train() -> None:
            import time

            while (left := tr.world().preempted) is None:
                time.sleep(0.05)
            tr.world().note(f"{left:.0f} seconds are left")
            time.sleep(600)

        monkeypatch.setattr("tritium.gang.driver.outcome.GRACE_SECONDS", 3.0)
        with pytest.raises(MaxRuntimeReached, match="max_runtime=1 s"):
            launch(train, tmp_path, max_runtime=1)
        assert {event["text"] for event in events(tmp_path, "note")} >= {"3 seconds are left"}

    @pytest.mark.processes
    def test_a_function_gives_the_state_only_when_a_save_is_due(self, tmp_path: Path) -> None:
        def train() -> int:
            calls = []
            for step in range(1, 11):
                tr.world().checkpoint.save(lambda step=step: calls.append(step) or {"step": step}, step, every=5)
            return len(calls)

        assert launch(train, tmp_path) == [2, 2]

    @pytest.mark.processes
    def test_a_damaged_one_is_passed_over_aloud(self, tmp_path: Path) -> None:
        launch(counting, tmp_path, args=(4,))
        file = tmp_path / "checkpoints" / "000000000004" / "own-1.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
        assert [found[0] for found in launch(counting, tmp_path, args=(4,))] == [2, 2]
        notes = [event["text"] for event in events(tmp_path, "note")]
        assert len(notes) == 2
        assert notes[0].startswith("checkpoint passed over: own-1.safetensors of the checkpoint ")
        assert "000000000004 has " in notes[0]
        assert notes[1].startswith("continues from the checkpoint of step 2 in ")
        assert sorted(os.listdir(tmp_path / "checkpoints")) == ["000000000004-2", "000000000006"]

    @pytest.mark.processes
    @pytest.mark.parametrize("call", ["save", "load"])
    def test_a_store_that_can_not_be_listed_is_an_error_on_all_ranks(self, call: str, tmp_path: Path) -> None:
        def train() -> str:
            def refuse(*_: Any, **__: Any) -> Any:
                raise TimeoutError("SlowDown")

            world = tr.world()
            if world.rank == 0:
                world.checkpoint._store._files.ls = refuse
            try:
                if call == "load":
                    world.checkpoint.load()
                world.checkpoint.save({"a": 1}, 1)
                world.checkpoint.wait()
            except CheckpointFailed as error:
                return str(error)
            return ""

        one, two = launch(train, tmp_path)
        assert one == two
        assert f"The checkpoints in {tmp_path}/checkpoints can't be listed: TimeoutError: SlowDown." in one

    @pytest.mark.processes
    def test_an_old_one_that_can_not_be_removed_ends_no_training(self, tmp_path: Path) -> None:
        def train() -> int:
            def refuse(*_: Any, **__: Any) -> Any:
                raise PermissionError(13, "Permission denied")

            checkpoint = tr.world().checkpoint
            files = checkpoint._store._files
            remove = files.rm
            for step in (1, 2, 3):
                files.rm = refuse if step == 2 else remove
                checkpoint.save({"step": step}, step, keep=1)
                checkpoint.wait()
            return step

        assert launch(train, tmp_path) == [3, 3]
        assert os.listdir(tmp_path / "checkpoints") == ["000000000003"]
        (note,) = events(tmp_path, "note")
        assert "000000000001 is older than the newest 1 checkpoints and can't be removed: Permission" in note["text"]

    @pytest.mark.processes
    @pytest.mark.parametrize("call", ["save", "load"])
    def test_a_run_dir_that_a_rank_does_not_reach(self, call: str) -> None:
        def train() -> None:
            checkpoint = tr.world().checkpoint
            if call == "load":
                checkpoint.load()
            checkpoint.save({}, 1, every=1000)

        try:
            with pytest.raises(
                BadSetting, match=r"Rank 0 on .* does not reach the run directory memory://b/run: run.json"
            ):
                launch(train, "memory://b/run")
        finally:
            fsspec.filesystem("memory").rm("/b", recursive=True)

    @pytest.mark.processes
    def test_a_run_dir_that_is_another_runs(self, tmp_path: Path) -> None:
        def train() -> str:
            world = tr.world()
            if world.rank == 0:
                tmp_path.joinpath("run.json").write_text('{"run": "another"}')
            world.barrier()
            try:
                world.checkpoint.load()
            except BadSetting as error:
                return str(error)
            return ""

        one, two = launch(train, tmp_path)
        assert one == two
        assert "run.json there is of the run another, and this is 20" in one

    @pytest.mark.processes
    def test_ranks_that_save_at_different_steps(self, tmp_path: Path) -> None:
        def train() -> None:
            tr.world().checkpoint.save({}, 10 + tr.world().rank)

        with pytest.raises(
            BadSetting, match=r"rank 0 saves step 10, rank 1 saves step 11\. All ranks must save at the same"
        ):
            launch(train, tmp_path)

    @pytest.mark.processes
    def test_a_rank_that_has_returned(self, tmp_path: Path) -> None:
        def train() -> None:
            if tr.world().rank == 0:
                tr.world().checkpoint.save({}, 1)

        with pytest.raises(TritiumError, match="rank 1 has returned and will never reach checkpoint"):
            launch(train, tmp_path)

    @pytest.mark.processes
    def test_an_error_in_the_background_is_raised_at_the_end(self, tmp_path: Path) -> None:
        def train() -> None:
            checkpoint = tr.world().checkpoint
            checkpoint.save({"a": 1}, 1)
            checkpoint.wait()
            if tr.world().rank == 0:
                os.mkdir(tmp_path / "checkpoints" / "000000000002")
                os.mkdir(tmp_path / "checkpoints" / "000000000002" / "own-1.safetensors.part")
            tr.world().barrier()
            checkpoint.save({"a": 2}, 2, own={"x": 1})

        launch(train, tmp_path)  # leftovers are removed

        def refused() -> str:
            checkpoint = tr.world().checkpoint
            assert checkpoint.load() is not None
            if tr.world().rank == 0:
                tmp_path.joinpath("checkpoints").rename(tmp_path / "away")
                tmp_path.joinpath("checkpoints").write_text("no directory")
            tr.world().barrier()
            checkpoint.save({"a": 3}, 3)
            try:
                checkpoint.wait()
            except CheckpointFailed as error:
                checkpoint.wait()  # said once
                return str(error)
            return ""

        one, two = launch(refused, tmp_path)
        assert one == two
        assert one.startswith("Rank 0 on ")
        assert "could not be written" in one
        with pytest.raises(CheckpointFailed, match="could not be written"):
            launch(lambda: tr.world().checkpoint.save({"a": 3}, 3), tmp_path)

    @pytest.mark.processes
    @pytest.mark.parametrize("on", ["driver", "here"])
    def test_an_exception_of_the_users_while_a_save_is_in_flight(self, on: str, tmp_path: Path) -> None:
        def train() -> None:
            tr.world().checkpoint.save({"a": np.zeros(1_000_000)}, 1)
            raise LookupError("mine")

        with pytest.raises(RankFailed if on == "driver" else LookupError, match="mine"):
            launch(train, tmp_path, ranks=1, on=on)

    @pytest.mark.parametrize("every", [0, -1, True, "soon", "0s", 0.0, float("nan"), "5 minutes"])
    def test_a_wrong_every(self, every: Any, tmp_path: Path) -> None:
        def train() -> None:
            tr.world().checkpoint.save({}, 1, every=every)

        with pytest.raises(BadSetting, match="every="):
            launch(train, tmp_path, ranks=1, on="here")

    def test_wrong_arguments(self, tmp_path: Path) -> None:
        def train() -> None:
            save = tr.world().checkpoint.save
            with pytest.raises(BadSetting, match=r"state\['x'\] is a builtins.object"):
                save({"x": object()}, 1)
            with pytest.raises(BadSetting, match=r"takes a dict"):
                save([1], 1)  # type: ignore[arg-type]
            with pytest.raises(BadSetting, match=r"keep=0 must be at least 1"):
                save({}, 1, keep=0)
            with pytest.raises(TypeError):
                save({}, 1.5)  # type: ignore[arg-type]
            save({}, -1)
            with pytest.raises(BadSetting, match=r"step=-1 of a checkpoint"):
                tr.world().checkpoint.wait()

        launch(train, tmp_path, ranks=1, on="here")

    def test_outside_of_a_run(self) -> None:
        with pytest.raises(TritiumError, match=r"no run to keep checkpoints in"):
            _ = tr.world().checkpoint
