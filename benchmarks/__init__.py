"""shardbook against torch's own engines and against its own promises; each module is a command: ``python -m benchmarks.step_time``."""
