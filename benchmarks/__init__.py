"""Measurements of the library that are for those who work on it; `aiordma bench` is for users."""
