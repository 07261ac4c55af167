"""What each engine keeps, gathers and frees while a step goes on."""
