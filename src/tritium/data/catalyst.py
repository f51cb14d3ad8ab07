"""Expressions of Spark's Catalyst for which pyspark has no function, made through py4j (driver; not with Connect)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNSAFE_ARRAY = "org.apache.spark.sql.catalyst.expressions.UnsafeArrayData"


def column(jvm: Any, expression: Any) -> Any:
    """Return a pyspark Column of an expression."""
    from pyspark.sql.classic.column import Column

    return Column(jvm.org.apache.spark.sql.classic.ExpressionUtils.column(expression))


def expression_of(jvm: Any, column: Any) -> Any:
    """Return the expression of a pyspark Column."""
    return jvm.org.apache.spark.sql.classic.ExpressionUtils.expression(column._jc)


def invoke(jvm: Any, target: Any, method: str, result: Any, arguments: Sequence[Any] = ()) -> Any:
    """Return an expression that calls a method of the object that `target` gives; null where that or an argument is."""
    nothing = singleton(jvm.scala.collection.immutable, "Nil")
    given = jvm.PythonUtils.toSeq(list(arguments))
    make = jvm.org.apache.spark.sql.catalyst.expressions.objects.Invoke
    return make(target, method, result, given, nothing, True, True, True)


def literal_class(jvm: Any, name: str) -> Any:
    """Return a literal expression that gives a Java class."""
    literal = jvm.org.apache.spark.sql.catalyst.expressions.Literal
    return literal(_java_class(jvm, name), type_of_class(jvm, "java.lang.Class"))


def type_of_class(jvm: Any, name: str) -> Any:
    """Return the DataType of an expression that gives objects of a Java class."""
    return jvm.org.apache.spark.sql.types.ObjectType(_java_class(jvm, name))


def type_of(jvm: Any, name: str) -> Any:
    """Return a simple DataType: "Boolean" is BooleanType."""
    return singleton(jvm.org.apache.spark.sql.types, f"{name}Type")


def singleton(package: Any, name: str) -> Any:
    """Return a Scala object."""
    return getattr(getattr(package, f"{name}$"), "MODULE$")


def _java_class(jvm: Any, name: str) -> Any:
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    return jvm.java.lang.Class.forName(name, True, loader)
