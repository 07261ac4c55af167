"""Tables for the terminal that more than one part prints, and the words and figures in them. They need rich and no torch."""
