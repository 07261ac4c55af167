"""What a run will hold, before it runs. Standard library only."""
