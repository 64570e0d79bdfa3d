"""Measurements for developers of aiordma. `aiordma bench` is the one for users."""
