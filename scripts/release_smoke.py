"""What a stranger does first with the installed packages, without a framework and without Spark (release check)."""

from __future__ import annotations

import pyarrow as pa  # type: ignore[import-untyped]

import tritium as tr


def rows(batch_size: int) -> int:
    """Return how many rows this rank has seen in one epoch."""
    seen = 0
    for epoch in tr.world().shard("train").epochs(1, batch_size=batch_size):
        for batch in epoch:
            seen += batch.rows
    return seen


def main() -> None:
    table = pa.table({"x": [float(number) for number in range(10)]})
    here = tr.launch(rows, args=(4,), on="here", data={"train": table}, progress=False)
    both = tr.launch(rows, ranks=2, args=(4,), on="driver", data={"train": table}, progress=False)
    assert (here, sorted(both)) == ([10], [5, 5]), (here, both)
    try:
        tr.launch(rows, ranks=0)
    except tr.errors.BadSetting as error:
        print(f"tritium {tr.__version__}: {error}")
    import tritium.compat

    print("compat:", tritium.compat.__name__)
    import tritium.flyte

    print("flyte:", tritium.flyte.Table("s3://bucket/rows").format)


if __name__ == "__main__":
    main()
