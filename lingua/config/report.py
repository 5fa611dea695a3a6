"""What is wrong with a configuration, and what of it has no effect."""

from dataclasses import dataclass, field

from lingua.base.errors import UserError, all_of
from lingua.config.values import MISSING, LocatedValue, Values, shorten, show


@dataclass
class Report:
    """The mistakes and notices of one configuration."""

    saved: str = ""  # path of the file, where it was written by a run
    program_doc: str = ""  # docstring whose first example is shown, for an empty command line
    mistakes: list[str] = field(default_factory=list)
    wrong: set[str] = field(default_factory=set)  # keys without a usable value
    notices: dict[str, str] = field(default_factory=dict)  # about keys without effect, by key
    located: Values = field(default_factory=dict)  # every value by path, also of list elements

    def add(self, path: str, given: LocatedValue, need: str, usable: bool = False) -> None:
        """A mistake: the key, its value, what is required and the place."""
        written = str(given.text) if type(given.value) in (int, float) else show(given)
        value = "" if given.value == MISSING else f" = {written}"
        where = given.where or self.saved
        self.mistakes.append(f"{shorten(path)}{value}: {need}{f' ({where})' if where else ''}")
        if not usable:
            self.wrong.add(path)

    def check(self) -> None:
        """Raises UserError with every mistake."""
        if self.mistakes:
            example = ""
            if self.program_doc:
                from lingua.config.help import first_example

                example = f"\nAn example: {first_example(self.program_doc)}"
            raise UserError(f"{all_of(self.mistakes)}{example}")
