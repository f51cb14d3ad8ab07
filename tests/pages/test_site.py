"""The site as readers get it: built once, served as the pages say, its links followed, each page shown in Chromium."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
browsed = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
WIDTHS = (1280, 400)  # px: a laptop, a phone
# Returns what a reader of the page would miss, a line each.
LOOK = (ROOT / "tests" / "pages" / "look.js").read_text()
# The theme's search reads its index on every page, which takes longer than all else.
NO_SEARCH = "window.Worker = class { postMessage() {} addEventListener() {} terminate() {} }"


class Page(HTMLParser):
    """The anchors and the links of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value:
                self.links.append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def pages(site: Path) -> list[str]:
    return sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html") if path.name != "404.html")


@contextmanager
def served(site: Path) -> Iterator[str]:
    """Serve the site as the pages tell readers to, on a free port; yields its address."""
    command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "-d", str(site)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        try:
            yield re.sub(r".*\((http://\S+)\).*\n", r"\1", server.stdout.readline())
        finally:
            server.kill()


@contextmanager
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def test_no_link_is_dead(site: Path) -> None:
    parsed = {name: Page((site / name).read_text(encoding="utf-8")) for name in pages(site)}
    dead = []
    for name, page in parsed.items():
        for link in page.links:
            place, anchor = urldefrag(urljoin(f"http://site/{name}", link))
            if not place.startswith("http://site/"):
                continue
            target = unquote(place.removeprefix("http://site/"))
            if not (site / target).is_file():
                dead.append(f"{name}: {link}")
            elif anchor and target in parsed and unquote(anchor) not in parsed[target].anchors | {"__top"}:
                dead.append(f"{name}: {link}: no such anchor")
    assert not dead, "\n".join(dead)


def test_every_picture_is_an_image(site: Path) -> None:
    pictures = list((ROOT / "docs").rglob("*.svg"))
    assert pictures
    for picture in pictures:
        assert ET.parse(site / picture.relative_to(ROOT / "docs")).getroot().tag.endswith("svg"), picture


@browsed
@pytest.mark.timeout(400)  # some 40 s, and as often as the machine is shared
def test_no_page_is_cut_off(site: Path) -> None:
    problems = []
    with served(site) as address, browser() as chromium:
        page = chromium.new_page()
        page.add_init_script(NO_SEARCH)
        page.on(
            "request",
            lambda request: (
                problems.append(f"{page.url} asks {request.url}")
                if not (request.url.startswith((address, "data:")))
                else None
            ),
        )
        page.on("pageerror", lambda error: problems.append(f"{page.url}: {error}"))
        for name in pages(site):
            page.set_viewport_size({"width": WIDTHS[0], "height": 900})
            page.goto(address + name)
            for width in WIDTHS:
                page.set_viewport_size({"width": width, "height": 900})
                problems += [f"{name} at {width} px: {line}" for line in page.evaluate(LOOK)]
    assert not problems, "\n".join(problems)


@browsed
def test_search_finds_an_error_by_its_text(site: Path) -> None:
    with served(site) as address, browser() as chromium:
        page = chromium.new_page(viewport={"width": 1280, "height": 900})
        page.goto(address)
        page.click(".md-search__input")
        page.keyboard.type("It never reached the all_reduce in which ranks wait")
        page.wait_for_selector(".md-search-result__link[href*='errors.html']")


@browsed
def test_a_page_from_the_disk_says_how_to_search(site: Path) -> None:
    with browser() as chromium:
        page = chromium.new_page(viewport={"width": 1280, "height": 900})
        page.goto((site / "index.html").as_uri())
        assert "make docs && python -m http.server -d site" in page.inner_text(".from-disk")
        assert not page.is_visible(".md-search__input")
