"""The error that the lab raises."""


class LabError(Exception):
    """The lab failed; `str()` is one sentence for the user.

    `log` is the path of a file with the details, or None if there is none.
    """

    def __init__(self, sentence: str, *, log: str | None = None) -> None:
        super().__init__(sentence)
        self.log = log

    @classmethod
    def from_reason(cls, reason: str) -> "LabError":
        """Return the error for a reason: a sentence and, in a second line, the path of a log."""
        sentence, _, log = reason.partition("\n")
        return cls(sentence, log=log or None)
