"""`horovod.common`: what all front ends share (rank)."""
