"""Hooks of these tests. They are marked `may_block`: starting a process and using files blocks."""

from every_loop import pytest_generate_tests, pytest_pyfunc_call  # noqa: F401
from leaks import no_leaks  # noqa: F401
