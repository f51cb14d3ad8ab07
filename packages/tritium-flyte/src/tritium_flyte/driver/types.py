"""How a Table travels between tasks: as Flyte's literal of a structured dataset (the driver of a task, the parent)."""

from __future__ import annotations

from flyte.types import TypeEngine, TypeTransformer
from flyteidl2.core.literals_pb2 import Literal, Scalar, StructuredDataset, StructuredDatasetMetadata
from flyteidl2.core.types_pb2 import LiteralType, StructuredDatasetType

from tritium_flyte.tables import Table

_VERSION = "tritium.version"


class TableTransformer(TypeTransformer[Table]):
    """A Table as place and format, which Flyte's UI shows and its own DataFrame type reads; never the rows."""

    def __init__(self) -> None:
        super().__init__("tritium.flyte.Table", Table)

    def get_literal_type(self, t: type[Table]) -> LiteralType:
        """Return the type of a structured dataset of any format."""
        return LiteralType(structured_dataset_type=StructuredDatasetType())

    async def to_literal(self, python_val: Table, python_type: type[Table], expected: LiteralType) -> Literal:
        """Return the literal, with the hash that Flyte's cache takes in place of the literal's own."""
        kind = StructuredDatasetType(format=python_val.format)
        dataset = StructuredDataset(
            uri=python_val.uri, metadata=StructuredDatasetMetadata(structured_dataset_type=kind)
        )
        version = {} if python_val.version is None else {_VERSION: str(python_val.version)}
        return Literal(scalar=Scalar(structured_dataset=dataset), hash=python_val.hash or None, metadata=version)

    async def to_python_value(self, lv: Literal, expected_python_type: type[Table]) -> Table:
        """Return the Table, also of a literal that Flyte's own DataFrame type has made."""
        dataset = lv.scalar.structured_dataset
        version = lv.metadata.get(_VERSION)
        return Table(
            uri=dataset.uri,
            format=dataset.metadata.structured_dataset_type.format or "parquet",
            version=None if version is None else int(version),
            hash=lv.hash,
        )


def register() -> None:
    """Tell Flyte of `Table`: the entry point of the group `flyte.plugins.types`."""
    from tritium_flyte.driver.tasks import Gang  # noqa: F401 - so that both registrations happen in any process.

    TypeEngine.register(TableTransformer())
