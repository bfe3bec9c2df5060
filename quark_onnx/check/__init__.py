"""Check a given model before it is planned."""
