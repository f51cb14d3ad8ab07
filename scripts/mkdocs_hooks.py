"""What the pages take from the code when they are built, so that it is written once (documentation build).

<!-- errors -->                              the error tree
<!-- decisions -->                           a list of the decisions
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tritium.errors

BASES = ("SetupError", "DataError")  # which have no entry, as they are not raised themselves


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs calls this for every page."""
    markdown = markdown.replace("<!-- decisions -->", decisions())
    return markdown.replace("<!-- errors -->", errors())


def on_page_content(html: str, **_: Any) -> str:
    """mkdocs calls this for every page: for narrow screens, a table's cells name their columns, and paths may break."""
    return re.sub(r"<table>.*?</table>", lambda table: labelled(table[0]), html, flags=re.DOTALL)


def labelled(table: str) -> str:
    """Return a table in which each cell but those of the first column carries its column's header."""
    heads = [re.sub(r"<.*?>", "", head).strip() for head in re.findall(r"<th[^>]*>(.*?)</th>", table, re.DOTALL)]
    rows = table.split("<tr>")
    for number, row in enumerate(rows):
        labels = iter(heads)

        def label(cell: re.Match[str], labels: Iterator[str] = labels, first: str = heads[0]) -> str:
            head = next(labels, "")
            return f'<td data-label="{head}"' if head and head != first else "<td"

        rows[number] = re.sub(r"<td(?=[ >])", label, row)
    return re.sub(r"(?<=\w)/(?=\w)(?![^<]*>)", "/<wbr>", "<tr>".join(rows))


def on_post_build(config: Any, **_: Any) -> None:
    """mkdocs calls this at the end: each page is also there as Markdown, and llms.txt lists them for assistants."""
    source, site = Path(config["docs_dir"]), Path(config["site_dir"])
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}", ""]
    for page in sorted(source.rglob("*.md")):
        place = page.relative_to(source)
        text = re.sub(r'--8<-- "(.+)"', example, page.read_text(encoding="utf-8"))
        (site / place).write_text(text, encoding="utf-8")
        title = text.partition("\n")[0].removeprefix("# ")
        lines.append(f"- [{title}]({place.as_posix()})")
    (site / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def example(snippet: re.Match[str]) -> str:
    """Return the file that a page of the gallery includes."""
    return Path(__file__).parents[1].joinpath("examples", snippet[1]).read_text(encoding="utf-8").rstrip()


def errors() -> str:
    """Return the tree at the top of tritium.errors as nested lists, with links to the entries of errors."""
    lines = []
    for line in str(tritium.errors.__doc__).partition("\n\n")[2].strip().splitlines():
        branch, name, meaning = re.fullmatch(r"(\W*)(\w+) *(.*)", line).groups()  # type: ignore[union-attr]
        entry = f"`{name}`" if line.endswith(name) or name in BASES else f"[`{name}`](#{name.lower()})"
        lines.append(f"{' ' * len(branch)}- {entry}{': ' * bool(meaning)}{meaning}")
    return "\n".join(lines)


def decisions() -> str:
    """The titles of docs/decisions, with links."""
    pages = sorted(Path(__file__).parents[1].joinpath("docs", "decisions").glob("[0-9]*.md"))
    titles = [page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ") for page in pages]
    return "\n".join(f"- [{title}]({page.name})" for title, page in zip(titles, pages, strict=True))
