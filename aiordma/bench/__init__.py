"""`aiordma bench`: measure aiordma, other RDMA programs and TCP in one run, on one device.

A *test* measures one quantity, for example the latency of round trips. An *implementation* does a
test with one library and event loop, or with one C program, such as aiordma on asyncio, or
perftest's ib_send_lat. It runs as two processes, a server and a client. In each *round*, every
implementation runs, in some tests several times in turn: the speed of a machine can change between
rounds, but the ratios within a round change little.
"""
