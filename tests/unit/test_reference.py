"""The reference has every public name, every error and every setting, as the code has them."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from pathlib import Path
from types import ModuleType

import pytest

import tritium
import tritium.mlflow
import tritium.tensorboard
import tritium.torch
from tritium.gang.settings import Gang

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / "errors.md", *sorted((ROOT / "docs" / "reference").glob("*.md"))]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    """Return scripts/settings_page.py, which is no module of a package."""
    spec = importlib.util.spec_from_file_location("settings_page", ROOT / "scripts" / "settings_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_settings_is_that_of_the_code(generator: ModuleType) -> None:
    written = generator.PAGE.read_text(encoding="utf-8")
    assert written == generator.page(), "run `python scripts/settings_page.py`"


def test_the_examples_of_settings_are_keywords(generator: ModuleType) -> None:
    gangs = {field.name for field in generator.own_fields(Gang)}
    for _, examples in generator.GROUPS.values():
        for name, example in examples.items():
            call = ast.parse(f"f({example})", mode="eval").body
            assert isinstance(call, ast.Call)
            assert [keyword.arg for keyword in call.keywords] == [name]
            if name in gangs:
                Gang(**{"gpus": 1, name: ast.literal_eval(call.keywords[0].value)})


def test_every_public_name_has_an_entry() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    entries = {line.removeprefix("::: ") for line in text.splitlines() if line.startswith("::: tritium")}
    errors = {
        name
        for name, value in vars(tritium.errors).items()
        if isinstance(value, type) and issubclass(value, tritium.errors.TritiumError)
    }
    errors -= {"TritiumError", "SetupError", "DataError"}  # which are bases, and no error
    expected = {f"tritium.{name}" for name in tritium.__all__ if not inspect.ismodule(getattr(tritium, name))}
    expected |= {f"tritium.ml.{name}" for name in tritium.ml.__all__ if not name.endswith("Settings")}
    expected |= {f"tritium.torch.{name}" for name in tritium.torch.__all__}
    expected |= {f"tritium.mlflow.{name}" for name in tritium.mlflow.__all__}
    expected |= {f"tritium.tensorboard.{name}" for name in tritium.tensorboard.__all__}
    expected |= {f"tritium.errors.{name}" for name in errors}
    assert not expected - entries
