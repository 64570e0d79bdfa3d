"""Connect two asynchronous ids step by step, as connect() and listen() do inside.

    python examples/async_id.py [ADDRESS]

Both sides run in this process, at an RDMA address of this machine.
"""

import asyncio
import sys

from aiordma import AsyncCmId
from aiordma.rdmacm import device_addresses, parse_address
from aiordma.verbs import QueuePairCaps, QueuePairInit

# No completion queues are given, so create_qp() creates two for each id.
QUEUES = QueuePairInit(QueuePairCaps(max_send_wr=4, max_recv_wr=4), sq_sig_all=True)


async def run_server(listener: AsyncCmId) -> None:
    request = await anext(listener)
    print("request from", request.peer_address[0])
    async with request as cm:
        await cm.create_qp(QUEUES)
        memory = bytearray(64)
        region = await cm.reg_msgs(memory)
        cm.cm_id.post_recv(1, region, 0, 64)  # before accept(): the peer can send right after it
        await cm.accept()
        received = (await cm.get_recv_comp()).check()
        print("received:", memory[: received.byte_len].decode())
        await cm.disconnect()


async def run_client(host: str, port: int) -> None:
    async with await AsyncCmId.create() as cm:
        await cm.resolve_addr(parse_address(host, port))
        print("device:", cm.device().name, "port", cm.port_num)
        await cm.resolve_route()
        await cm.create_qp(QUEUES)
        region = await cm.reg_msgs(bytearray(b"hello from an asynchronous id"))
        await cm.connect()
        cm.cm_id.post_send(1, region, 0, region.length)
        (await cm.get_send_comp()).check()
        await cm.disconnect()
        print("state:", cm.state.name)


async def main(host: str) -> None:
    async with await AsyncCmId.create() as listener:
        listener.bind_addr(parse_address(host))
        listener.listen()
        await asyncio.gather(run_server(listener), run_client(*listener.local_address))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else device_addresses()[0].host))
