"""Memory beside the device: host memory that the system fills and copies fast, and files that are read and written past its cache."""
