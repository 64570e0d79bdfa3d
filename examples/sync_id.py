"""Connect two synchronous ids: each call blocks in C in a thread, and can be cancelled.

    python examples/sync_id.py [ADDRESS]

Both sides run in this process, at an RDMA address of this machine.
"""

import asyncio
import sys

from aiordma import SyncCmId
from aiordma.rdmacm import ConnectionParameters, device_addresses, parse_address
from aiordma.verbs import QueuePairCaps, QueuePairInit

QUEUES = QueuePairInit(QueuePairCaps(max_send_wr=4, max_recv_wr=4), sq_sig_all=True)


async def run_server(listener: SyncCmId) -> None:
    try:
        async with asyncio.timeout(0.1):
            await listener.get_request()
    except TimeoutError:
        print("no request yet")  # the thread is free again
    async with await listener.get_request() as cm:
        await cm.create_qp(QUEUES)
        memory = bytearray(64)
        region = await cm.reg_msgs(memory)
        cm.cm_id.post_recv(1, region, 0, 64)
        await cm.accept(ConnectionParameters(b"welcome"))
        received = (await cm.get_recv_comp()).check()
        print("received:", memory[: received.byte_len].decode())
        await cm.disconnect()


async def run_client(host: str, port: int) -> None:
    await asyncio.sleep(0.2)
    async with await SyncCmId.create() as cm:
        await cm.resolve_addr(parse_address(host, port))
        await cm.resolve_route()
        await cm.create_qp(QUEUES)
        region = await cm.reg_msgs(bytearray(b"hello from a synchronous id"))
        await cm.connect()
        # The event of the last call stays here until the next call.
        assert cm.event is not None
        print("accepted with:", cm.event.private_data.rstrip(b"\0").decode())
        cm.cm_id.post_send(1, region, 0, region.length)
        (await cm.get_send_comp()).check()
        await cm.disconnect()


async def main(host: str) -> None:
    async with await SyncCmId.create() as listener:
        listener.bind_addr(parse_address(host))
        listener.listen()
        await asyncio.gather(run_server(listener), run_client(*listener.local_address))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else device_addresses()[0].host))
