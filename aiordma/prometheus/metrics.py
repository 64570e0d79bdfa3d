"""The metrics of each kind of `stats`: names, types, and help texts."""

from __future__ import annotations

from dataclasses import dataclass

from aiordma.cm.handshakes import ListenerStats
from aiordma.qp.stats import ConnectionStats

Stats = ConnectionStats | ListenerStats


@dataclass(frozen=True)
class Metrics:
    """The fields of a class of stats that are counters or gauges, each with its help text."""

    prefix: str
    counters: dict[str, str]
    gauges: dict[str, str]


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
