"""Make Markdown lists of the parameters in docstrings, for the pages of the reference (documentation build).

A docstring documents its parameters as `name : meaning`, one under the other, with longer meanings indented. Markdown
would make one paragraph of them.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_PARAMETER = re.compile(r"^(?P<names>\*{0,2}[a-z_]\w*(?:, \*{0,2}[a-z_]\w*)*) *: +(?P<meaning>\S.*)$")


def with_lists(text: str) -> str:
    """Return a docstring in which each parameter is an item of a list, with its meaning on one line."""
    lines: list[str] = []
    in_list = False
    for line in text.splitlines():
        if parameter := _PARAMETER.match(line):
            names = ", ".join(f"`{name}`" for name in parameter["names"].split(", "))
            lines += [*([] if in_list else [""]), f"- {names}: {parameter['meaning']}"]
            in_list = True
        elif in_list and line.startswith(" "):
            lines[-1] += f" {line.strip()}"
        else:
            lines += ["", line] if in_list and line else [line]
            in_list = False
    return "\n".join(lines)


class ParameterLists(griffe.Extension):
    """Rewrites every docstring as griffe reads it."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """griffe calls this for every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = with_lists(obj.docstring.value)
