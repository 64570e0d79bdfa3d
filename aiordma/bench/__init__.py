"""`aiordma bench`: measure aiordma, other RDMA programs and TCP in one run, on one device.

A *test* measures one quantity: latency, say. An *implementation* is a way to do a test, such as
aiordma on asyncio or perftest's ib_send_lat; it runs as two processes, a server and a client. In
each *round* every implementation runs once, so that a machine whose speed varies slows all of them
down alike, and their ratios stay comparable.
"""
