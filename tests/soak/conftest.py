from campaign import campaign  # noqa: F401
from leaks import no_leaks  # noqa: F401
