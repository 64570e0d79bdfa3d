"""Fakes for the unit tests. They serve only for what a device cannot be made to do."""
