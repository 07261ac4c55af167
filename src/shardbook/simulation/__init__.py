"""The engines themselves on fake tensors: ``sb.simulate``."""
