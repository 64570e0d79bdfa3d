"""What runs in the processes of a contender: `python -m aiordma.bench.workers ROLE KIND HOST PORT
WORK`.

A server prints {"port": N} when it listens, and {"cpu": seconds} when it has served; a client
prints its Sample. Nothing here knows of rounds or of other contenders.
"""
