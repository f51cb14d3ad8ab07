"""Comments are sentences, and locals are named after what they hold."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

import tritium

PACKAGE = Path(tritium.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
VAGUE = {"each", "found", "given", "made", "own", "said", "there"}
DIRECTIVE = re.compile(r"noqa|type: ignore|fmt: |pragma")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_words(path: Path) -> None:
    """A comment begins with a capital, unless it goes on from the line above, or is for a tool."""
    text = path.read_text()
    lines = text.splitlines()
    problems = [
        f"line {token.start[0]}: a comment begins in lower case: {token.string}"
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
        if (words := token.string.lstrip("# "))[:1].islower() and not DIRECTIVE.match(words)
        if not (token.line.lstrip().startswith("#") and lines[token.start[0] - 2].lstrip().startswith("#"))
    ]
    problems += [
        f"line {node.lineno}: a variable called {node.id!r}: name it after what it holds"
        for function in ast.walk(ast.parse(text))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE
    ]
    assert not problems, "\n".join(problems)
