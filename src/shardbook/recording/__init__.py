"""What a training loop did, written down step by step so that two runs can be compared: `record` writes, `read` reads."""
