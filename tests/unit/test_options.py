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


def options_with(**values: Any) -> ConnectionOptions:
    """Return options with these values, which can be of wrong types."""
    return ConnectionOptions(**values)


def test_the_defaults_are_allowed() -> None:
    options = ConnectionOptions()
    assert (options.send_depth, options.recv_depth) == (64, 32)
    assert options.max_message_size == 16384
    assert options.port_space is PortSpace.TCP


@pytest.mark.parametrize(("name", "low", "high"), _RANGES)
def test_both_ends_of_a_range_are_allowed(name: str, low: float, high: float) -> None:
    for value in (low, high):
        assert getattr(options_with(**{name: value}), name) == value


@pytest.mark.parametrize(("name", "low", "high"), _RANGES)
def test_a_value_out_of_its_range_is_refused(name: str, low: float, high: float) -> None:
    for value in (low - 1, high + 1, float("nan")):
        with pytest.raises(ValueError, match=f"^{name} is {value}, not between {low} and {high}$"):
            options_with(**{name: value})


@pytest.mark.parametrize(("depth", "size"), [(1 << 20, 1 << 20), (1 << 10, 1 << 30)])
def test_the_size_of_the_receive_ring_is_limited(depth: int, size: int) -> None:
    # There is no ring for sends: send_depth does not count.
    options = ConnectionOptions(send_depth=1 << 20, recv_depth=depth, max_message_size=size)
    assert options.recv_depth * options.max_message_size == 1 << 40
    with pytest.raises(ValueError, match=f"recv_depth times max_message_size is over {1 << 40}"):
        dataclasses.replace(options, recv_depth=depth // 2 + 1, max_message_size=2 * size)


def test_every_number_has_a_range() -> None:
    numbers = {field.name for field in dataclasses.fields(ConnectionOptions)}
    assert numbers - {name for name, _, _ in _RANGES} == {
        "reuse_address",
        "adaptive_poll",
        "port_space",
    }


@pytest.mark.parametrize("name", ["tos", "ack_timeout"])
def test_none_is_allowed_and_means_the_default_of_the_system(name: str) -> None:
    assert getattr(options_with(**{name: None}), name) is None


@pytest.mark.parametrize("space", [PortSpace.UDP, PortSpace.IPOIB])
def test_only_the_port_spaces_tcp_and_ib_are_allowed(space: PortSpace) -> None:
    with pytest.raises(ValueError, match="port space TCP or IB"):
        ConnectionOptions(port_space=space)
    assert ConnectionOptions(port_space=PortSpace.IB).port_space is PortSpace.IB


def test_options_are_values() -> None:
    options = ConnectionOptions(send_depth=8)
    assert options == ConnectionOptions(send_depth=8)
    assert hash(options) == hash(ConnectionOptions(send_depth=8))
    assert options != ConnectionOptions()
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.send_depth = 9  # type: ignore[misc]


def test_a_replacement_is_checked_too() -> None:
    with pytest.raises(ValueError, match="retry_count"):
        dataclasses.replace(ConnectionOptions(), retry_count=8)


@pytest.mark.parametrize(("iwarp", "limits"), [(False, INFINIBAND), (True, IWARP)])
def test_private_data_has_the_limits_of_the_transport(
    iwarp: bool, limits: PrivateDataLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Device, "is_iwarp", iwarp)
    assert PrivateDataLimits.of(object.__new__(Device)) == limits


@pytest.mark.parametrize("limit", [0, 56, 251])
def test_private_data_up_to_the_limit_is_allowed(limit: int) -> None:
    check_private_data(bytes(limit), limit)
    with pytest.raises(ValueError, match=f"{limit + 1} bytes; at most {limit}"):
        check_private_data(bytes(limit + 1), limit)


class ShallowDevice:
    name = "shallow0"
    attributes = DeviceAttributes(
        max_qp_wr=100,
        max_sge=8,
        max_cqe=1000,
        max_mr_size=1,
        max_qp_rd_atom=1,
        max_qp_init_rd_atom=1,
    )


@pytest.mark.parametrize("name", ["send_depth", "recv_depth"])
def test_a_queue_deeper_than_the_device_allows_is_refused(name: str) -> None:
    options_with(**{name: 100}).check_device(ShallowDevice())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"shallow0 allows .* 100"):
        options_with(**{name: 101}).check_device(ShallowDevice())  # type: ignore[arg-type]


class SharingDevice(ShallowDevice):
    attributes = dataclasses.replace(ShallowDevice.attributes, max_srq_wr=200)


@pytest.mark.parametrize(("name", "limit"), [("max_sge", 8), ("shared_recv_depth", 200)])
def test_more_than_a_limit_of_the_device_is_refused(name: str, limit: int) -> None:
    options: dict[str, Any] = {name: limit}
    options_with(**options).check_device(SharingDevice())  # type: ignore[arg-type]
    options = {name: limit + 1}
    with pytest.raises(ValueError, match=f"^shallow0 allows a {name} of {limit}$"):
        options_with(**options).check_device(SharingDevice())  # type: ignore[arg-type]


def test_a_device_without_shared_receive_queues_allows_options_without_sharing() -> None:
    ConnectionOptions().check_device(ShallowDevice())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="shallow0 allows a shared_recv_depth of 0"):
        ConnectionOptions(shared_recv_depth=1).check_device(ShallowDevice())  # type: ignore[arg-type]


DATA_PATH_OPTIONS = {
    "max_sge": (4, 1, 1 << 10),
    "recv_backlog": (1024, 1, 1 << 30),
    "shared_recv_depth": (0, 0, 1 << 20),
    "busy_poll": (0.0, 0.0, 10.0),
}


@pytest.mark.parametrize(
    ("name", "default", "low", "high"), [(n, *r) for n, r in DATA_PATH_OPTIONS.items()]
)
def test_data_path_options_have_their_defaults_and_ranges(
    name: str, default: float, low: float, high: float
) -> None:
    assert getattr(ConnectionOptions(), name) == default
    for value in (low, high):
        options: dict[str, Any] = {name: value}
        assert getattr(options_with(**options), name) == value
    for value in (low - 0.5, high + 0.5):
        options = {name: value}
        with pytest.raises(ValueError, match=f"^{name} is "):
            options_with(**options)


@pytest.mark.parametrize(("depth", "size"), [(1 << 20, 1 << 20), (1 << 10, 1 << 30)])
def test_the_size_of_the_shared_receive_ring_is_limited(depth: int, size: int) -> None:
    options = ConnectionOptions(recv_depth=1, shared_recv_depth=depth, max_message_size=size)
    with pytest.raises(ValueError, match=r"shared_recv_depth times max_message_size is over"):
        dataclasses.replace(options, shared_recv_depth=depth // 2 + 1, max_message_size=2 * size)
