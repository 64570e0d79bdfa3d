"""The metrics of each kind of `stats`: names, types, and help texts."""

from __future__ import annotations

from dataclasses import dataclass

from aiordma.cm.handshakes import ListenerStats
from aiordma.message_streams.stats import MessageStreamStats
from aiordma.qp.stats import ConnectionStats
from aiordma.streams.stats import StreamStats

Stats = ConnectionStats | MessageStreamStats | StreamStats | ListenerStats


@dataclass(frozen=True)
class Metrics:
    """The fields of a class of stats that are counters or gauges, each with its help text."""

    prefix: str
    counters: dict[str, str]
    gauges: dict[str, str]
    plural: str = ""
    """The noun of the metrics that count how many are open and have ended; "" for none."""


METRICS: dict[type[Stats], Metrics] = {
    ConnectionStats: Metrics(
        "aiordma_connection",
        counters={
            "messages_sent": "Messages that were posted.",
            "bytes_sent": "Bytes of the messages that were posted.",
            "messages_received": "Messages that arrived.",
            "bytes_received": "Bytes of the messages that arrived.",
            "reads": "RDMA READs that were posted.",
            "bytes_read": "Bytes of the RDMA READs.",
            "writes": "RDMA WRITEs that were posted.",
            "bytes_written": "Bytes of the RDMA WRITEs.",
            "atomics": "Atomic operations that were posted.",
            "send_waits": "Waits of tasks for a send credit or an RD/atomic credit.",
            "recv_waits": "Waits of tasks for a message.",
            "spilled": "Messages that were copied out of the receive buffers for a slow reader.",
        },
        gauges={
            "sends_posted": "Requests in send queues whose completion has not been reported.",
            "receives_posted": "Receive buffers that are posted for new messages.",
            "messages_unread": "Messages that have arrived, and that no task has taken.",
            "messages_held": "Messages of recv_message() that are not released.",
        },
        plural="connections",
    ),
    MessageStreamStats: Metrics(
        "aiordma_message_stream",
        counters={
            "messages_sent": "Messages whose last part was posted.",
            "bytes_sent": "Bytes of the messages that were posted.",
            "messages_received": "Messages that a task has received.",
            "bytes_received": "Bytes of the messages that a task has received.",
            "bytes_copied": "Bytes that were copied, of small messages and by recv().",
        },
        gauges={
            "messages_queued": "Messages that wait to be posted.",
            "messages_announced": "Large messages that the peer has not read.",
            "messages_unread": "Messages that have arrived, and that no task has received.",
            "bytes_pooled": "Registered memory that is kept for the messages to come.",
        },
        plural="message_streams",
    ),
    StreamStats: Metrics(
        "aiordma_stream",
        counters={
            "bytes_sent": "Bytes that were posted.",
            "bytes_received": "Bytes that arrived.",
            "bytes_written": "Bytes of iowrite().",
            "send_waits": "Waits of tasks for room in the peer's buffer or in send_buffer.",
            "receive_waits": "Waits of tasks for bytes.",
        },
        gauges={
            "sends_posted": "Requests in send queues whose completion has not been reported.",
            "bytes_unread": "Bytes that have arrived, and that no task has taken.",
        },
        plural="streams",
    ),
    ListenerStats: Metrics(
        "aiordma_listener",
        counters={
            "accepted": "Connections that were established.",
            "failed": "Handshakes that failed: the peer gave up, did not confirm, or broke a rule.",
            "dropped": "Handshakes that were ended for a new request.",
            "rejected": "Requests that were rejected because of the backlog or max_connections.",
        },
        gauges={
            "requests_waiting": "Requests that no task has taken.",
            "handshakes": "Requests that were accepted, and whose peer has not confirmed.",
            "connections": "Requests that were taken, and connections that exist.",
        },
    ),
}
