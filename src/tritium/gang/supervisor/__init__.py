"""Feed, monitor and end one rank process, in a Spark task (supervisor)."""
