"""Two records of training side by side: identical, within rounding, or different, and which rule is broken."""
