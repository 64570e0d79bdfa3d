"""The options of the streams under the comms: those of distributed's configuration."""

from __future__ import annotations

import dask
from dask.utils import parse_bytes, parse_timedelta

from aiordma.message_streams.options import MessageOptions
from aiordma.options import ConnectionOptions

SECTION = "distributed.comm.rdma"
"""The section of the configuration. Its keys are those of DEFAULTS."""

DEFAULTS = {"window": 4, "announcements": 2, "slot-size": "4 KiB"}
"""See MessageOptions. Each comm has `window` + `announcements` + 3 receive buffers of `slot-size`.

The scheduler has an idle comm with each worker and each client, and workers have some with each
other, so they are small and few. Of the messages that carry no data, more than nine of ten fit into
a receive buffer, and nearly all others into four."""

MAX_FRAMES = 1 << 24


def message_options() -> MessageOptions:
    """Return the options for the configuration of this moment.

    `distributed.comm.timeouts.tcp` is the time until a silent peer counts as dead.

    Raises:
        ValueError: a value of the configuration is out of range.
    """
    values = {
        key: dask.config.get(f"{SECTION}.{key}", default) for key, default in DEFAULTS.items()
    }
    timeout = float(parse_timedelta(dask.config.get("distributed.comm.timeouts.tcp")))
    return MessageOptions(
        window=int(values["window"]),
        announcements=int(values["announcements"]),
        slot_size=parse_bytes(values["slot-size"]),
        max_frames=MAX_FRAMES,
        connection=ConnectionOptions(
            # The loop's thread shares the interpreter with the threads that compute.
            adaptive_poll=False,
            keepalive=timeout / 3,
            peer_timeout=timeout * 2 / 3,
            close_timeout=timeout,
        ),
    )
