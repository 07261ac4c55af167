"""The books: where every byte is, by account, tier and unit, as the engine reports it."""
