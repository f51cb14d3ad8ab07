"""All that knows a SparkSession: its cluster, its jobs, its errors, and the inside of Spark (driver)."""
