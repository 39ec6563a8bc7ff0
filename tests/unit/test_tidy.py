"""The house limits, each on a made-up tree with one offence in it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import tidy

REPOSITORY = Path(__file__).resolve().parents[2]
# Spelled in pieces: this file is checked as well.
HOME_OF_ONE = str(Path("/", "Users", "ann"))


@pytest.fixture
def offences(tmp_path):
    """Write files, given as path -> text, and return what tidy prints about them."""

    def check(files: dict[str, str]) -> list[str]:
        for path, text in files.items():
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return [str(problem) for problem in tidy.check_tree(tmp_path)]

    return check


def in_package(text: str) -> dict[str, str]:
    """A package whose one module holds `text` and is imported."""
    return {"msrun/__init__.py": "import msrun.a\n", "msrun/a.py": text}


def function_of(lines: int) -> str:
    return "def f():\n" + "    x = 1\n" * (lines - 1)


def test_empty_tree_is_tidy(offences):
    assert offences({}) == []


def test_function_of_60_lines_is_tidy(offences):
    assert offences(in_package(function_of(60))) == []


def test_function_of_61_lines_is_reported(offences):
    assert offences(in_package(function_of(61))) == [
        "msrun/a.py:1: f has 61 lines, the limit is 60"
    ]


def test_async_function_and_method_count_too(offences):
    method = "class C:\n    async def f(self):\n" + "        x = 1\n" * 60
    assert offences(in_package(method)) == ["msrun/a.py:2: f has 61 lines, the limit is 60"]


def test_decorators_are_not_counted(offences):
    assert offences(in_package("@property\n" * 5 + function_of(60))) == []


def test_long_function_in_tests_is_allowed(offences):
    assert offences({"tests/test_a.py": function_of(61)}) == []


@pytest.mark.parametrize("folder", ["ranktable", "scripts/bench", "tests/unit"])
def test_file_of_501_lines_is_reported(offences, folder):
    files = {"ranktable/__init__.py": "import ranktable.a\n", f"{folder}/a.py": "x = 1\n" * 501}
    assert offences(files) == [f"{folder}/a.py:501: file has 501 lines, the limit is 500"]


def test_longer_file_with_a_reason_is_tidy(offences):
    reason = "# tidy: long file, one machine is read in one place\n"
    assert offences(in_package(reason + "x = 1\n" * 501)) == []


def test_longer_file_with_half_a_reason_is_reported(offences):
    assert len(offences(in_package("# tidy: long file, because\n" + "x = 1\n" * 501))) == 1


def test_file_of_500_lines_is_tidy(offences):
    assert offences(in_package("x = 1\n" * 500)) == []


def test_broken_file_is_reported(offences):
    [problem] = offences({"tests/test_a.py": "x = 1\ndef f(:\n"})
    assert problem.startswith("tests/test_a.py:2: not Python: ")


@pytest.mark.parametrize("word", ["TODO", "FIXME", "XXX"])
def test_promise_without_issue_is_reported(offences, word):
    assert offences(in_package(f"x = 1\ny = 2  # {word} soon\n")) == [
        f"msrun/a.py:2: {word} names no issue, such as #12"
    ]


def test_promise_with_issue_is_tidy(offences):
    assert offences(in_package("x = 1  # TODO(#12): soon\n")) == []


def test_promise_in_a_string_is_tidy(offences):
    assert offences(in_package('x = "# TODO"\n')) == []


class TestImported:
    SENTENCE = "no module of the packages imports or names this file"

    def test_lonely_module_is_reported(self, offences):
        assert offences({"msrun/a.py": ""}) == [f"msrun/a.py:1: {self.SENTENCE}"]

    def test_import_by_tests_is_not_enough(self, offences):
        files = {"msrun/a.py": "", "tests/test_a.py": "import msrun.a\n"}
        assert offences(files) == [f"msrun/a.py:1: {self.SENTENCE}"]

    def test_import_of_itself_is_not_enough(self, offences):
        assert offences({"msrun/a.py": "import msrun.a\n"}) == [f"msrun/a.py:1: {self.SENTENCE}"]

    @pytest.mark.parametrize(
        "statement",
        [
            "import msrun.b.c",
            "from msrun.b import c",
            "from msrun.b.c import name",
            "def f():\n    from msrun.b import c as d",
            'BUILT_IN = {"c": "msrun.b.c:Name"}',
            'ARGV = ["-m", "msrun.b.c"]',
        ],
    )
    def test_import_or_name_elsewhere_is_enough(self, offences, statement):
        files = {
            "msrun/__init__.py": statement + "\n",
            "msrun/b/__init__.py": "",
            "msrun/b/c.py": "",
        }
        assert offences(files) == []

    def test_longer_text_that_mentions_the_module_is_not_enough(self, offences):
        files = {"msrun/__init__.py": '"""See msrun.a."""\n', "msrun/a.py": ""}
        assert offences(files) == [f"msrun/a.py:1: {self.SENTENCE}"]

    def test_entry_points_need_no_import(self, offences):
        assert offences(dict.fromkeys(tidy.ENTRY_POINTS, "")) == []

    def test_every_listed_entry_point_exists(self):
        assert [path for path in tidy.ENTRY_POINTS if not (REPOSITORY / path).exists()] == []


@pytest.mark.parametrize(
    "statement", ["import pickle", "from marshal import loads", "import cloudpickle.fast as p"]
)
def test_import_that_runs_data_is_reported(offences, statement):
    module = statement.split()[1].partition(".")[0]
    assert offences(in_package(statement + "\n")) == [
        f"msrun/a.py:1: {module} runs code from data; use msgspec"
    ]


def test_one_file_may_pickle(offences):
    assert (REPOSITORY / tidy.PICKLER).exists()
    sentences = offences({tidy.PICKLER: "import pickle\n"})
    assert [sentence for sentence in sentences if "runs code from data" in sentence] == []


def test_eval_is_reported(offences):
    assert offences(in_package("x = eval('1')\n")) == [
        "msrun/a.py:1: eval runs code from data; parse the value instead"
    ]


def test_eval_of_a_model_is_tidy(offences):
    assert offences(in_package("model = None\nmodel.eval()\n")) == []


def test_tests_may_pickle(offences):
    assert offences({"tests/test_a.py": "import pickle\nx = eval('1')\n"}) == []


@pytest.mark.parametrize(
    ("text", "line", "name"),
    [
        ("from torch.distributed import _functional", 1, "torch.distributed._functional"),
        ("import torch._dynamo.config", 1, "torch._dynamo.config"),
        ("import torch\nx = torch._C", 2, "torch._C"),
        (
            "def f(torch):\n    return torch.distributed.tensor._x()",
            2,
            "torch.distributed.tensor._x",
        ),
        ("import torch.distributed as d\nd.a._b", 2, "torch.distributed.a._b"),
        ("from torch import nn\nnn._reduction", 2, "torch.nn._reduction"),
        ("MODULE = 'torch.distributed._tensor'", 1, "torch.distributed._tensor"),
    ],
)
def test_private_torch_name_is_reported(offences, text, line, name):
    assert offences(in_package(text + "\n")) == [
        f"msrun/a.py:{line}: {name} is private to torch; reach it through {tidy.TORCH_ADAPTER}"
    ]


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nx = torch.__version__",
        "import torch\nx = torch.distributed.is_initialized()",
        "class C:\n    def f(self):\n        return self._x",
        "'''Uses torch._C inside.'''",
    ],
)
def test_public_names_are_tidy(offences, text):
    assert offences(in_package(text + "\n")) == []


def test_adapter_may_use_private_torch_names(offences):
    files = {
        "msrun/__init__.py": "import msrun.parallel.torch_compat\n",
        tidy.TORCH_ADAPTER: "import torch._dynamo\nx = torch._C\n",
    }
    assert offences(files) == []


@pytest.mark.parametrize(
    ("text", "name", "word"),
    [
        ("def f(global_rank): ...", "global_rank", "rank"),
        ("def f():\n    restart_count = 0", "restart_count", "generation"),
        ("class Trainer: ...", "Trainer", "worker"),
        (
            "class C:\n    def f(self):\n        self._machine_rank = 0",
            "_machine_rank",
            "node_rank",
        ),
        ("NUM_MACHINES = 1", "NUM_MACHINES", "nnodes"),
        ("def nproc(): ...", "nproc", "local_world_size"),
    ],
)
def test_name_that_is_not_our_word_is_reported(offences, text, name, word):
    line = len(text.splitlines())
    assert offences(in_package(text + "\n")) == [f"msrun/a.py:{line}: {name}: our word is {word}"]


@pytest.mark.parametrize(
    "text", ["x.f(rank_id=1)", "x = 'worker_num'", "print(x.rank_id)", "rank_ids = []"]
)
def test_names_of_others_are_tidy(offences, text):
    assert offences(in_package(text + "\n")) == []


def test_peers_words_are_tidy_where_they_are_spoken(offences):
    files = {"ranktable/__init__.py": "rank_id = 0\n"}
    for path in tidy.OTHER_VOCABULARY:
        if path.endswith(".py"):
            files[path] = "WORKER_NUM = 1  # the meta server's\n"
            module = path.removesuffix(".py").replace("/", ".")
            files[f"{path.rpartition('/')[0]}/__init__.py"] = ""
            files["msrun/__main__.py"] = files.get("msrun/__main__.py", "") + f"import {module}\n"
    assert offences(files) == []


def test_phrase_that_is_not_our_word_is_reported(offences):
    assert offences(in_package('"""Wait.\n\nA timed-out node is gone.\n"""\n')) == [
        'msrun/a.py:3: "timed-out node": our word is lost node'
    ]


def test_module_name_that_says_nothing_is_reported(offences):
    files = {"msrun/__init__.py": "import msrun.utils\n", "msrun/utils.py": ""}
    assert offences(files) == [
        "msrun/utils.py:1: utils says nothing; name the file for what it holds"
    ]


@pytest.mark.parametrize("name", ["BaseLauncher", "_BaseLauncher", "JobManager", "PathUtils"])
def test_class_name_that_says_nothing_is_reported(offences, name):
    assert offences(in_package(f"class {name}: ...\n")) == [
        f"msrun/a.py:1: {name} says nothing; name the class for its duty"
    ]


def test_class_named_baseline_is_tidy(offences):
    assert offences(in_package("class Baseline: ...\n")) == []


@pytest.mark.parametrize("path", ["README.md", "docs/a.md", ".github/workflows/ci.yml", ".ci/run"])
def test_path_of_one_machine_is_reported(offences, path):
    assert offences({path: f"\nsee {HOME_OF_ONE}/x\n"}) == [
        f"{path}:2: {HOME_OF_ONE} is a path of one machine"
    ]


@pytest.mark.parametrize(
    "text", ["https://example.org{}", "$HOME{}", "~{}", "a{}", "{}.example", "/home/u/project"]
)
def test_other_paths_are_tidy(offences, text):
    assert offences({"README.md": text.format(HOME_OF_ONE)}) == []


def test_builds_caches_environments_and_binaries_are_not_read(offences, tmp_path):
    (tmp_path / "picture.bin").write_bytes(b"\xff" + HOME_OF_ONE.encode())
    files = [
        "build/a.md",
        ".venv/a.md",
        "env/a.md",
        "msrun/__pycache__/a.md",
        "msrun.egg-info/a.md",
    ]
    assert offences({"env/pyvenv.cfg": "", **dict.fromkeys(files, HOME_OF_ONE)}) == []


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_in_a_checkout_only_tracked_files_are_read(offences, tmp_path):
    git = ["git", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "--quiet"], check=True)
    offences({"README.md": f"see {HOME_OF_ONE}/x\n"})
    subprocess.run([*git, "add", "README.md"], check=True)
    left = {"msrun_logs/job/msrun.log": HOME_OF_ONE, "notes.md": HOME_OF_ONE}

    assert offences(left) == [f"README.md:1: {HOME_OF_ONE} is a path of one machine"]


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_a_tracked_file_that_was_removed_is_tidy(offences, tmp_path):
    git = ["git", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "--quiet"], check=True)
    offences({"README.md": HOME_OF_ONE})
    subprocess.run([*git, "add", "README.md"], check=True)
    (tmp_path / "README.md").unlink()

    assert offences({}) == []


def test_an_archive_inside_a_checkout_is_read_as_an_archive(offences, tmp_path):
    (tmp_path.parent / ".git").mkdir(exist_ok=True)
    assert len(offences({"README.md": HOME_OF_ONE})) == 1


def test_logs_that_a_first_job_left_in_an_archive_are_not_read(offences):
    assert offences({"msrun_logs/job/msrun.log": HOME_OF_ONE}) == []


@pytest.mark.parametrize(
    ("path", "old", "word"),
    [
        ("msrun/carry.py", "carry", "redistribute"),
        ("msrun/roles/agent.py", "roles", "processes"),
        ("ranktable/tables.py", "tables", "sparse_embedding"),
    ],
)
def test_module_of_a_private_word_is_reported(offences, path, old, word):
    module = path.removesuffix(".py").replace("/", ".")
    files = {"msrun/__init__.py": f"import {module}\n", path: ""}
    assert offences(files) == [f"{path}:1: {old} is a riddle; say {word}"]


@pytest.mark.parametrize(
    ("text", "old", "word"),
    [
        ("class Keeper: ...", "Keeper", "SchedulerHost"),
        ("class _LeftOut: ...", "_LeftOut", "PlaceholderModule"),
        ("def _in_mindspores_words(): ...", "_in_mindspores_words", "from_mindspore_notation"),
    ],
)
def test_definition_of_a_private_word_is_reported(offences, text, old, word):
    assert offences(in_package(text + "\n")) == [f"msrun/a.py:1: {old} is a riddle; say {word}"]


@pytest.mark.parametrize(
    "text", ["kept = []", "def ask(): ...", "x.seat()", "from a import World", "account = 1"]
)
def test_innocent_use_of_such_a_word_is_tidy(offences, text):
    assert offences(in_package(text + "\n")) == []


def test_names_of_messages_stay(offences):
    path = f"{tidy.WIRE_FORMAT}a.py"
    files = {"msrun/__init__.py": "import msrun.cluster.wire.a\n", path: "class Question: ...\n"}
    assert offences(files) == []


def test_class_name_with_two_meanings_is_reported(offences):
    files = {
        "msrun/__init__.py": "import msrun.a\nimport msrun.b\n",
        "msrun/a.py": "x = 1\nclass Plan: ...\n",
        "msrun/b.py": "class Plan: ...\n",
        "tests/test_a.py": "class Plan: ...\n",
    }
    assert offences(files) == [
        "msrun/a.py:2: Plan is another class in msrun/b.py",
        "msrun/b.py:1: Plan is another class in msrun/a.py",
    ]


@pytest.mark.parametrize(("count", "problems"), [(20, 0), (21, 1)])
def test_folder_of_more_than_20_files_is_reported(offences, count, problems):
    files = {f"tests/unit/test_{number}.py": "" for number in range(count)}
    sentence = "tests/unit:1: folder has 21 Python files, the limit is 20"
    assert offences(files) == [sentence] * problems


def test_flat_scripts_are_tidy(offences):
    assert offences({f"scripts/s{number}.py": "" for number in range(21)}) == []


LONG_LINE = "word " * 20 + "x"


@pytest.mark.parametrize("path", ["README.md", "docs/tutorial/first_job.md", "docs/decisions/1.md"])
def test_long_line_of_prose_is_reported(offences, path):
    assert offences({path: f"x\n{LONG_LINE}\n"}) == [
        f"{path}:2: line has 101 columns, the limit is 100"
    ]


@pytest.mark.parametrize(
    "text",
    [
        LONG_LINE[:-1],
        f"| {LONG_LINE} |",
        f"    {LONG_LINE}",
        f"```sh\n{LONG_LINE}\n```",
        f"see [x](https://example.org/{'x' * 90})",
        f"<!-- {LONG_LINE} -->",
    ],
)
def test_line_that_cannot_be_wrapped_is_tidy(offences, text):
    assert offences({"README.md": text + "\n"}) == []


def test_command_prints_problems_and_exits_1(tmp_path, capsys):
    (tmp_path / "msrun").mkdir()
    (tmp_path / "msrun" / "a.py").write_text("import pickle\n")
    assert tidy.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "msrun/a.py:1: no module of the packages imports or names this file",
        "msrun/a.py:1: pickle runs code from data; use msgspec",
    ]


def test_command_on_a_tidy_tree_says_nothing(tmp_path, capsys):
    assert tidy.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == ""
