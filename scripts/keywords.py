"""Writes the settings as keywords that type checkers and editors read: `make keywords`, after a setting has changed.

A setting is written once, as a field of a dataclass. `**fields: Unpack[GangKeywords]` needs it in a TypedDict, which no
checker derives from the dataclass; a test compares these files with the dataclasses.
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
from pathlib import Path

from tritium.gang.settings import Gang
from tritium.ml.function.settings import FunctionSettings
from tritium.ml.keras.settings import KerasSettings
from tritium.ml.lightgbm.settings import (
    LightGBMClassifierSettings,
    LightGBMRankerSettings,
    LightGBMRegressorSettings,
)
from tritium.ml.lightning.settings import LightningSettings
from tritium.ml.torch.settings import TorchSettings

SOURCE = Path(__file__).parents[1] / "src" / "tritium"
HOMES = {
    "Mapping": "collections.abc",
    "Sequence": "collections.abc",
    "Any": "typing",
    "Literal": "typing",
    "TypedDict": "typing",
    "TypeVar": "typing",
    "Param": "pyspark.ml.param",
    "Framework": "tritium.frameworks.framework",
    "GangKeywords": "tritium.gang.keywords",
    "OnStall": "tritium.gang.settings",
    "Logs": "tritium.gang.settings",
    "Output": "tritium.gang.settings",
    "Where": "tritium.gang.settings",
}
ESTIMATORS: dict[str, dict[str, type]] = {
    "function": {"Function": FunctionSettings},
    "keras": {"Keras": KerasSettings},
    "lightgbm": {
        "LightGBMClassifier": LightGBMClassifierSettings,
        "LightGBMRanker": LightGBMRankerSettings,
        "LightGBMRegressor": LightGBMRegressorSettings,
    },
    "lightning": {"Lightning": LightningSettings},
    "torch": {"Torch": TorchSettings},
}
"""Folder → the name of an estimator → its settings."""


def stubs() -> dict[Path, str]:
    """Path → what belongs there."""
    gang = keywords("GangKeywords", "TypedDict", "The fields of `Gang`.", Gang)
    found = {SOURCE / "gang" / "keywords.pyi": with_imports(gang, "GangKeywords")}
    for folder, kinds in ESTIMATORS.items():
        body = "".join(estimator(name, kind, chr(ord("P") + place)) for place, (name, kind) in enumerate(kinds.items()))
        found[SOURCE / "ml" / folder / "keywords.pyi"] = with_imports(body, "")
    return found


def estimator(name: str, settings: type, variable: str) -> str:
    """The keywords and the Params of the estimator of this name."""
    doc = f"The fields of `{settings.__name__}` and of `Gang`."
    own = keywords(f"{name}Keywords", "GangKeywords", doc, settings)
    return own + params(f"{name}Params", settings, Gang, variable=variable)


def with_imports(body: str, own: str) -> str:
    """The whole file."""
    code = re.sub(r'""".*?"""', "", body, flags=re.DOTALL)
    homes: dict[str, list[str]] = {}
    for name, home in HOMES.items():
        if name != own and re.search(rf"\b{name}\b", code):
            homes.setdefault(home, []).append(name)
    order = sorted(homes, key=lambda home: (home.startswith("tritium"), home.startswith("pyspark"), home))
    lines = [f"from {home} import {', '.join(sorted(homes[home]))}" for home in order]
    head = '"""Settings as keywords, for type checkers and editors: written by scripts/keywords.py."""\n\n'
    return head + "\n".join(lines) + "\n" + body


def keywords(name: str, base: str, doc: str, source: type) -> str:
    """A TypedDict of the fields of a dataclass."""
    fields = "".join(f"    {f.name}: {f.type}\n{meaning(f)}" for f in dataclasses.fields(source))
    return f'\nclass {name}({base}, total=False):\n    """{doc}"""\n\n{fields}'


def params(name: str, *sources: type, variable: str = "P") -> str:
    """What `ml.params.with_params` makes of the fields."""
    fields = [f for source in sources for f in dataclasses.fields(source)]
    text = f'\n{variable} = TypeVar("{variable}", bound={name})\n\nclass {name}:\n'
    text += '    """The Params of the estimator."""\n\n'
    text += "".join(f"    {f.name}: Param[{f.type}]\n" for f in fields)
    for f in fields:
        camel = "".join(part.capitalize() for part in f.name.split("_"))
        text += f"    def get{camel}(self) -> {f.type}: ...\n"
        text += f"    def set{camel}(self: {variable}, value: {f.type}) -> {variable}: ...\n"
    return text


def meaning(field: dataclasses.Field[object]) -> str:
    """The field's documentation as an editor finds it."""
    text = textwrap.fill(f'"""{field.metadata["doc"]}', 117, initial_indent="    ", subsequent_indent="    ")
    return text + (' """\n' if text.endswith('"') else '"""\n')


if __name__ == "__main__":
    for path, text in stubs().items():
        path.write_text(text, encoding="utf-8")
