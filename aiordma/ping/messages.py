"""The messages of a ping: a number and a pattern, so that a wrong answer is seen to be wrong."""

from __future__ import annotations

_NUMBER_SIZE = 8
_PATTERN = bytes(range(256))


class Messages:
    """Numbered messages of one size."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._pattern = _PATTERN * (size // len(_PATTERN) + 2)

    def __getitem__(self, number: int) -> bytes:
        """The number in 8 bytes, then the pattern from another place on in each message.

        A message of less than 8 bytes has the last bytes of the number.
        """
        head = number.to_bytes(_NUMBER_SIZE, "big")[-self._size :]
        begin = number % len(_PATTERN)
        return head + self._pattern[begin : begin + self._size - len(head)]


def difference(sent: bytes, answer: bytes) -> str | None:
    """What is wrong with an answer; None if nothing is."""
    if answer == sent:
        return None
    if len(answer) != len(sent):
        return f"{len(answer)} bytes came back for {len(sent)}"
    numbers = [int.from_bytes(message[:_NUMBER_SIZE], "big") for message in (sent, answer)]
    if numbers[0] != numbers[1]:
        return f"number {numbers[1]} came back for number {numbers[0]}"
    place = next(place for place, byte in enumerate(sent) if byte != answer[place])
    return f"byte {place} came back as {answer[place]:#04x}, and was {sent[place]:#04x}"
