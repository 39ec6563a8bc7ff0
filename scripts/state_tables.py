"""Write the transition tables of docs/states.md from the transcripts, which are tests.

Usage: python scripts/state_tables.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCENARIOS = ROOT / "tests" / "sim" / "scenarios"
PAGE = ROOT / "docs" / "states.md"
# A transcript's verb -> the event; `receive` and what is not here is named by its first word.
EVENTS = {
    "scheduler": {
        "register": "`Register`",
        "warmed": "`Warmed`",
        "exit": "`WorkerExited`",
        "drained": "`Drained`",
        "interrupt": "`Interrupted`",
        "node-failed": "`NodeFailed`",
        "server-failed": "`ServerFailed`",
        "lost": "the node is lost",
        "unreachable": "the node cannot be reached",
        "misspeak": "what only a scheduler says",
        "advance": "time passes",
    },
    "agent": {
        "reached": "the scheduler answers",
        "cut": "the lease is nearly over",
        "forgotten": "the scheduler does not know this node",
        "ready": "imports are done",
        "not-ready": "imports failed",
        "ended": "a worker ended",
        "server-started": "a server was started",
        "server-ended": "a server ended",
        "swept": "the reaper has swept",
        "tree-lost": "reaper, forkserver or store ended",
        "scheduler-lost": "the scheduler is gone",
        "signal": "a signal of the user",
        "advance": "time passes",
    },
}
Row = tuple[str, str, str, str]


def table(machine: str) -> str:
    """Return all that the transcripts of `machine` show, a line a transition."""
    found: dict[Row, str] = {}
    phases: list[str] = []
    for path in sorted((SCENARIOS / machine).glob("*.txt")):
        for row in _transitions(machine, path.read_text()):
            found.setdefault(row, path.stem)
            phases += [phase for phase in (row[0], row[3]) if phase not in phases]
    order = [
        "FORMING",
        "JOINING",
        "RUNNING",
        "STOPPING",
        "SWEEPING",
        "LEAVING",
        "DONE",
        "FAILED",
        "FINISHED",
    ]
    rows = sorted(found, key=lambda row: (order.index(row[0]), *row[1:]))
    lines = ["| phase | event | actions | next phase | shown by |", "|---|---|---|---|---|"]
    lines += [f"| {' | '.join(row)} | {found[row]} |" for row in rows]
    return "\n".join(lines)


def _transitions(machine: str, text: str) -> list[Row]:
    """Return those of one transcript that do something."""
    rows: list[Row] = []
    phase = ""
    for block in text.strip().split("\n\n"):
        lines = [line for line in block.split("\n") if not line.startswith("#")]
        verb, _, words = lines[0].partition(" ")
        *outputs, state = lines[2:]
        after = state.split()[0].upper()
        actions = ", ".join(dict.fromkeys(map(_action, outputs)))
        event = EVENTS[machine].get(verb, f"`{words.split(' ')[0]}`")
        if verb not in ("start", "restart") and (actions or after != phase):
            rows.append((phase, event, actions, after))
        phase = after
    return rows


def _action(line: str) -> str:
    """Return what was done, without to whom and with what."""
    words = line.split()
    if words[0] == "->":
        return f"`{words[3]}`"
    return f"{words[0]} `{words[1]}`" if words[0] in ("write", "announce") else words[0]


def page(text: str) -> str:
    """Return `text` of the page with the tables as they should be."""
    for machine in EVENTS:
        begin, end = f"<!-- {machine}: generated -->\n", f"<!-- {machine}: end -->"
        head, _, rest = text.partition(begin)
        text = head + begin + table(machine) + "\n" + end + rest.partition(end)[2]
    return text


def main() -> int:
    """Write the page, or with `--check` return 1 when it is not current."""
    text = PAGE.read_text()
    if "--check" in sys.argv:
        return int(page(text) != text)
    PAGE.write_text(page(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
