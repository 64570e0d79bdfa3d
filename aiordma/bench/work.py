"""Work: what a pair of processes is to do; TESTS: what can be asked."""

from __future__ import annotations

import base64
import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Test:
    """What a test measures."""

    unit: str
    lower_is_better: bool
    question: str


TESTS = {
    "latency": Test("us", True, "a round trip"),
    "rate": Test("messages/s", False, "messages one way, one after another"),
    "bandwidth": Test("MB/s", False, "many operations at once"),
    "connections": Test("connections/s", False, "connections set up and torn down"),
    "idle": Test("KiB/connection", True, "memory of the server's process for idle connections"),
}
"""The tests by name, in the order in which they run. A megabyte is 10^6 bytes, a KiB 1024."""


@dataclass(frozen=True, slots=True)
class Work:
    """What the two processes of a contender do. Sizes are bytes, times seconds."""

    test: str
    operation: str = "send"
    size: int = 64
    count: int = 1000
    """Operations, messages, round trips or connections that are timed."""
    warmup: int = 100
    """As many before, that are not."""
    depth: int = 64
    """Operations on their way at once, in `bandwidth`."""
    concurrency: int = 32
    """Connections that are set up at once."""
    idle: int = 2000
    """Connections that do nothing, in `idle`."""
    loop: str = "asyncio"
    busy_poll: float = 0.0
    adaptive_poll: bool = True

    @property
    def key(self) -> str:
        """What names it in a report: `latency/64`, `bandwidth/write/4096`, `connections`."""
        parts = {
            "latency": [str(self.size)],
            "rate": [str(self.size)],
            "bandwidth": [self.operation, str(self.size)],
        }
        return "/".join([self.test, *parts.get(self.test, [])])

    @property
    def title(self) -> str:
        """The same for people."""
        parts = {
            "latency": f"round trips of {self.size} bytes",
            "rate": f"messages of {self.size} bytes",
            "bandwidth": f"{self.operation} of {self.size} bytes",
            "connections": f"{self.count}, {self.concurrency} at once",
            "idle": f"{self.idle} connections",
        }
        return f"{self.test}: {parts[self.test]}"

    def pack(self) -> str:
        """JSON in base64: a word that passes through every shell, ssh's too, as it is."""
        return base64.urlsafe_b64encode(json.dumps(asdict(self)).encode()).decode()

    @classmethod
    def unpack(cls, word: str) -> Work:
        """What pack() made."""
        return cls(**json.loads(base64.urlsafe_b64decode(word)))
