"""Decoders in the lines of the code that runs them, on sizes."""
