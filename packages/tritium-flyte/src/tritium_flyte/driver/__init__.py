"""What runs where Flyte is installed: the driver of a task, and the process that starts a run."""
