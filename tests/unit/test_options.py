"""ConnectionOptions: their defaults and ranges, and the limits of devices and transports."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from aiordma import ConnectionOptions, PortSpace
from aiordma.options import _RANGES, PrivateDataLimits, check_private_data
from aiordma.verbs import Device, DeviceAttributes

INFINIBAND = PrivateDataLimits(connect=56, accept=196, reject=148)
IWARP = PrivateDataLimits(connect=251, accept=251, reject=251)


options_with: Any = ConnectionOptions  # of values that can have wrong types


def test_the_defaults_are_allowed() -> None:
    options = ConnectionOptions()
    assert (options.send_depth, options.recv_depth, options.max_message_size) == (64, 32, 16384)
    assert (options.max_sge, options.recv_backlog, options.shared_recv_depth) == (4, 1024, 0)
    assert (options.busy_poll, options.port_space) == (0.0, PortSpace.TCP)
    assert (options.tos, options.ack_timeout) == (None, None)  # the system's defaults


@pytest.mark.parametrize(("name", "low", "high"), _RANGES)
def test_a_value_out_of_its_range_is_refused(name: str, low: float, high: float) -> None:
    for value in (low, high):
        assert getattr(options_with(**{name: value}), name) == value
    for value in (low - 0.5, low - 1, high + 0.5, high + 1, float("nan")):
        with pytest.raises(ValueError, match=f"^{name} is {value}, not between {low} and {high}$"):
            options_with(**{name: value})
    replacement: dict[str, Any] = {name: high + 1}
    with pytest.raises(ValueError, match=f"^{name} is "):
        dataclasses.replace(ConnectionOptions(), **replacement)


def test_every_number_has_a_range() -> None:
    numbers = {field.name for field in dataclasses.fields(ConnectionOptions)}
    ranges = {name: (low, high) for name, low, high in _RANGES}
    assert numbers - ranges.keys() == {
        "reuse_address",
        "adaptive_poll",
        "port_space",
        "own_protection_domain",
    }
    assert (ranges["max_sge"], ranges["recv_backlog"]) == ((1, 1 << 10), (1, 1 << 30))
    assert (ranges["shared_recv_depth"], ranges["busy_poll"]) == ((0, 1 << 20), (0, 10))


@pytest.mark.parametrize("name", ["recv_depth", "shared_recv_depth"])
@pytest.mark.parametrize(("depth", "size"), [(1 << 20, 1 << 20), (1 << 11, 1 << 29)])
def test_the_size_of_the_receive_ring_is_limited(name: str, depth: int, size: int) -> None:
    # There is no ring for sends: send_depth does not count.
    values = {"send_depth": 1 << 20, "recv_depth": 1, "max_message_size": size, name: depth}
    assert getattr(options_with(**values), name) * size == 1 << 40
    values |= {"max_message_size": 2 * size, name: depth // 2 + 1}
    with pytest.raises(ValueError, match=f"{name} times max_message_size is over {1 << 40}"):
        options_with(**values)


@pytest.mark.parametrize("space", [PortSpace.UDP, PortSpace.IPOIB])
def test_only_the_port_spaces_tcp_and_ib_are_allowed(space: PortSpace) -> None:
    with pytest.raises(ValueError, match="port space TCP or IB"):
        ConnectionOptions(port_space=space)
    assert ConnectionOptions(port_space=PortSpace.IB).port_space is PortSpace.IB


def test_options_are_values() -> None:
    options = ConnectionOptions(send_depth=8)
    assert options == ConnectionOptions(send_depth=8) != ConnectionOptions()
    assert hash(options) == hash(ConnectionOptions(send_depth=8))
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.send_depth = 9  # type: ignore[misc]


@pytest.mark.parametrize(("iwarp", "limits"), [(False, INFINIBAND), (True, IWARP)])
def test_private_data_has_the_limits_of_the_transport(
    iwarp: bool, limits: PrivateDataLimits
) -> None:
    device = object.__new__(Device)
    device.is_iwarp = iwarp
    assert PrivateDataLimits.of(device) == limits


@pytest.mark.parametrize("limit", [0, 56, 251])
def test_private_data_up_to_the_limit_is_allowed(limit: int) -> None:
    check_private_data(bytes(limit), limit)
    with pytest.raises(ValueError, match=f"{limit + 1} bytes; at most {limit}"):
        check_private_data(bytes(limit + 1), limit)


LIMITS: dict[str, Any] = {"max_qp_wr": 100, "max_sge": 8, "max_cqe": 1000, "max_mr_size": 1}
LIMITS |= {"max_qp_rd_atom": 1, "max_qp_init_rd_atom": 1}


class SmallDevice:
    name = "small0"
    attributes = DeviceAttributes(**LIMITS)

    def max_message_size(self, port_num: int) -> int:
        return {1: 20000}[port_num]


@pytest.mark.parametrize(
    ("name", "limit", "error"),
    [
        ("send_depth", 100, "small0 allows .* 100"),
        ("recv_depth", 100, "small0 allows .* 100"),
        ("max_message_size", 20000, "^small0 allows a max_message_size of 20000$"),
        ("max_sge", 8, "^small0 allows a max_sge of 8$"),
        ("shared_recv_depth", 200, "^small0 allows a shared_recv_depth of 200$"),
        ("shared_recv_depth", 0, "^small0 allows a shared_recv_depth of 0$"),
    ],
)
def test_more_than_a_limit_of_the_device_is_refused(name: str, limit: int, error: str) -> None:
    device: Any = SmallDevice()
    if name == "shared_recv_depth":
        device.attributes = dataclasses.replace(device.attributes, max_srq_wr=limit)
    options_with(**{name: limit}).check_device(device, 1)
    with pytest.raises(ValueError, match=error):
        options_with(**{name: limit + 1}).check_device(device, 1)


def test_shared_receives_have_no_domain_of_their_own() -> None:
    with pytest.raises(ValueError, match="either own_protection_domain or shared_recv_depth"):
        ConnectionOptions(own_protection_domain=True, shared_recv_depth=8)
