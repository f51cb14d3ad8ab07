"""Outputs, tables, run directories and reports on S3, with a server that is not Amazon's."""

from __future__ import annotations

from pathlib import Path

import pytest

import object_stores
from broker import jars
from pods import Ended, pod
from workflows import FOLDER, Place


@pytest.mark.timeout(1200)
def test_all_of_a_pods_files_are_on_s3(tmp_path: Path) -> None:
    """A gang goes on from a checkpoint there after a rank was killed; another pod's gang reads the table."""
    place, marker = Place(tmp_path), tmp_path / "marker"
    with object_stores.server() as address:
        variables = {**object_stores.bucket(address), "AWS_ALLOW_HTTP": "true"}
        conf = {
            "spark.jars": ",".join(map(str, sorted(jars("s3a", FOLDER / "pom.xml").glob("*.jar")))),
            "spark.hadoop.fs.s3a.endpoint": address,
            "spark.hadoop.fs.s3a.endpoint.region": "us-east-1",
            "spark.hadoop.fs.s3a.path.style.access": "true",
        }

        def run(name: str, *inputs: str) -> Ended:
            return pod(place, name, *inputs, flow="training", store="s3://bucket/f", conf=conf, **variables).run()

        first = run("stored", f"marker={str(marker)!r}")
        assert first.outputs is not None, f"{first.error}\n{first.log[-5000:]}"
        pairs = first.outputs["o0"]["map"]["literals"].items()
        values = {name: literal["scalar"]["primitive"]["stringValue"] for name, literal in pairs}
        assert marker.exists()
        assert values["hit"] == values["undisturbed"]
        assert values["uri"].startswith("s3://bucket/f/raw/")
        assert values["run_dir"].startswith("s3://bucket/f/base/tritium/stored-")
        assert "resumed" in first.report
        second = run("sums", f"rows=Table({values['uri']!r})", "factor=1")
        assert second.outputs is not None, f"{second.error}\n{second.log[-5000:]}"
        assert second.outputs["o0"]["scalar"]["primitive"]["floatValue"] == sum(number % 17 for number in range(240))
