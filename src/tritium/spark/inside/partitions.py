"""Some partitions of a DataFrame as a DataFrame of their own, which computes no others (driver; not with Connect)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tritium.spark.inside import Inside, catalyst

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def probe(spark: Any) -> str | None:
    """Return why partitions can't be chosen in this session; None where they can."""
    chosen = Partitions(spark.range(0, 4, 1, 2)).frame([1])
    return None if chosen.columns == ["id"] else f"a partition of a range has the columns {chosen.columns}"


used = Inside("partitions", probe)


class Partitions:
    """The partitions of a DataFrame, planned once: each of its frames reads the same shuffles.

    Making it runs the stages that adaptive execution must see before it knows the partitions.
    """

    def __init__(self, df: DataFrame) -> None:
        self._spark: Any = df.sparkSession
        self._rows = df._jdf.queryExecution().toRdd()
        self._schema = df._jdf.schema()
        self._count = int(self._rows.getNumPartitions())

    def __len__(self) -> int:
        return self._count

    def frame(self, indices: Sequence[int]) -> DataFrame:
        """Return a DataFrame of the partitions with these indices, in ascending order."""
        from pyspark.sql import DataFrame

        jvm = self._spark._jvm
        # A Scala set of numbers is the function that the RDD asks whether to keep a partition.
        chosen = catalyst.sequence(jvm, [int(index) for index in indices]).toSet()
        rows = catalyst.java(jvm, "org.apache.spark.rdd.PartitionPruningRDD").create(self._rows, chosen)
        frame = self._spark._jsparkSession.internalCreateDataFrame(rows, self._schema, False)
        return DataFrame(frame, self._spark)
