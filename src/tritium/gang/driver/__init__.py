"""Start a gang, supervise its Spark job, and return its results or raise its error (driver)."""
