"""Route: the route to the peer that librdmacm has resolved."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiordma.verbs.address_handle import read_gid

if TYPE_CHECKING:
    from aiordma._native._lib import CmRoute, SaPathRec


@dataclass(frozen=True, slots=True)
class PathRecord:
    """`struct ibv_sa_path_rec`: one path, as the subnet administrator describes it."""

    dgid: bytes
    sgid: bytes
    dlid: int
    slid: int
    raw_traffic: bool
    flow_label: int
    hop_limit: int
    traffic_class: int
    reversible: bool
    numb_path: int
    pkey: int
    sl: int
    mtu_selector: int
    mtu: int
    rate_selector: int
    rate: int
    packet_life_time_selector: int
    packet_life_time: int
    preference: int

    @classmethod
    def read(cls, record: SaPathRec) -> PathRecord:
        """Return the value of a C struct."""
        return cls(
            dgid=read_gid(record.dgid),
            sgid=read_gid(record.sgid),
            dlid=socket.ntohs(record.dlid),
            slid=socket.ntohs(record.slid),
            raw_traffic=bool(record.raw_traffic),
            flow_label=socket.ntohl(record.flow_label),
            hop_limit=record.hop_limit,
            traffic_class=record.traffic_class,
            reversible=bool(record.reversible),
            numb_path=record.numb_path,
            pkey=socket.ntohs(record.pkey),
            sl=record.sl,
            mtu_selector=record.mtu_selector,
            mtu=record.mtu,
            rate_selector=record.rate_selector,
            rate=record.rate,
            packet_life_time_selector=record.packet_life_time_selector,
            packet_life_time=record.packet_life_time,
            preference=record.preference,
        )


# struct ibv_path_data: flags, reserved, then struct ibv_path_record. All but the flags are in
# network byte order.
_FLAGS = struct.Struct("=II")
_RECORD = struct.Struct(">Q16s16sHHIBBHHBBBB6x")
_PRIMARY_BOTH_WAYS = 0x01 | 0x02 | 0x08 | 0x20  # GMP, PRIMARY, OUTBOUND, INBOUND_REVERSE


def pack_path_data(paths: Sequence[PathRecord]) -> bytes:
    """Return an array of `struct ibv_path_data`, as the option `IbOption.PATH` takes it."""
    return b"".join(_FLAGS.pack(_PRIMARY_BOTH_WAYS, 0) + _pack_record(path) for path in paths)


def _pack_record(path: PathRecord) -> bytes:
    return _RECORD.pack(
        0,
        path.dgid,
        path.sgid,
        path.dlid,
        path.slid,
        path.flow_label << 8 | path.hop_limit,
        path.traffic_class,
        path.reversible << 7 | path.numb_path,
        path.pkey,
        path.sl,
        path.mtu_selector << 6 | path.mtu,
        path.rate_selector << 6 | path.rate,
        path.packet_life_time_selector << 6 | path.packet_life_time,
        path.preference,
    )


@dataclass(frozen=True, slots=True)
class Route:
    """`struct rdma_route` without the socket addresses, which are properties of the id.

    `sgid`, `dgid` and `pkey` are its `struct rdma_ib_addr`; `paths` is `path_rec`.
    """

    sgid: bytes
    dgid: bytes
    pkey: int
    paths: tuple[PathRecord, ...]

    @classmethod
    def read(cls, route: CmRoute) -> Route:
        """Return the value of a C struct."""
        ib = route.addr.addr.ibaddr
        paths = tuple(PathRecord.read(route.path_rec[index]) for index in range(route.num_paths))
        return cls(read_gid(ib.sgid), read_gid(ib.dgid), socket.ntohs(ib.pkey), paths)
