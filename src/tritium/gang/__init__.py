"""Start a gang, watch it, end it (any process)."""
