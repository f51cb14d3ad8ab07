"""The process in which the user's function runs (rank)."""
