"""A fleet of two nodes, and plans as text."""

import shlex

import pytest

from msrun.fleet import Fleet

FLEET = Fleet(
    job_id="train-0a1b2c",
    words=("--max-restarts=3", "--env=NAME=it's", "train.py", "--lr", "3e-4"),
    nnodes=2,
    python="/opt/venv/bin/python",
    cwd="/home/alice/my project",
    versions={"msrun": "0.1.0"},
)


@pytest.fixture
def fleet():
    return FLEET


@pytest.fixture
def render():
    """Return a plan as text: files, then each command with its variables and its input."""

    def text(plan):
        parts = [f"--- {name}\n{content}" for name, content in plan.files.items()]
        for command in plan.commands:
            variables = "".join(f"{name}={value}\n" for name, value in command.env.items())
            secret = "(with the secret in its environment)\n" if command.has_secret else ""
            order = f"<<< {command.order}\n" if command.order and not plan.files else ""
            head = f"--- {command.node or 'all nodes'}\n{variables}{secret}"
            parts.append(f"{head}{shlex.join(command.argv)}\n{order}")
        return "\n".join(parts)

    return text
