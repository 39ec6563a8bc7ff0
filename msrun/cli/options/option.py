"""One option of the command line, as a value."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

T_co = TypeVar("T_co", covariant=True)


class OptionGroup(enum.Enum):
    """Heading of `--help` under which an option stands."""

    CLUSTER = "Cluster"
    FLEET = "Starting other nodes"
    PROGRAM = "Program"
    WORKERS = "Workers"
    STOPPING = "Restarts and stopping"
    LOGS = "Logs and console"
    PLACEMENT = "Placement"
    PARALLEL = "Parallel runtime"
    PEERS = "Accepted for torchrun's and MindSpore's sake"
    REFUSED = "Known and refused by this version"
    PLAN = "Plan"


class Arity(enum.Enum):
    """Whether a value follows on the command line."""

    SWITCH = "none, but `=true` and `=false` may be attached"
    OPTIONAL = "the next word, if it looks like a value"
    ONE = "the next word"


class FileForm(enum.Enum):
    """What a job file may hold for an option."""

    ABSENT = "nothing: it is no key"
    SCALAR = "text or a number"
    LIST = "a list, or text with commas"
    PAIRS = "a mapping, or text such as a=1,b=2"
    VARIABLES = "a mapping of names to values"
    TREE = "a mapping, or text"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Option(Generic[T_co]):
    """One option, in all the forms in which it may be given.

    Args:
        name: Canonical name in kebab-case, without dashes; also the job file's key.
        group: Heading in the help.
        help: Noun phrase, ends in a period.
        parse: Text to value; raises UsageError whose message starts with the quoted text.
        field: Field of `JobSpec` that it fills, or of a part of it: `restarts.window`; empty where
            the value is not one field.
        default: Value when none is given.  The default of an option with a field stands in
            `JobSpec`, and here too only if the value is read before there is a `JobSpec`.
        default_text: How help shows the default; empty shows none.
        metavar: Noun for the value.
        aliases: Further spellings as they are typed, dashes included.
        negatives: Spellings that mean false, dashes included.
        arity: Whether a value follows.
        is_value: With `OPTIONAL`, whether a following word is the value.
        repeated: Each use adds to the ones before, and so does each source.
        torchrun: torchrun's name of it, from which the PET_ variable follows.
        environment: Further variables that hold it, weaker than those that follow from its names.
        file: What a job file may hold.
        unset: Values of the peers that mean "not given".
        refusal: Why the option cannot be used; follows the option and its value.
    """

    name: str
    group: OptionGroup
    help: str
    parse: Callable[[str], T_co]
    field: str = ""
    default: T_co | None = None
    default_text: str = ""
    metavar: str = ""
    aliases: tuple[str, ...] = ()
    negatives: tuple[str, ...] = ()
    arity: Arity = Arity.ONE
    is_value: Callable[[str], bool] = lambda _: False
    repeated: bool = False
    torchrun: str = ""
    environment: tuple[str, ...] = ()
    file: FileForm = FileForm.SCALAR
    unset: frozenset[str] = frozenset()
    refusal: str = ""

    @property
    def flag(self) -> str:
        """The canonical spelling on the command line."""
        return f"--{self.name}"

    @property
    def spellings(self) -> tuple[str, ...]:
        """All spellings on the command line that do not mean false."""
        return (self.flag, *self.aliases)

    @property
    def variables(self) -> tuple[str, ...]:
        """Environment variables that may hold it, the stronger one first."""
        own = "MSRUN_" + self.name.replace("-", "_").upper()
        torchruns = (f"PET_{self.torchrun.upper()}",) if self.torchrun else ()
        return (own, *torchruns, *self.environment)

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the job file, in kebab-case."""
        if self.file is FileForm.ABSENT:
            return ()
        long = [alias.removeprefix("--") for alias in self.aliases if alias.startswith("--")]
        return (self.name, *long)


def options_in(module: Mapping[str, object]) -> tuple[Option[object], ...]:
    """Return the options that `module` has defined so far, in the order in which they stand."""
    return tuple(value for value in module.values() if isinstance(value, Option))
