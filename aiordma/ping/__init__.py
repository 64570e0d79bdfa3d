"""The two sides of `aiordma ping`: a client that sends numbered messages, and an echo server.

Nothing is imported here: the command line imports `options` alone, and the rest when it runs.
"""
