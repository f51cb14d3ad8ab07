"""A shard as the data set of a framework (rank)."""
