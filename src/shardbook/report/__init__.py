"""What a run document says, for people: on the terminal and as one page. Nothing here needs torch."""
