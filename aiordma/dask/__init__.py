"""A communication backend of Dask's distributed: schedulers, workers and clients over RDMA.

    client = distributed.Client("rdma://10.7.1.1:8786")

distributed finds the backend by its entry point: no program needs to import this package. It needs
distributed: `pip install aiordma[dask]`.
"""

from aiordma.dask.backend import RdmaBackend
from aiordma.dask.comm import RdmaComm
from aiordma.dask.connector import RdmaConnector
from aiordma.dask.listener import RdmaListener

__all__ = ["RdmaBackend", "RdmaComm", "RdmaConnector", "RdmaListener"]
