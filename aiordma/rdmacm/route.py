"""Route: the way to the peer as librdmacm has found it."""

from __future__ import annotations

import socket
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
        """The value of a C struct."""
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


@dataclass(frozen=True, slots=True)
class Route:
    """`struct rdma_route` but for the socket addresses, which are the id's own.

    `sgid`, `dgid` and `pkey` are its `struct rdma_ib_addr`; `paths` is `path_rec`.
    """

    sgid: bytes
    dgid: bytes
    pkey: int
    paths: tuple[PathRecord, ...]

    @classmethod
    def read(cls, route: CmRoute) -> Route:
        """The value of a C struct."""
        ib = route.addr.addr.ibaddr
        paths = tuple(PathRecord.read(route.path_rec[index]) for index in range(route.num_paths))
        return cls(read_gid(ib.sgid), read_gid(ib.dgid), socket.ntohs(ib.pkey), paths)
