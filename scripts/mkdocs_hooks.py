"""What the pages take from the code when they are built, so that it is written once (documentation build).

<!-- errors -->                              the error tree
<!-- decisions -->                           a list of the decisions
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import tritium.errors


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs calls this for every page."""
    markdown = markdown.replace("<!-- decisions -->", decisions())
    return markdown.replace("<!-- errors -->", f"```text\n{errors()}\n```")


def on_post_build(config: Any, **_: Any) -> None:
    """mkdocs calls this at the end: each page is also there as Markdown, and llms.txt lists them for assistants."""
    source, site = Path(config["docs_dir"]), Path(config["site_dir"])
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}", ""]
    for page in sorted(source.rglob("*.md")):
        place = page.relative_to(source)
        shutil.copyfile(page, site / place)
        title = page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        lines.append(f"- [{title}]({place.as_posix()})")
    (site / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def errors() -> str:
    """The tree at the top of tritium.errors."""
    return str(tritium.errors.__doc__).partition("\n\n")[2].strip()


def decisions() -> str:
    """The titles of docs/decisions, with links."""
    pages = sorted(Path(__file__).parents[1].joinpath("docs", "decisions").glob("[0-9]*.md"))
    titles = [page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ") for page in pages]
    return "\n".join(f"- [{title}]({page.name})" for title, page in zip(titles, pages, strict=True))
