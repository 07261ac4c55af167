"""The command line: one command per file. What needs torch is imported when a command runs, so that help needs none."""
