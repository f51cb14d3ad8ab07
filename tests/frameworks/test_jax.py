"""`framework="jax"`: the ranks are JAX's processes, and batches are arrays over the devices of all of them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import tritium as tr
from machines import Cable, Machine, can_make_hosts, hosts, order_for, serving
from tritium.errors import BadRow, BadSetting, TritiumError, TritiumWarning, WrongVersion
from tritium.frameworks.jax import JAX

ROWS = pd.DataFrame({"x": np.arange(11.0), "kind": np.arange(11)})


def run(fn: Any, **settings: Any) -> list[Any]:
    quiet = {"ranks": 2, "on": "driver", "progress": False, "output": "none", "data": {"train": ROWS}, "retries": 0}
    return tr.launch(fn, **{**quiet, "framework": "jax", **settings})


def taken(**settings: Any) -> dict[str, Any]:
    """Return what JAX sums up over the rows of one epoch: inside `jit`, and by hand inside `shard_map`."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, PartitionSpec

    shard, rows = tr.world().shard("train"), PartitionSpec("data")
    mesh = Mesh(np.array(jax.devices()), ("data",))

    @jax.jit
    def over_all(weights: Any, x: Any) -> Any:
        return jnp.sum(weights * x), jnp.sum(weights)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(rows, rows), out_specs=PartitionSpec())
    def over_own(weights: Any, x: Any) -> Any:
        return jax.lax.psum(jnp.sum(weights * x), "data")

    found: dict[str, Any] = {"sums": [], "rows": [], "shapes": set(), "dtypes": set()}
    for epoch in shard.jax(1, batch_size=2, mesh=mesh, **settings):
        for batch in epoch:
            total, count = over_all(batch.weights, batch["x"])
            assert count == batch.rows
            assert over_own(batch.weights, batch["x"]) == total
            found["sums"].append(float(total))
            found["rows"].append(batch.rows)
            found["shapes"].add(batch["x"].shape)
            found["dtypes"].add((str(batch["x"].dtype), str(batch["kind"].dtype)))
    return {**found, "compiled": over_all._cache_size(), "steps": len(epoch), "processes": jax.process_count()}


class TestEveryRowCountsOnce:
    """Eleven rows in steps of 2 × 2: six on rank 0 and five on rank 1."""

    def check(self, found: list[Any], shape: tuple[int, ...], rows: list[int]) -> None:
        assert len({str(each["sums"]) for each in found}) == 1, "all ranks compute the same"
        first = found[0]
        assert sum(first["sums"]) == ROWS["x"].sum()
        assert (first["rows"], first["shapes"], first["compiled"]) == (rows, {shape}, 1)
        assert first["dtypes"] == {("float32", "int32")}
        assert (first["steps"], first["processes"]) == (len(rows), len(found))

    def test_on_two_ranks(self) -> None:
        self.check(run(taken), (4,), [4, 4, 3])

    def test_in_this_process(self) -> None:
        """In one of its own, as JAX stays in a process, with its threads."""
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        run = subprocess.run([sys.executable, __file__], check=True, capture_output=True, text=True, env=env)
        (found,) = json.loads(run.stdout)
        found["shapes"], found["dtypes"] = {tuple(*found["shapes"])}, {tuple(*found["dtypes"])}
        self.check([found], (2,), [2, 2, 2, 2, 2, 1])

    def test_in_one_rank(self) -> None:
        self.check(run(taken, ranks=1), (2,), [2, 2, 2, 2, 2, 1])


def test_bad_input() -> None:
    """All of what a rank can do wrong, in one gang."""

    def train() -> None:
        import jax
        from jax.sharding import Mesh

        world = tr.world()
        shard = world.shard("train")
        assert jax.local_device_count() == 2
        both = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))

        with pytest.raises(BadSetting, match=r"step 2 of epoch 0 has 3 rows, and 4 places: the other 1 hold repeated"):
            [batch["x"].shape for epoch in shard.jax(1, batch_size=2) for batch in epoch]
        for remainder, steps in (("drop", 2), ("repeat", 3)):
            for epoch in shard.jax(1, batch_size=2, remainder=remainder):
                assert [batch.rows for batch in epoch] == [4] * steps  # without `weights`
        for epoch in shard.jax(1, batch_size=3, mesh=both, remainder="drop"):
            for batch in epoch:  # a rank's two devices have the same rows
                assert {str(piece.index) for piece in batch["x"].addressable_shards} == {
                    f"(slice({3 * world.rank}, {3 * world.rank + 3}, None),)"
                }
        with pytest.raises(BadSetting, match=r"2 × 3 rows of a step don't divide among 4 devices along data. .* of 2"):
            shard.jax(1, batch_size=3)
        with pytest.raises(BadSetting, match=r"axis='rows' is none of the mesh's: data, model"):
            shard.jax(1, batch_size=2, mesh=both, axis="rows")
        with pytest.raises(BadSetting, match=r"along model, this mesh gives the devices of one rank 4 rows .*size=2"):
            shard.jax(1, batch_size=2, mesh=both, axis="model")
        with pytest.raises(BadSetting, match=r"batch_size=0 must be a whole number"):
            shard.jax(1, batch_size=0)

        with pytest.raises(BadSetting, match=r"column 'double' is float64, which JAX would round .*JAX_ENABLE_X64"):
            next(iter(next(world.shard("doubles").jax(1, batch_size=2))))
        with pytest.raises(BadRow, match=r"column 'long' of 'longs' has 1099511627776, and JAX holds .* as int32"):
            next(iter(next(world.shard("longs").jax(1, batch_size=2))))
        with pytest.raises(BadSetting, match=r"column 'picture' is bytes"):
            next(iter(next(world.shard("bytes").jax(1, batch_size=2))))
        jax.config.update("jax_enable_x64", True)
        batch = next(iter(next(world.shard("longs").jax(1, batch_size=2))))
        assert {str(batch["long"].dtype), float(batch["long"][0])} == {"int64", 2.0**40}

    data = {
        "train": ROWS,
        "doubles": tr.Data(pd.DataFrame({"double": np.arange(4.0)}), dtype="float64"),
        "longs": pd.DataFrame({"long": np.full(4, 2**40)}),
        "bytes": pd.DataFrame({"picture": [b"1"] * 4}),
    }
    run(train, data=data, env={"JAX_NUM_CPU_DEVICES": "2"})


def test_a_rank_may_return_long_before_the_others() -> None:
    """JAX's service is rank 0's, and its end waits for all processes."""

    def train() -> int:
        import jax.numpy as jnp
        from jax._src.distributed import global_state

        world = tr.world()
        if world.rank == 1:
            with pytest.raises(TritiumError, match="rank 0 has returned"):
                world.gather(0)  # answered when it has
            assert global_state.client is not None
            global_state.client.key_value_set("still", "there")
            assert global_state.client.blocking_key_value_get("still", 10_000) == "there"
        return int(jnp.sum(jnp.arange(3)))

    assert run(train, env={"http_proxy": "http://127.0.0.1:9"}) == [3, 3]  # gRPC would ask it for the other ranks


def test_jax_that_is_missing_is_named_with_host_and_command(tmp_path: Path) -> None:
    tmp_path.joinpath("jax.py").write_text("raise ImportError(\"No module named 'jax'\")\n")
    match = rf"jax can't be imported on {socket.gethostname()} by .*Install it there: .*-m pip install jax"
    with pytest.raises(WrongVersion, match=match):
        run(lambda: None, env={"PYTHONPATH": str(tmp_path)})


def test_ranks_that_are_not_connected_are_an_error() -> None:
    def train() -> None:
        import jax

        assert jax.process_count() == 1
        with pytest.raises(
            BadSetting, match=r'2 ranks, and JAX is not connected .* count is 1\. Launch with framework="jax"'
        ):
            tr.world().shard("train").jax(1, batch_size=2)

    with pytest.warns(TritiumWarning, match=r"imports jax, .* Give framework='jax'"):
        run(train, framework=None, env={"JAX_PLATFORMS": "cpu"})


@pytest.mark.skipif(not can_make_hosts(), reason="only root may make network namespaces")
def test_ranks_on_two_hosts_find_each_other_by_address(tmp_path: Path) -> None:
    """Both have one name, that of this machine: JAX alone takes the address that it stands for."""

    def train() -> None:
        import jax
        import jax.numpy as jnp

        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
        spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        own = np.full(1, tr.world().rank + 1.0, np.float32)
        total = jax.jit(jnp.sum)(jax.make_array_from_process_local_data(spread, own))
        (tmp_path / str(tr.world().rank)).write_text(str(float(total)))

    with ExitStack() as stack:
        both = stack.enter_context(hosts(2))
        Cable(*both)
        coordinator = stack.enter_context(serving(2, host="0.0.0.0"))
        for partition, host in enumerate(both):
            order = order_for(coordinator, train, address=(host.near, coordinator.address[1]), framework=JAX())
            stack.callback(Machine(order, partition, inside=host.inside).close)
        with coordinator.changed:
            assert coordinator.changed.wait_for(lambda: coordinator.finished or coordinator.failure, 60)
        assert coordinator.failure is None
    assert [tmp_path.joinpath(name).read_text() for name in "01"] == ["3.0", "3.0"]


if __name__ == "__main__":
    print(json.dumps(run(taken, ranks=1, on="here"), default=sorted))
