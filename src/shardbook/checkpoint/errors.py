"""What goes wrong with checkpoints."""

from shardbook.errors import ConfigError


class CheckpointError(ConfigError):
    """A checkpoint can't be written, or what is asked to be loaded is damaged, incomplete or of something else."""
