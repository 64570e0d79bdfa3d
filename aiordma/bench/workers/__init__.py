"""The processes of the implementations in Python: one server, one client.

`python -m aiordma.bench.workers` does the work that it reads from standard input: see __main__.py.
It knows nothing of rounds and of other implementations.
"""
