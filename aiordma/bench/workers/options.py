"""The options of the connections in the tests of many connections."""

from dataclasses import replace

from aiordma import ConnectionOptions

MESSAGE_SIZE = 64
SERVER = ConnectionOptions(
    send_depth=4, recv_depth=1, max_message_size=MESSAGE_SIZE, shared_recv_depth=256
)
CLIENT = replace(SERVER, shared_recv_depth=0)
