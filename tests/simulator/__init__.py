"""A simulated pair of RDMA devices with a connection manager, in virtual time.

`Simulation` is the entry. Its parts: world.py (time, events, failures of calls), verbs.py and
device.c (objects and queues of libibverbs), network.py (executes work requests), cm.py (librdmacm),
threads.py (worker threads), loops.py (event loops). aiordma itself is not changed: its C modules
call the simulated libraries.

Import this package before aiordma.
"""

from simulator.simulation import Simulation

__all__ = ["Simulation"]
