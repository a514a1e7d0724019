"""LightningCLI's argument parser, with errors of one line: the option, what it takes, the closest there is."""

from __future__ import annotations

import re
from typing import Any, NoReturn

from jsonargparse import ArgumentError
from pytorch_lightning.cli import LightningArgumentParser

from hetrec.arguments import unknown
from hetrec.errors import UserError

__all__ = ["HetArgumentParser"]

_LISTABLE = 24  # a list of more options than this helps nobody
_LINKED = "spec"  # what a model takes from the data; nobody sets it by hand


class HetArgumentParser(LightningArgumentParser):
    """Raises :class:`UserError` where its parent prints a usage text and exits.

    jsonargparse reads the options of a class that the user names (``model.*``, ``data.*``) with an inner parser made
    for that class. Only the inner parser knows which options there are, only the outer one knows what stands before the
    dot. So the inner one adds its options to the message, and the outer one words it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # An abbreviation that works today turns ambiguous, or into something else, when an option is added.
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def validate(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().validate(*args, **kwargs)
        except KeyError as error:
            message = str(error.args[0])
            if re.fullmatch(r"Option '[^']+' is not accepted", message) and not self.exit_on_error:
                raise type(error)(f"{message}; known: {' '.join(self._known())}") from error
            raise

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            raise ArgumentError(None, message) from ex
        raise UserError(self._worded(message, getattr(ex, "subcommand_parser", self))) from ex

    def _known(self) -> list[str]:
        hidden = ("help", "config", _LINKED)
        return [a.dest for a in self._actions if a.dest not in hidden and not a.dest.endswith(".help")]

    def _worded(self, message: str, parser: HetArgumentParser) -> str:
        if match := re.search(r"Option '([^']+)' is not accepted; known: ([\w ]+)", message):
            option, known = match[1], match[2].split()
            name = self._full_name(option)
            prefix = name[: -len(option)]
            return _unknown_option(name, [prefix + k for k in known]) + self._whereabouts(option)
        if match := re.search(r"(?:unrecognized arguments: --|does not accept option '|Option ')([^=' ]+)", message):
            return parser._unknown_here(match[1]) + self._whereabouts(match[1])
        if match := re.match(r"the following arguments are required: (.*)", message):
            names = [name.partition(".")[2] or name for name in match[1].split(", ")]
            return f"{' and '.join(names)} missing: add {' '.join(f'{name}=...' for name in names)}"
        if match := re.match(r'.*Parser key "([^"]+)":\s*(.*)', message, re.DOTALL):  # the innermost of several
            return f"{self._full_name(match[1])}: {_expectation(match[2])}{self._whereabouts(match[1])}"
        return _joined(message)

    def _full_name(self, option: str) -> str:
        """The option as it stands on the command line; an inner parser knows only its last part."""
        for word in reversed(self.args):
            name = word.lstrip("-").partition("=")[0].replace(".init_args.", ".")
            if name == option or name.endswith(f".{option}"):
                return name
        return option

    def _whereabouts(self, option: str) -> str:
        on_the_line = any(re.split("[=]", word.lstrip("-"))[0].endswith(option) for word in self.args)
        return "" if on_the_line else " (in a configuration file)"

    def _unknown_here(self, name: str) -> str:
        group = name.rpartition(".")[0]
        siblings = [k for k in self._known() if group and k.startswith(f"{group}.")]
        return _unknown_option(name, siblings or sorted({k.split(".")[0] for k in self._known()}))


def _unknown_option(name: str, known: list[str]) -> str:
    listed = ", ".join(known)
    return unknown("option", name, known, f"there are: {listed}" if len(known) <= _LISTABLE else "--help lists them")


def _expectation(problem: str) -> str:
    """What jsonargparse found wrong with a value, without its way of getting there."""
    reason = re.compile(r"Problem with given class_path '([^']+)':\s*(.*?)(?:\n\s*- |\n\s*Given value|$)", re.DOTALL)
    if match := reason.search(problem):
        return f"cannot use class {match[1]!r}: {_joined(match[2])}"
    if match := re.search(r"the following arguments are required: ([\w, ]+)", problem):
        return f"{match[1]} missing"
    if match := re.search(r"expects a function or a callable class: (.*?)(?:\. Got value|\n|$)", problem):
        return match[1]
    union = re.search(r"Subtypes: \[(.*)\]\n.*?Given value: (.*?)(?:\. Got value|\n|$)", problem, re.DOTALL)
    if union and re.search(r"<class '(?:int|float|bool|str)'>", union[1]):
        return f"expected {_types(union[1])}, got {union[2]}"
    if match := re.search(r"Expected a dot import path string: (\S+)", problem):
        return f"{match[1]!r} is not a known class; give its import path, as in torch.optim.Adam"
    if union:
        return f"expected {_types(union[1])}, got {union[2]}"
    if match := re.search(r"Expected a (.+?)\. Got value: (.*?)(?:\n|$)", problem, re.DOTALL):
        return f"expected {_types(match[1])}, got {_joined(match[2])}"
    return _joined(problem)


def _types(text: str) -> str:
    """``<class 'int'>, <class 'NoneType'>`` as ``int or null``; ``typing.Literal['a', 'b']`` as ``one of a, b``."""
    text = re.sub(r"typing\.Literal\[(.*?)\]", lambda m: "one of " + m[1].replace("'", ""), text)
    text = re.sub(r"<(?:class|enum) '(?:[\w.]*\.)?(\w+)'>", r"\1", text)
    text = text.replace("typing.", "").replace("NoneType", "null")
    return text if text.startswith("one of") else re.sub(r", (?![^\[]*\])", " or ", text)


def _joined(text: str) -> str:
    return " ".join(text.split())
