from leaks import no_leaks  # noqa: F401
