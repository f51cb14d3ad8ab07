"""Expressions of Spark's Catalyst for which pyspark has no function, made through py4j (driver; not with Connect).

What is constant in a JVM is asked for once: each question takes a third of a millisecond.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

EXPRESSIONS = "org.apache.spark.sql.catalyst.expressions"
UNSAFE_ARRAY = f"{EXPRESSIONS}.UnsafeArrayData"
_COLUMNS = "org.apache.spark.sql.classic.ExpressionUtils"
_TYPES = "org.apache.spark.sql.types"


def column(jvm: Any, expression: Any) -> Any:
    """Return a pyspark Column of an expression."""
    from pyspark.sql.classic.column import Column

    return Column(java(jvm, _COLUMNS).column(expression))


def expression_of(jvm: Any, column: Any) -> Any:
    """Return the expression of a pyspark Column."""
    return java(jvm, _COLUMNS).expression(column._jc)


def invoke(jvm: Any, target: Any, method: str, result: Any, arguments: Sequence[Any] = ()) -> Any:
    """Return an expression that calls a method of the object that `target` gives; null where that or an argument is."""
    nothing = singleton(jvm, "scala.collection.immutable.Nil")
    argument_list = sequence(jvm, arguments) if arguments else nothing
    return java(jvm, f"{EXPRESSIONS}.objects.Invoke")(target, method, result, argument_list, nothing, True, True, True)


@functools.lru_cache(64)
def literal_class(jvm: Any, name: str) -> Any:
    """Return a literal expression that gives a Java class."""
    return java(jvm, f"{EXPRESSIONS}.Literal")(_class_object(jvm, name), type_of_class(jvm, "java.lang.Class"))


@functools.lru_cache(64)
def type_of_class(jvm: Any, name: str) -> Any:
    """Return the DataType of an expression that gives objects of a Java class."""
    return java(jvm, f"{_TYPES}.ObjectType")(_class_object(jvm, name))


def type_of(jvm: Any, name: str) -> Any:
    """Return a simple DataType: "Boolean" is BooleanType."""
    return singleton(jvm, f"{_TYPES}.{name}Type")


@functools.lru_cache(64)
def singleton(jvm: Any, name: str) -> Any:
    """Return a Scala object."""
    return getattr(java(jvm, f"{name}$"), "MODULE$")


def sequence(jvm: Any, values: Sequence[Any]) -> Any:
    """Return a Scala Seq."""
    return java(jvm, "org.apache.spark.api.python.PythonUtils").toSeq(list(values))


def java(jvm: Any, name: str) -> Any:
    """Return a Java class by its full name. `jvm.a.b.C` asks the JVM about each part: 4 ms instead of none."""
    from py4j.java_gateway import JavaClass

    return JavaClass(name, jvm._gateway_client)


def _class_object(jvm: Any, name: str) -> Any:
    loader = java(jvm, "java.lang.Thread").currentThread().getContextClassLoader()
    return java(jvm, "java.lang.Class").forName(name, True, loader)
