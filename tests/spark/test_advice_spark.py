"""Spark's own settings that messages and pages name are settings of this Spark."""

from __future__ import annotations

from typing import Any

import pytest

import advice

# Objects whose creation registers Spark's settings (org.apache.spark.internal.config.ConfigEntry).
REGISTERS = ("org.apache.spark.internal.config.package$", "org.apache.spark.sql.internal.SQLConf$")

# Keys that Spark does not register as entries, and where they are documented or used.
UNREGISTERED = {
    "spark.tritium.trustModels": "ours: read by TorchModelReader and ParamsReader",
    "spark.local.dir": "https://spark.apache.org/docs/latest/configuration.html; read by Utils.getConfiguredLocalDirs",
}


def keys() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for texts in (advice.messages(), advice.in_pages()):
        for fragment, places in advice.fragments(texts)["spark"].items():
            if advice.config(fragment):
                found.setdefault(fragment, []).extend(places)
    return found


def registered(spark: Any, key: str) -> bool:
    jvm = spark._jvm
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    for name in REGISTERS:
        jvm.java.lang.Class.forName(name, True, loader)
    return jvm.org.apache.spark.internal.config.ConfigEntry.findEntry(key) is not None


def test_every_setting_of_spark_that_is_named_exists(spark: Any) -> None:
    named = keys()
    assert {"spark.task.cpus", "spark.driver.maxResultSize", "spark.tritium.trustModels"} <= set(named)
    unknown = {key: places for key, places in named.items() if key not in UNREGISTERED and not registered(spark, key)}
    assert unknown == {}
    assert sorted(set(UNREGISTERED) - set(named)) == []


@pytest.mark.parametrize("key", ["spark.driver.maxResultsSize", "spark.local.dirs"])
def test_a_misspelt_setting_is_found(spark: Any, key: str) -> None:
    assert not registered(spark, key)
