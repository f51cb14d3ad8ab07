"""The control server of a run (driver, or the first supervisor)."""
