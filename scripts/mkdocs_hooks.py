"""What the pages take from the code when they are built, so that it is written once (documentation build).

<!-- fields tritium.gang.settings:Gang -->   a table of a settings dataclass: name, default, meaning
<!-- errors -->                              the error tree
<!-- decisions -->                           a list of the decisions
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from pathlib import Path
from typing import Any

import tritium.errors


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs calls this for every page."""
    markdown = re.sub(r"<!-- fields ([\w.]+):(\w+) -->", lambda found: fields(found[1], found[2]), markdown)
    markdown = markdown.replace("<!-- decisions -->", decisions())
    return markdown.replace("<!-- errors -->", f"```text\n{errors()}\n```")


def fields(module: str, name: str) -> str:
    """A dataclass whose fields carry their `doc` as a table: those that its base has come last."""
    rows = ["| setting | default | |", "|---|---|---|"]
    source = getattr(importlib.import_module(module), name)
    shared = {
        field.name for base in source.__bases__ if dataclasses.is_dataclass(base) for field in dataclasses.fields(base)
    }
    for field in sorted(dataclasses.fields(source), key=lambda field: field.name in shared):
        default: Any = field.default if field.default is not dataclasses.MISSING else None
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        doc = re.sub(r"<(\w+)>", r"&lt;\1&gt;", field.metadata["doc"]).replace("|", "\\|")
        rows.append(f"| `{field.name}` | {'' if needed else f'`{default!r}`'} | {doc} |")
    return "\n".join(rows)


def errors() -> str:
    """The tree at the top of tritium.errors."""
    return str(tritium.errors.__doc__).partition("\n\n")[2].strip()


def decisions() -> str:
    """The titles of docs/decisions, with links."""
    pages = sorted(Path(__file__).parents[1].joinpath("docs", "decisions").glob("[0-9]*.md"))
    titles = [page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ") for page in pages]
    return "\n".join(f"- [{title}]({page.name})" for title, page in zip(titles, pages, strict=True))
