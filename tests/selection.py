"""The choice of the combinations of loop and device on which each test runs.

A test can run on several loops, and on several devices. Few failures depend on the combination. So
a test runs once, and the tests of one file share out the combinations: each test function gets the
combination that was used least in its file so far. A file tests one feature. So each feature meets
each loop on each transport, as far as its tests can run there: if a file has fewer functions than
combinations, its functions get several. The addresses of a device are shared out in the same way.

With `--all-combinations`, each test runs on each of its combinations, at each address.

The arguments of a test say what it runs on:

    address         a device, at its first address
    any_address     a device, at any of its addresses
    simulation      two simulated devices: see tests/simulator
    loop_kind       a loop; the hooks of every_loop.py give it to each coroutine

The markers `loops`, `transport` and `soft_device` limit the choice. A test with the fixture
`device`, which changes the device, runs on soft devices only, too. With the plugin simulated.py,
the devices are simulated ones, the loops are asyncio and trio, and tests that are marked `real` are
left out.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Hashable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import loops
import machine
import pytest

SIMULATED_LOOPS = ("asyncio", "trio")
SIMULATED = {"IB": "roce", "IWARP": "iwarp"}


class Place(NamedTuple):
    """A device and an address of it, as the value of a parameter and its id."""

    device: str
    value: Any
    name: str


class Combination(NamedTuple):
    """A loop and a place. The loop is "" for a test that runs on none."""

    loop: str
    place: Place


NOWHERE = Place("", None, "")
NO_DEVICE = Place("", None, "no-device")


class Uses:
    """Counts the uses of each combination in one file."""

    def __init__(self, functions: int) -> None:
        self._functions = functions
        """The number of test functions in the file."""
        self._pairs: Counter[tuple[str, str]] = Counter()
        self._places: Counter[Hashable] = Counter()

    def choose(self, kinds: Sequence[str], places: Sequence[Place]) -> list[Combination]:
        """Choose combinations for the next function of the file."""
        pairs = [
            (kind, device) for kind in kinds for device in {place.device: 0 for place in places}
        ]
        count = -(-len(pairs) // max(1, self._functions))
        chosen = []
        for _ in range(count):
            pair = min(pairs, key=self._pairs.__getitem__)
            pairs.remove(pair)
            self._pairs[pair] += 1
            candidates = [place for place in places if place.device == pair[1]]
            place = min(candidates, key=lambda place: self._places[place.name])
            self._places[place.name] += 1
            chosen.append(Combination(pair[0], place))
        return chosen


_files: dict[ModuleType, Uses] = {}
_done = pytest.StashKey[bool]()


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Parametrize a test function with its loop and its device. Do nothing the second time."""
    if _done in metafunc.definition.stash:
        return
    metafunc.definition.stash[_done] = True
    names = metafunc.fixturenames
    given = {
        name
        for mark in metafunc.definition.iter_markers("parametrize")
        for name in ([mark.args[0]] if isinstance(mark.args[0], str) else mark.args[0])
    }
    loop_name = "loop_kind" if "loop_kind" in names and "loop_kind" not in given else None
    place_name = next((n for n in ("address", "any_address", "simulation") if n in names), None)
    if loop_name is None and place_name is None:
        return
    kinds = [""] if loop_name is None else _loops(metafunc, place_name)
    places = [NOWHERE] if place_name is None else _places(metafunc, place_name)
    if metafunc.config.getoption("all_combinations", True):
        chosen = [Combination(kind, place) for kind in kinds for place in places]
    else:
        chosen = _uses_of(metafunc.module).choose(kinds, places)
    arguments = [name for name in (loop_name, place_name) if name is not None]
    values = [
        [value for name, value in ((loop_name, one.loop), (place_name, one.place.value)) if name]
        for one in chosen
    ]
    ids = ["-".join(part for part in (one.loop, one.place.name) if part) for one in chosen]
    indirect = [] if place_name is None else [place_name]
    metafunc.parametrize(arguments, values, ids=ids, indirect=indirect)


def _loops(metafunc: pytest.Metafunc, place_name: str | None) -> list[str]:
    is_simulated = place_name == "simulation" or machine.simulated is not None
    kinds = SIMULATED_LOOPS if is_simulated else loops.KINDS
    marker = metafunc.definition.get_closest_marker("loops")
    return [kind for kind in kinds if marker is None or kind in marker.args]


def _places(metafunc: pytest.Metafunc, place_name: str) -> list[Place]:
    marker = metafunc.definition.get_closest_marker("transport")
    if place_name == "simulation":
        names = [SIMULATED[marker.args[0]]] if marker is not None else list(SIMULATED.values())
        return [Place(name, name, name) for name in names]
    found = machine.one_per_device() if place_name == "address" else machine.found_addresses()
    if not found:
        return [NO_DEVICE]
    is_limited = "device" in metafunc.fixturenames or bool(
        metafunc.definition.get_closest_marker("soft_device")
    )
    return [
        Place(one.device, one, f"{one.device}-{machine.kind_of(one)}")
        for one in found
        if (marker is None or marker.args[0] == one.transport.name)
        and (not is_limited or machine.is_soft(one))
    ]


def _uses_of(module: ModuleType) -> Uses:
    """Return the counts of a file."""
    if module not in _files:
        functions = [
            thing
            for name, thing in vars(module).items()
            if name.startswith("test_") and inspect.isfunction(thing)
        ]
        _files[module] = Uses(len(functions))
    return _files[module]
