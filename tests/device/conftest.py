from every_loop import pytest_generate_tests, pytest_pyfunc_call  # noqa: F401
from leaks import no_leaks  # noqa: F401
from removing import device  # noqa: F401
