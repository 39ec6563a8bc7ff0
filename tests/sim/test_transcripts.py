"""A seed that breaks a promise prints what happened, which can be kept and fails again."""

import faults
import pytest
import sim_soak
import transcript
from observer import Violation
from world import MisfitError

pytestmark = pytest.mark.sim

# A mutant and a seed that breaks a promise while workers run, at an agent's end, at the very end.
BROKEN = [
    ("nowal", 12, "I3 a generation again"),
    ("leavesworkers", 29, "I7 workers outlive their agent"),
    ("revives", 890, "I6 nodes wait for ever"),
]


@pytest.mark.parametrize(("mutant", "seed", "promise"), BROKEN)
def test_a_broken_promise_comes_with_a_transcript_that_breaks_it_again(mutant, seed, promise):
    with pytest.raises(Violation, match=rf"(?s){promise}.*\(seed {seed}\)") as caught:
        faults.hold([seed], mutant)

    text = str(caught.value).split("\n", 1)[1]

    assert text == transcript.replay(text)
    assert text.splitlines()[-1].startswith(f"    VIOLATION {promise}")


def test_the_soak_keeps_a_transcript_and_replays_it(tmp_path, capsys):
    mutant, seed, promise = BROKEN[0]
    words = f"--seeds 1 --first {seed} --jobs 1 --mutant {mutant} --out {tmp_path}"

    assert sim_soak.main(words.split()) == 1
    path = tmp_path / f"seed_{seed}.txt"
    assert f"seed {seed}: {promise}" in capsys.readouterr().out

    assert sim_soak.main(["--replay", str(path)]) == 1
    assert capsys.readouterr().out == path.read_text()


def test_the_soak_ends_when_its_time_is_over(capsys):
    assert sim_soak.main(["--first", "0", "--minutes", "0", "--jobs", "1"]) == 0
    assert "0 of 50 broken" in capsys.readouterr().out


def test_the_soak_of_servers_names_the_seed_that_breaks_a_promise(tmp_path, capsys):
    words = ["--servers", "--seeds", "7", "--first", "0", "--jobs", "1", "--out", str(tmp_path)]

    assert sim_soak.main(words) == 0
    assert "0 of 7 broken" in capsys.readouterr().out
    assert sim_soak.main([*words, "--mutant", "twice"]) == 1
    assert "seed 0: S" in capsys.readouterr().out


def test_a_transcript_of_another_protocol_says_so():
    with pytest.raises(MisfitError, match="of another protocol; run its seed again"):
        transcript.replay("settings least=1\n1.0 begin 1.0\n2.0 arrive 7\n")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no transcript: its first line does not give the settings"),
        ("settings least=1 mutant=other\n", r"no mutant 'other' \(choose agentstop, "),
    ],
)
def test_what_is_no_transcript_is_refused_in_a_sentence(tmp_path, capsys, text, problem):
    path = tmp_path / "kept.txt"
    path.write_text(text)

    with pytest.raises(MisfitError, match=problem):
        transcript.parse(text)
    assert sim_soak.main(["--replay", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"{path}: no ")


def test_a_machine_that_raises_breaks_a_promise():
    text = transcript.replay("settings least=1\n1.0 ready nobody\n")

    assert text.splitlines()[-1] == "    VIOLATION raised: KeyError('nobody')"
