"""`sparkdl.horovod.tensorflow`: only its `keras` holds something (rank)."""
