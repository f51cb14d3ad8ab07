"""Detection, by their plans, of DataFrames that a Spark version never finishes computing (driver).

Spark 4.2.0, SPARK-58241: the runner of an Arrow-optimised Python UDF (all of them by default in 4.2) that reads
columnar batches writes a schema that its worker misreads, and then waits for ever. Seen on 4.2.0:
Parquet and ORC (v1 and v2 sources) and a cached DataFrame of numbers hang; a filter, a shuffle or an expression between
the scan and the UDF makes rows of the batches, and nothing hangs.
"""

from __future__ import annotations

import re
from typing import Any

from tritium.errors import WrongVersion
from tritium.spark import is_connect
from tritium.spark.inside import Inside
from tritium.spark.inside.plans import items

HANGING = "4.2.0"
_ARROW_BATCHED = 101  # Spark's number for a Python UDF that is given Arrow batches
_PLAIN = ("AttributeReference", "Literal")  # With other arguments Spark uses the runner for rows.
_AROUND = ("PythonUDF", "NamedArgumentExpression")
_TEXT = re.compile(r"ArrowEvalPython \[(.*?)\], \[[^\]]*\], 101\n[^\w]*(?:\*\(\d+\) )?(FileScan \w+|BatchScan \w+)(.*)")


def probe(spark: Any) -> str | None:
    """Return why DataFrames are not looked at in this session; None where they are."""
    return None if spark.version == HANGING else f"Spark {spark.version} computes them"


used = Inside("hangs", probe, needs_jvm=False)


def refuse_hanging(frame: Any) -> None:
    """Raise WrongVersion where `frame` is a Spark DataFrame that its Spark never computes.

    A stream is not checked: its plan is made again for every micro-batch.
    """
    if frame.isStreaming or not used(frame.sparkSession):
        return
    hung = hanging(frame)
    if hung is None:
        return
    udf, scan = hung
    raise WrongVersion(
        f"On Spark {HANGING} this DataFrame is never computed: its Python UDF {udf} reads the columnar batches of a "
        f"{scan}, and Spark's worker then waits for ever (SPARK-58241). Use Spark 4.2.1. Or make the UDF with "
        "udf(…, useArrow=False), or after spark.conf.set('spark.sql.execution.pythonUDF.arrow.enabled', 'false').",
        found=HANGING,
        needed="4.2.1",
    )


def hanging(frame: Any) -> tuple[str, str] | None:
    """Return (UDF, scan) where an Arrow-optimised Python UDF reads a columnar scan directly, else None."""
    if is_connect(frame):
        return _in_text(frame._explain_string(extended=False))
    return _in_plan(frame._jdf.queryExecution().executedPlan())


def _in_plan(node: Any) -> tuple[str, str] | None:
    if node.nodeName() == "AdaptiveSparkPlan":
        node = node.inputPlan()
    children = items(node.children())
    if node.nodeName() == "ArrowEvalPython" and node.evalType() == _ARROW_BATCHED and children[0].supportsColumnar():
        udfs = items(node.udfs())
        if all(map(_is_plain, udfs)):
            return repr(udfs[0].name()), str(children[0].nodeName()).strip()
    return next((pair for pair in map(_in_plan, children) if pair is not None), None)


def _is_plain(expression: Any) -> bool:
    kind = expression.getClass().getSimpleName()
    return kind in _PLAIN or (kind in _AROUND and all(map(_is_plain, items(expression.children()))))


def _in_text(plan: str) -> tuple[str, str] | None:
    """Return the same as `_in_plan` for Spark Connect, which shows a plan as text only, without single expressions."""
    for udf, scan, rest in _TEXT.findall(plan):
        if scan.startswith("BatchScan") or "Batched: true" in rest:
            return repr(udf.partition("(")[0]), scan
    return None
