"""What librdmacm made for an id: its own completion queues; and how all of it is destroyed."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from aiordma._native import ffi, lib
from aiordma.errors import VerbsError, check, check_errno
from aiordma.verbs import Completion, QueuePair, SharedReceiveQueue

if TYPE_CHECKING:
    from aiordma._native._lib import CmIdPtr, IbvCompChannel, IbvCq


class OwnQueue:
    """One of the completion queues that `create_qp` made for an id, with a channel of its own.

    Valid while the id lives, or until OwnObjects.destroy().
    """

    __slots__ = ("_channel", "_cq", "fd")

    def __init__(self, cq: IbvCq, channel: IbvCompChannel) -> None:
        """Take both from the id, and make the channel's fd non-blocking.

        Raises:
            ValueError: the id has no such queue.
        """
        if cq == ffi.NULL or channel == ffi.NULL:
            raise ValueError("the id has no completion queue of its own there")
        self._cq = cq
        self._channel = channel
        self.fd = channel.fd
        check(lib.aiordma_set_nonblocking(self.fd), "fcntl")

    def poll(self) -> Completion | None:
        """The next completion, if there is one: ibv_poll_cq(3). Does not block.

        Raises:
            VerbsError: the queue overran, or the device is gone.
        """
        wc = ffi.new("struct ibv_wc *")
        count = lib.ibv_poll_cq(self._cq, 1, wc)
        if count < 0:
            raise VerbsError(abs(count), "ibv_poll_cq")
        return Completion.read(wc) if count else None

    def arm(self) -> None:
        """Have the next completion make the fd readable; poll() once more after this.

        See ibv_req_notify_cq(3).
        """
        check_errno(lib.ibv_req_notify_cq(self._cq, 0), "ibv_req_notify_cq")

    def read_event(self) -> None:
        """Read what made the fd readable, acknowledged: ibv_get_cq_event(3). Does not block.

        Raises:
            VerbsError: EIO after the device was removed.
        """
        error = lib.aiordma_comp_event(self._channel)
        if error not in (0, errno.EAGAIN):
            raise VerbsError(error, "ibv_get_cq_event")


class OwnObjects:
    """The queue pair, queues and channels of an id, so that they can outlive it, and be destroyed.

    The id is destroyed before its queue pair here, the reverse of what the man page says:
    afterwards no rdma_get_cm_event() can be at work on that queue pair.
    """

    __slots__ = ("_channels", "_cqs", "_srq", "qp")

    def __init__(
        self, pointer: CmIdPtr, qp: QueuePair | None, srq: SharedReceiveQueue | None
    ) -> None:
        self.qp = qp
        self._srq = srq
        # librdmacm may have made one queue for both directions.
        self._cqs = list(dict.fromkeys([pointer.recv_cq, pointer.send_cq]))
        self._channels = list(dict.fromkeys([pointer.recv_cq_channel, pointer.send_cq_channel]))

    def destroy(self) -> None:
        """Destroy the queue pair, then the queues. Its memory is the device's no more then.

        Raises:
            VerbsError: the queue pair could not be destroyed, and so nothing else was.
        """
        if self.qp is not None:
            self.qp.destroy()
        if self._srq is not None:
            self._srq.close()
        for cq in self._cqs:
            if cq != ffi.NULL:
                check_errno(lib.ibv_destroy_cq(cq), "ibv_destroy_cq")
        for channel in self._channels:
            if channel != ffi.NULL:
                check_errno(lib.ibv_destroy_comp_channel(channel), "ibv_destroy_comp_channel")
