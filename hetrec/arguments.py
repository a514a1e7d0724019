"""The shorthand of the command line: ``model=deepfm data.path=x`` becomes what LightningCLI understands.

* ``group=name`` is the file ``configs/group/name.yaml`` (or a file of your own, given as a path that ends in .yaml);
* ``experiment=name`` is a file that sets several groups at once;
* any other ``a.b=c`` is ``--a.b=c``; ``optimizer=Adam`` is torch's;
* a missing subcommand is ``fit``.

Whatever their order on the line, later kinds win over earlier ones: experiment and ``--config`` files, group files,
single options. Within a kind the last one wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from hetrec.errors import UserError

__all__ = ["EXPERIMENT", "GROUPS", "SUBCOMMANDS", "choices", "expand", "missing", "unknown"]

SUBCOMMANDS = ("fit", "validate", "test", "predict")
GROUPS = ("model", "data", "cache", "store")
EXPERIMENT = "experiment"

# Where the classes that these options name are looked for: libraries beside torch have classes of the same names.
_CLASSES = {"optimizer": "torch.optim", "lr_scheduler": "torch.optim.lr_scheduler"}
_PLATEAU = "pytorch_lightning.cli.ReduceLROnPlateau"  # knows which figure it watches; torch's does not

# Options that LightningCLI takes without a value; the word after any other option is its value.
_FLAGS = ("-h", "--help", "--print_config", "--print_shtab")


def expand(argv: Sequence[str], configs: Path) -> list[str]:
    """The same command line in LightningCLI's own terms.

    Args:
        argv: words of the command line, without the program's name.
        configs: folder that holds ``model/``, ``data/``, ``cache/``, ``store/`` and ``experiment/``.

    Raises:
        UserError: a group or subcommand that does not exist, a file that is not there, a word that is neither an option
            nor ``name=value``, or a run without model or data.
    """
    words = list(argv)
    if words and words[0] in ("-h", "--help"):
        return words
    subcommand = words.pop(0) if words and _is_bare(words[0]) else "fit"
    if subcommand not in SUBCOMMANDS:
        raise UserError(unknown("subcommand", subcommand, SUBCOMMANDS, f"there are: {', '.join(SUBCOMMANDS)}"))

    files: list[str] = []
    groups: list[str] = []
    options: list[str] = []
    while words:
        word = words.pop(0)
        if _is_bare(word):
            raise UserError(f"unexpected {word!r}: write group=name (model=deepfm), option=value or --option value")
        name, separator, value = word.lstrip("-").partition("=")
        if word.startswith("-") and not separator and word not in _FLAGS and words and not words[0].startswith("--"):
            separator, value = "=", words.pop(0)
        if name == "config" or word.startswith("-c"):
            files.append(f"--config={_existing(value, '--config')}")
        elif word in _FLAGS:
            options.append(word)
        elif name == EXPERIMENT:
            files.append(f"--config={_group_file(EXPERIMENT, value, configs)}")
        elif name in GROUPS:
            groups.append(f"--{name}={value if word.startswith('-') else _group_file(name, value, configs)}")
        else:
            if name in _CLASSES and value.isidentifier() and value not in ("null", "None"):
                value = _PLATEAU if value == "ReduceLROnPlateau" else f"{_CLASSES[name]}.{value}"
            options.append(f"--{name}{separator}{value}")

    helping = any(option.split("=")[0] in ("-h", "--help") or ".help" in option for option in options)
    if not files and not helping:
        for group in ("model", "data"):
            if not any(option.startswith(f"--{group}=") for option in groups):
                raise UserError(missing(group, configs))
    return [subcommand, *files, *groups, *options]


def missing(group: str, configs: Path) -> str:
    """What to say where a run has no model or no data."""
    return f"no {group} given: add {group}=NAME; configs/{group} has: {', '.join(choices(group, configs))}"


def choices(group: str, configs: Path) -> list[str]:
    """Names that ``group=`` takes."""
    return sorted(path.stem for path in (configs / group).glob("*.yaml"))


def unknown(kind: str, name: str, known: Sequence[str], there_are: str) -> str:
    """What to say about a name that does not exist: the closest of ``known``, then the sentence ``there_are``."""
    close = get_close_matches(name, known, n=1)
    return f"unknown {kind} {name!r}" + (f", did you mean {close[0]!r}? " if close else "; ") + there_are


def _is_bare(word: str) -> bool:
    return not word.startswith("-") and "=" not in word


def _existing(path: str, option: str) -> str:
    if not Path(path).is_file():
        raise UserError(f"no file {path!r}, which {option} names")
    return path


def _group_file(group: str, name: str, configs: Path) -> str:
    if name.endswith((".yaml", ".yml")):
        return _existing(name, f"{group}=")
    path = configs / group / f"{name}.yaml"
    if not path.is_file():
        known = choices(group, configs)
        raise UserError(unknown(group, name, known, f"configs/{group} has: {', '.join(known)}"))
    return str(path)
