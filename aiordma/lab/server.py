"""The thread that serves a lab: it runs the virtual machines and connects commands with callers.

A caller is a process that runs a command in the lab: `aiordma lab run` itself, `aiordma lab exec`
on this machine, or a process in a node. The server passes on the frames of each session (see
frames.py), and performs the requests of callers: power, cables and the wires between the nodes.
"""

import marshal
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence

from . import frames
from .caller import CallerSocket
from .node import Done, Node, NodeOptions
from .sockets import SOCKET_PREFIX, FrameSocket, Handler, peer_user
from .wire import Wire

__all__ = ["Server"]


class _Caller:
    """A caller, which runs one command or makes one request.

    It is on this machine, or it is a session of a node.
    """

    def __init__(self, send: Callable[[int, bytes], None]) -> None:
        self.send = send
        self.command: tuple[Node, int] | None = None  # its command's node and session
        self.is_gone = False

    def fail(self, reason: str) -> None:
        """Send a reason: a sentence and, in a second line, the path of a log if there is one."""
        self.send(frames.FAILED, reason.encode())


class Server:
    """A lab that runs during the `with` block, in a thread of its own. `lab_id` is its id.

    `caller` is the socket of the first caller. The lab ends when that caller closes it.
    """

    def __init__(self, lab_id: str, nodes: Sequence[NodeOptions]) -> None:
        self._selector = selectors.DefaultSelector()
        drivers = {device.driver for node in nodes for device in node.devices if device.mac}
        self._wires = {driver: Wire(self._selector) for driver in drivers}
        self._nodes = {
            options.name: Node(
                options, self._selector, self._wires, self._on_node_frame, self._on_node_off
            )
            for options in nodes
        }
        self._commands: dict[tuple[str, int], _Caller] = {}
        self._callers: dict[tuple[str, int], _Caller] = {}  # those in nodes
        self._booting = len(nodes)
        self._held_back: list[Callable[[], None]] = []
        self._boot_failure: str | None = None
        self._is_running = True
        ours, first = socket.socketpair()
        self.caller = CallerSocket(ours)
        self._add_caller(first, self._stop)
        self._listener = self._listen(lab_id)
        self._thread = threading.Thread(target=self._run, name="aiordma-lab")

    def __enter__(self) -> "Server":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.caller.close()
        self._thread.join()

    def _run(self) -> None:
        try:
            for node in self._nodes.values():
                node.power_on(self._on_first_boot)
            while self._is_running:
                self._wait()
        finally:
            for node in self._nodes.values():
                node.power_off("the lab has ended")
            for key in list(self._selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]
            self._selector.close()

    def _wait(self) -> None:
        """Wait for events, or for a node's deadline, and process them."""
        deadline = min(node.deadline for node in self._nodes.values())
        timeout = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
        for key, events in self._selector.select(timeout):
            handler: Handler = key.data
            handler(events)
        for node in self._nodes.values():
            node.check_deadline()

    def _stop(self) -> None:
        self._is_running = False

    # Callers on this machine.

    def _listen(self, lab_id: str) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"{SOCKET_PREFIX}{lab_id}")
        listener.listen(64)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        return listener

    def _accept(self, events: int) -> None:
        """Accept a process of this user, or of root."""
        connection, _ = self._listener.accept()
        if peer_user(connection) in (0, os.getuid()):
            self._add_caller(connection, lambda: None)
        else:
            connection.close()

    def _add_caller(self, connection: socket.socket, on_end: Callable[[], None]) -> None:
        def on_frame(sender: FrameSocket, kind: int, session: int, data: bytes) -> None:
            self._on_caller_frame(caller, kind, data)

        def on_closed(sender: FrameSocket) -> None:
            self._hang_up(caller)
            on_end()

        channel = FrameSocket(self._selector, connection, on_frame, on_closed)
        caller = _Caller(channel.send)

    # Sessions.

    def _on_node_frame(self, node: Node, kind: int, session: int, data: bytes) -> None:
        key = (node.name, session)
        if session % 2:  # of a caller in the node
            caller = self._callers.get(key)
            if kind == frames.HANGUP:
                if caller is not None:
                    self._hang_up(self._callers.pop(key))
                return
            if caller is None:
                caller = self._callers[key] = _Caller(
                    lambda kind, data: node.send(kind, data, session)
                )
            self._on_caller_frame(caller, kind, data)
        elif key in self._commands:
            caller = self._commands[key]
            if kind == frames.EXIT:
                del self._commands[key]
                caller.command = None
            caller.send(kind, data)

    def _on_caller_frame(self, caller: _Caller, kind: int, data: bytes) -> None:
        if kind == frames.OPEN:
            name, content = marshal.loads(data)
            self._when_booted(caller, lambda: self._open(caller, name, content))
        elif kind == frames.REQUEST:
            action, *arguments = marshal.loads(data)
            self._when_booted(caller, lambda: self._perform(caller, action, arguments))
        elif caller.command is not None:
            node, session = caller.command
            node.send(kind, data, session)

    def _open(self, caller: _Caller, name: str, content: bytes) -> None:
        """Start a command for a caller."""
        if caller.is_gone:
            return
        node = self._nodes.get(name)
        if node is None or node.state != "up":
            caller.fail(f"{name} is {node.state}" if node else self._unknown(name))
            return
        session = node.start(content)
        caller.command = node, session
        self._commands[node.name, session] = caller

    def _hang_up(self, caller: _Caller) -> None:
        """Kill the command of a caller that is gone."""
        caller.is_gone = True
        if caller.command is not None:
            node, session = caller.command
            self._commands.pop((node.name, session), None)
            node.send(frames.HANGUP, b"", session)

    def _on_node_off(self, node: Node, reason: str) -> None:
        """Tell the callers of commands on a node why it has ended, and forget its own callers."""
        for key in [key for key in self._callers if key[0] == node.name]:
            self._hang_up(self._callers.pop(key))
        for key in [key for key in self._commands if key[0] == node.name]:
            caller = self._commands.pop(key)
            caller.command = None
            caller.fail(reason)

    # The first boot.

    def _on_first_boot(self, reason: str | None) -> None:
        self._booting -= 1
        self._boot_failure = self._boot_failure or reason
        if self._booting == 0 or self._boot_failure:
            held_back, self._held_back = self._held_back, []
            for call in held_back:
                call()

    def _when_booted(self, caller: _Caller, call: Callable[[], None]) -> None:
        """Call once all nodes are up. If one fails, send the reason to the caller."""

        def checked() -> None:
            if self._boot_failure is not None:
                caller.fail(self._boot_failure)
            else:
                call()

        if self._booting and self._boot_failure is None:
            self._held_back.append(checked)
        else:
            checked()

    # Requests.

    def _perform(self, caller: _Caller, action: str, arguments: list[str]) -> None:
        """Perform a request, and send the result to the caller."""

        def done(reason: str | None) -> None:
            if reason is None:
                caller.send(frames.RESULT, marshal.dumps(None))
            else:
                caller.fail(reason)

        if action == "nodes":
            caller.send(frames.RESULT, marshal.dumps(self._describe_nodes()))
            return
        if unknown := next((name for name in arguments[:1] if name not in self._nodes), None):
            done(self._unknown(unknown))
            return
        node = self._nodes[arguments[0]]
        if action == "power-on":
            node.power_on(done)
        elif action == "power-off":
            node.power_off(f"the power of {node.name} was cut")
            done(None)
        elif action in ("plug", "pull"):
            self._set_cables(node, arguments[1], action == "plug", done)
        elif action in ("block", "unblock") and arguments[1] in self._nodes:
            for wire in self._wires.values():
                change = wire.block if action == "block" else wire.unblock
                change(node.name, arguments[1])
            done(None)
        else:
            done(f"the lab has no action {' '.join((action, *arguments))}")

    def _set_cables(self, node: Node, driver: str, plugged: bool, done: Done) -> None:
        """Plug the cables of a node in, or pull them. `driver`: "rxe", "siw" or "all"."""
        wired = [device for device in node.devices if device.mac]
        devices = [device for device in wired if driver in (device.driver, "all")]
        if not devices:
            done(f"{node.name} has no cable of {driver}")
            return
        *first, last = devices
        for device in first:
            node.set_cable(device, plugged, lambda reason: None)
        node.set_cable(last, plugged, done)  # the monitor performs commands in order

    def _unknown(self, name: str) -> str:
        return f"the lab has no node {name}: its nodes are {', '.join(self._nodes)}"

    def _describe_nodes(self) -> list[dict[str, str]]:
        """Return name, state and addresses of each node."""
        return [
            {
                "name": node.name,
                "state": node.state,
                **{device.driver: device.ipv4 for device in node.devices},
                **{f"{device.driver}6": device.ipv6 for device in node.devices},
            }
            for node in self._nodes.values()
        ]
