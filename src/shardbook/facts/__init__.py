"""What is known about models and machines, as plain data: standard library only."""
