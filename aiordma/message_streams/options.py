"""MessageOptions: the options of message streams."""

from __future__ import annotations

from dataclasses import dataclass, replace

from aiordma.message_streams.protocol import slots_needed
from aiordma.message_streams.wire import EAGER_OVERHEAD, MAX_WINDOW, MIN_SLOT_SIZE, Hello
from aiordma.options import DEFAULT_OPTIONS as DEFAULT_CONNECTION_OPTIONS
from aiordma.options import ConnectionOptions, check_ranges


@dataclass(frozen=True, kw_only=True)
class MessageOptions:
    """Options for connect_messages() and listen_messages(). Sizes are in bytes.

    Each side chooses its own options, and tells the peer its limits when they connect.

    Raises:
        ValueError: a value is out of range.
    """

    window: int = 16
    """The number of small messages that can arrive before this side takes one. The peer waits
    before it sends more."""

    announcements: int = 8
    """The number of large messages that can be announced in a direction and not received yet. The
    smaller number of both sides applies."""

    slot_size: int = 4160
    """The size of a receive buffer. The smaller size of both sides is the limit of what is sent in
    one piece. A stream registers memory of the sum of `window`, `announcements` and 3, times this
    size. By default a message of `eager_limit` bytes fits into it, in up to 7 frames."""

    eager_limit: int = 4096
    """Messages of up to this size are copied and sent at once, if they fit into a receive buffer of
    the peer. Larger ones are announced, and the peer reads them without a copy."""

    max_frames: int = 1 << 16
    """The largest number of frames in a message of the peer."""

    max_nbytes: int = 1 << 40
    """The size of the largest message of the peer, all frames together."""

    max_pooled: int = 1 << 28
    """The memory that stays registered for the messages to come that recv() and recv_message()
    receive. It is released when no message has used it for 10 to 20 seconds. It is also the limit
    for messages that are read before a task asks for them."""

    connection: ConnectionOptions = DEFAULT_CONNECTION_OPTIONS
    """The options of the connection below. Its `recv_depth`, `max_message_size` and `recv_backlog`
    are replaced by the numbers that follow from these options. Its `max_inline` is the size of the
    largest message that is sent inline."""

    def __post_init__(self) -> None:
        check_ranges(self, _RANGES)
        if self.connection.shared_recv_depth:
            raise ValueError("message streams have receive buffers of their own")
        if not self.connection.initiator_depth or not self.connection.responder_resources:
            raise ValueError("large messages need initiator_depth and responder_resources")

    def hello(self) -> Hello:
        """Return the limits of this side, for the peer."""
        return Hello(
            self.window, self.announcements, self.slot_size, self.max_frames, self.max_nbytes
        )

    def connection_options(self) -> ConnectionOptions:
        """Return the options of the connection below."""
        slots = slots_needed(self.hello())
        return replace(
            self.connection,
            recv_depth=slots,
            max_message_size=self.slot_size,
            max_inline=self.connection.max_inline + EAGER_OVERHEAD,
            recv_backlog=max(slots, self.connection.recv_backlog),
        )


_RANGES = (
    ("window", 1, MAX_WINDOW),
    ("announcements", 1, MAX_WINDOW),
    ("slot_size", MIN_SLOT_SIZE, 1 << 20),
    ("eager_limit", 0, 1 << 20),
    ("max_frames", 1, (1 << 32) - 1),
    ("max_nbytes", 1, (1 << 63) - 1),
    ("max_pooled", 0, 1 << 62),
)

DEFAULT_OPTIONS = MessageOptions()
