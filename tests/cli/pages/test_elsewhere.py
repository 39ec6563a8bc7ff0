"""Verbs with `--launcher` go to where the job is; the words that are left are the verb's own."""

import pytest

from msrun.cli.main import main
from msrun.cli.verb_table import ELSEWHERE


@pytest.mark.parametrize(
    ("words", "call"),
    [
        (
            "status --launcher kubernetes j --json",
            ("kubernetes", "status", ["j", "--json"], {}),
        ),
        (
            "logs --rank 0 --launcher=kubernetes --namespace team --context=lab j",
            ("kubernetes", "logs", ["--rank", "0", "j"], {"namespace": "team", "context": "lab"}),
        ),
        ("drain --launcher kubernetes j n", ("kubernetes", "drain", ["j", "n"], {})),
    ],
)
def test_a_verb_is_carried_out_where_the_job_is(msrun, system, words, call):
    outcome = msrun(words)

    assert (outcome.code, outcome.out, outcome.err) == (7, "", "")
    assert system.elsewhere == [call]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("status --namespace team", "--namespace needs --launcher kubernetes"),
        ("stop --launcher slurm", "--launcher slurm has no verbs (choose kubernetes)"),
        ("stop --launcher", "--launcher needs a value"),
        ("ls --launcher kubernetes", "there is no option --launcher"),
    ],
)
def test_words_that_are_refused(msrun, system, words, sentence):
    outcome = msrun(words)

    assert (outcome.code, outcome.err.splitlines()[0]) == (2, f"error: {sentence}")
    assert system.elsewhere == []


@pytest.mark.parametrize("verb", ELSEWHERE)
def test_help_is_given_here(capsys, system, verb):
    assert main([verb, "--launcher", "kubernetes", "--help"], system=system) == 0
    assert "Where the job runs, if not here." in capsys.readouterr().out
