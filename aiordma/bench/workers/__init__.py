"""The processes of the implementations in Python: one server, one client.

    python -m aiordma.bench.workers ROLE KIND HOST PORT WORK

ROLE is server or client, KIND a kind that __main__.py knows, WORK the result of Work.pack(). A
server prints {"port": N} when it listens, and {"cpu": seconds} when it has served its client. A
client prints its Sample. A process does one run: it knows nothing of rounds and of other
implementations.
"""
