"""The one way the lab fails: a sentence for the user."""


class LabError(Exception):
    """The lab could not do its part; `str()` is one clear sentence.

    `log` names a file with the whole story, when there is one.
    """

    def __init__(self, sentence: str, *, log: str | None = None) -> None:
        super().__init__(sentence)
        self.log = log
