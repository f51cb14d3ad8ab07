"""The Spark task's side of a rank: feed it, watch it, end it (supervisor)."""
