"""Create synchronous ids as endpoints, with getaddrinfo() and rdma_create_ep(3).

    python examples/endpoint.py [ADDRESS]

Each request at the passive endpoint has an id with a queue pair. The active endpoint has resolved
its address and its route when it is created. Both endpoints run in this process.
"""

import asyncio
import sys

import aiordma
from aiordma import AddrInfo, SyncCmId
from aiordma.enums import AddrInfoFlags
from aiordma.rdmacm import device_addresses
from aiordma.verbs import QueuePairCaps, QueuePairInit

PORT = "7474"
QUEUES = QueuePairInit(QueuePairCaps(max_send_wr=4, max_recv_wr=4), sq_sig_all=True)


async def run_passive(host: str, listening: asyncio.Event) -> None:
    [info] = await aiordma.getaddrinfo(host, PORT, AddrInfo(flags=AddrInfoFlags.PASSIVE))
    async with await SyncCmId.create_ep(info, init=QUEUES) as listener:
        listener.listen()
        listening.set()
        async with await listener.get_request() as cm:
            memory = bytearray(64)
            region = await cm.reg_msgs(memory)
            cm.cm_id.post_recv(1, region, 0, 64)
            await cm.accept()
            received = (await cm.get_recv_comp()).check()
            print("received:", memory[: received.byte_len].decode())
            await cm.disconnect()


async def run_active(host: str) -> None:
    [info] = await aiordma.getaddrinfo(host, PORT)
    async with await SyncCmId.create_ep(info, init=QUEUES) as cm:
        region = await cm.reg_msgs(bytearray(b"hello from an endpoint"))
        await cm.connect()
        cm.cm_id.post_send(1, region, 0, region.length)
        (await cm.get_send_comp()).check()
        await cm.disconnect()


async def main(host: str) -> None:
    listening = asyncio.Event()
    serving = asyncio.create_task(run_passive(host, listening))
    await listening.wait()
    await run_active(host)
    await serving


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else device_addresses()[0].host))
