"""What is read of Spark's, Py4J's and PySpark's private interfaces (driver, Spark's Python worker)."""
