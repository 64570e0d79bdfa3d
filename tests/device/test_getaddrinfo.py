"""getaddrinfo(), which is rdma_getaddrinfo(3), and endpoints created from its results."""

from __future__ import annotations

import socket

import pytest

import aiordma
from aiordma import AddressError, AddrInfo, PortSpace, SyncCmId
from aiordma.cm import CmState
from aiordma.enums import AddrInfoFlags, QpType
from aiordma.rdmacm import DeviceAddress, parse_address


async def test_a_numeric_host_gives_its_address(any_address: DeviceAddress) -> None:
    [info] = await aiordma.getaddrinfo(any_address.host, 7471)
    assert info.destination == parse_address(any_address.host, 7471)
    assert info.port_space is PortSpace.TCP
    assert info.qp_type is QpType.RC
    assert not info.is_passive


async def test_the_passive_flag_gives_a_source_address(any_address: DeviceAddress) -> None:
    hints = AddrInfo(flags=AddrInfoFlags.PASSIVE)
    [info] = await aiordma.getaddrinfo(any_address.host, "7471", hints)
    assert info.is_passive
    assert info.source == parse_address(any_address.host, 7471)
    assert info.destination is None


async def test_the_passive_flag_without_a_host_gives_a_source_address(
    address: DeviceAddress,
) -> None:
    hints = AddrInfo(flags=AddrInfoFlags.PASSIVE, port_space=PortSpace.UDP)
    [info] = await aiordma.getaddrinfo(None, 7471, hints)
    assert info.source is not None
    assert info.source.port == 7471
    assert info.qp_type is QpType.UD


async def test_hints_are_applied(address: DeviceAddress) -> None:
    hints = AddrInfo(
        flags=AddrInfoFlags.NUMERICHOST | AddrInfoFlags.FAMILY | AddrInfoFlags.NOROUTE,
        family=socket.AF_INET,
        source=parse_address(address.host),
    )
    [info] = await aiordma.getaddrinfo(address.host, 7471, hints)
    assert info.source == parse_address(address.host)
    assert info.family == socket.AF_INET
    with pytest.raises(AddressError):
        await aiordma.getaddrinfo("a-name.example", 7471, hints)


async def test_unknown_names_and_services_fail(address: DeviceAddress) -> None:
    with pytest.raises(AddressError, match="no-such-name"):
        await aiordma.getaddrinfo("no-such-name.invalid", 7471)
    with pytest.raises(AddressError, match="no-such-service"):
        await aiordma.getaddrinfo(address.host, "no-such-service")
    with pytest.raises(ValueError, match="a node or a service is needed"):
        await aiordma.getaddrinfo(None)


async def test_endpoints_can_be_created_from_its_results(any_address: DeviceAddress) -> None:
    hints = AddrInfo(flags=AddrInfoFlags.PASSIVE)
    [here] = await aiordma.getaddrinfo(any_address.host, 7499, hints)
    async with await SyncCmId.create_ep(here) as listener:
        assert listener.state is CmState.ADDR_BOUND
        listener.listen()
        [there] = await aiordma.getaddrinfo(any_address.host, 7499)
        async with await SyncCmId.create_ep(there) as endpoint:
            assert endpoint.state is CmState.ROUTE_RESOLVED
            assert endpoint.peer_address[1] == 7499
