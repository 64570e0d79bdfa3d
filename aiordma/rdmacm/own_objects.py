"""The objects that librdmacm made for an id, such as completion queues, and their destruction."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from aiordma._native import ffi, lib
from aiordma.errors import VerbsError, check, check_errno
from aiordma.verbs import Completion, QueuePair, SharedReceiveQueue

if TYPE_CHECKING:
    from aiordma._native._lib import CmIdPtr, IbvCompChannel, IbvCq


class OwnQueue:
    """A completion queue that `create_qp` made for an id, and its completion channel.

    Valid until the id is destroyed, or until OwnObjects.destroy().
    """

    __slots__ = ("_channel", "_cq", "fd")

    def __init__(self, cq: IbvCq, channel: IbvCompChannel) -> None:
        """Wrap both pointers of the id, and make the channel's fd non-blocking.

        Raises:
            ValueError: the id has no such queue.
        """
        if cq == ffi.NULL or channel == ffi.NULL:
            raise ValueError("the id has no completion queue of its own for this direction")
        self._cq = cq
        self._channel = channel
        self.fd = channel.fd
        check(lib.aiordma_set_nonblocking(self.fd), "fcntl")

    def poll(self) -> Completion | None:
        """Return the next completion; None if the queue is empty: ibv_poll_cq(3). Does not block.

        Raises:
            VerbsError: the queue overran, or the device was removed.
        """
        wc = ffi.new("struct ibv_wc *")
        count = lib.ibv_poll_cq(self._cq, 1, wc)
        if count < 0:
            raise VerbsError(abs(count), "ibv_poll_cq")
        return Completion.read(wc) if count else None

    def arm(self) -> None:
        """Arm the queue: the next completion makes the fd readable. Poll once more after this.

        See ibv_req_notify_cq(3).
        """
        check_errno(lib.ibv_req_notify_cq(self._cq, 0), "ibv_req_notify_cq")

    def read_event(self) -> None:
        """Read and acknowledge a completion event: ibv_get_cq_event(3). Does not block.

        Raises:
            VerbsError: EIO after the device was removed.
        """
        error = lib.aiordma_comp_event(self._channel, ffi.NULL)
        if error not in (0, errno.EAGAIN):
            raise VerbsError(error, "ibv_get_cq_event")


class OwnObjects:
    """The queue pair, queues and channels of an id, which outlive the id and are destroyed later.

    The id is destroyed before its queue pair, in the reverse of the order in the man page. After
    that, no rdma_get_cm_event() can be using the queue pair.
    """

    __slots__ = ("_channels", "_cqs", "_srq", "qp")

    def __init__(
        self, pointer: CmIdPtr, qp: QueuePair | None, srq: SharedReceiveQueue | None
    ) -> None:
        self.qp = qp
        self._srq = srq
        # Both directions can have the same queue. Then it is destroyed once.
        self._cqs = list(dict.fromkeys([pointer.recv_cq, pointer.send_cq]))
        self._channels = list(dict.fromkeys([pointer.recv_cq_channel, pointer.send_cq_channel]))

    def destroy(self) -> None:
        """Destroy the queue pair, then the queues. After that the device uses its memory no more.

        Raises:
            VerbsError: the queue pair could not be destroyed, so nothing else was destroyed.
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
