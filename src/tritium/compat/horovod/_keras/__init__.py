"""What `horovod.keras` and `horovod.tensorflow.keras` share (rank)."""
