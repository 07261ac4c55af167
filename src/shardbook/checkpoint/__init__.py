"""Checkpoints: what must survive of a training, written by all ranks at once and read back at any stage, N and precision."""
