"""`dataset_as_rdd`: a data set's decoded rows as an RDD (driver)."""

from __future__ import annotations

from typing import Any

from tritium_compat.petastorm.etl.dataset_metadata import get_schema_from_dataset_url
from tritium_compat.petastorm.rows import decode_row


def dataset_as_rdd(
    dataset_url: str, spark_session: Any, schema_fields: Any = None, hdfs_driver: str = "libhdfs3"
) -> Any:
    """Return an RDD of named tuples, decoded on executors, which need Tritium installed.

    schema_fields : which fields, as for `make_reader`; None: all.
    """
    schema = get_schema_from_dataset_url(dataset_url)
    rows = spark_session.read.parquet(dataset_url)
    if schema_fields is not None:
        schema = schema.create_schema_view(schema_fields)
        rows = rows.select(*(f"`{name}`" for name in schema.fields))
    return rows.rdd.map(lambda row: schema.make_namedtuple(**decode_row(row.asDict(), schema)))
