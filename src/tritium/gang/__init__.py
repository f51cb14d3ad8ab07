"""Start, monitor and end a gang: one folder for each process; files here are shared by all (any process)."""
