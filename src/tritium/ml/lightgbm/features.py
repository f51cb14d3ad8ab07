"""The features of a model in LightGBM's order, with their names in settings and models (driver, rank)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tritium.data.schema import Field
from tritium.errors import BadSetting
from tritium.hints import suggest
from tritium.ml.fields import is_whole
from tritium.ml.lightgbm.settings import LightGBMSettings
from tritium.model.signature import names_of_numbers


@dataclass(frozen=True)
class Features:
    """The features of a model: its scalar columns, or the numbers of its vector or array column, then its words."""

    names: tuple[str, ...]
    columns: tuple[str, ...]
    """The source column of each."""
    words: tuple[int, ...]
    """The positions of the features that are indices of words."""
    vector: str | None
    """The vector or array column whose numbers are all features, if there is one: settings may then name positions."""

    @classmethod
    def of(cls, fields: Sequence[Field], widths: Mapping[str, int]) -> Features:
        """Return the features of these batch columns.

        widths : batch column → numbers of a row.
        """
        names: list[str] = []
        columns: list[str] = []
        words: list[int] = []
        for field in fields:
            numbers = names_of_numbers(field.sources, widths[field.name], field.slots)
            if is_words(field):
                words += range(len(names), len(names) + len(numbers))
            names += numbers
            columns += field.sources if field.packed else field.sources * len(numbers)
        vector = fields[0].sources[0] if len(fields) == 1 and fields[0].depth and not fields[0].packed else None
        return cls(tuple(names), tuple(columns), tuple(words), vector)

    def categories(self, settings: LightGBMSettings) -> list[int]:
        """Return the positions of the features that are categories. Raises BadSetting."""
        asked = [self.position("categorical_features", key) for key in settings.categorical_features or ()]
        return sorted({*asked, *self.words})

    def constraints(self, settings: LightGBMSettings) -> list[int]:
        """Return -1, 0 or 1 for each feature; [] without constraints. Raises BadSetting.

        A category is refused, too, as LightGBM would end the process for it.
        """
        constraints = settings.monotone_constraints or {}
        directions, categories = [0] * len(self.names) if constraints else [], self.categories(settings)
        for key, value in constraints.items():
            position = self.position("monotone_constraints", key)
            if position in categories:
                raise BadSetting(
                    f"monotone_constraints names {key!r}, which is a category.", setting="monotone_constraints"
                )
            directions[position] = value
        return directions

    def position(self, setting: str, key: str | int) -> int:
        """Return the position of the feature that a setting names. Raises BadSetting where there is none."""
        if key in self.names:
            return self.names.index(str(key))
        if self.vector is None:
            raise BadSetting(
                f"{setting} names {key!r}, which is not among feature_cols.{suggest(str(key), self.names)}",
                setting=setting,
            )
        if not is_whole(key, 0):
            raise BadSetting(
                f"{setting} names {key!r}; of the column {self.vector!r} say the position in it, from 0, or the name "
                f"that VectorAssembler gave it.{suggest(str(key), self.names)}",
                setting=setting,
            )
        if int(key) >= len(self.names):
            raise BadSetting(
                f"{setting} names position {key}, and {self.vector!r} has {len(self.names)} numbers a row.",
                setting=setting,
            )
        return int(key)


def is_words(field: Field) -> bool:
    """Return whether a batch column holds the indices of words."""
    return field.vocabulary is not None or field.buckets is not None
