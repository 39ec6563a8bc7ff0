"""What happened in a world, as text that can be kept, read and run again.

The first line has the settings, and the mutant if it is not what we ship; each further
one is the time, an input and its words.  What the machines said to it follows, indented,
for the reader and for a comparison.
"""

from mutants import MUTANTS
from observer import Violation
from world import MisfitError, Settings, World


def render(settings, inputs, mutant=""):
    """Return the transcript of `inputs`, which ends with the promise that was broken, if any."""
    world = World(settings, MUTANTS[mutant][0])
    words = vars(settings) | ({"mutant": mutant} if mutant else {})
    lines = [" ".join(["settings", *(f"{n}={v}" for n, v in words.items())])]
    for at, verb, *words in inputs:
        lines.append(" ".join([f"{at!r}", verb, *map(str, words)]) + _comment(world, verb, words))
        world.outputs = []
        try:
            world.do(at, verb, *words)
        except Violation as violation:
            world.outputs.append(f"VIOLATION {violation}")
        lines += [f"    {output}" for output in world.outputs]
        if lines[-1].startswith("    VIOLATION"):
            break
    return "\n".join(lines) + "\n"


def _comment(world, verb, words):
    """Return what a frame carries, for who reads on."""
    if verb != "arrive" or words[0] >= len(world.frames):
        return ""
    envelope, is_up = world.frames[words[0]]
    way = f"{envelope.node_id} to scheduler" if is_up else f"scheduler to {envelope.node_id}"
    what = type(envelope.body).__name__ if envelope.body else "nothing"
    return f"  # {way}: {what}"


def parse(text):
    """Return the settings, the inputs and the mutant of a transcript.

    Raises:
        MisfitError: It is none, or not one of this protocol.
    """
    lines = [line.split("#")[0].rstrip() for line in text.splitlines()]
    first, *rest = [*filter(None, lines), ""]
    if not first.startswith("settings "):
        raise MisfitError("no transcript: its first line does not give the settings")
    words = dict(word.split("=", 1) for word in first.split()[1:])
    mutant = words.pop("mutant", "")
    if mutant not in MUTANTS:
        raise MisfitError(
            f"no mutant {mutant!r} (choose {', '.join(sorted(filter(None, MUTANTS)))})"
        )
    settings = Settings(**{name: _value(word) for name, word in words.items()})
    told = [line.split() for line in rest if line and not line.startswith(" ")]
    inputs = [(float(at), verb, *map(_value, words)) for at, verb, *words in told]
    return settings, inputs, mutant


def replay(text):
    """Return `text` as it comes out when all that it says happens again."""
    comments = [line for line in text.splitlines(keepends=True) if line.startswith("#")]
    return "".join(comments) + render(*parse(text))


def _value(word):
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word
