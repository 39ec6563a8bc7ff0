"""Limits of the house that ruff does not know: `python scripts/tidy.py [ROOT]`.

Prints `file:line: sentence` for every problem and exits 1 when there is one.
Needs nothing but the standard library.  In a git checkout it reads the tracked files, so that
what a job or a tool leaves behind is nobody's problem; in an unpacked archive, all of them.
"""

# tidy: long file, it runs by path and alone, so tables of words and checks share one file

from __future__ import annotations

import ast
import io
import os
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

FUNCTION_LINES_MAX = 60
FILE_LINES_MAX = 500
FOLDER_FILES_MAX = 20
PROSE_COLUMNS_MAX = 100

PACKAGES = ("msrun", "launchers", "ranktable")
OUR_CODE = (*PACKAGES, "scripts")
ALL_CODE = (*OUR_CODE, "tests", "examples")

# A file may be longer where splitting it would divide one idea; it says which.
LONG_FILE = re.compile(r"^# tidy: long file, \S.{20,}$", re.MULTILINE)

# Modules that nothing imports and no string in the packages names.
ENTRY_POINTS = {
    "msrun/__main__.py": "`python -m msrun` runs it",
}

# Only this file may use names that torch does not promise to keep.
TORCH_ADAPTER = "msrun/parallel/torch_compat.py"
TORCH_PRIVATE = re.compile(r"torch(\.\w+)*\._(?!_)\w+(\.\w+)*(:\w+)?")

# Whoever can write such bytes can run code in their reader.
UNSAFE_MODULES = {"_pickle", "cloudpickle", "dill", "marshal", "pickle", "shelve"}
# The one file that may, for calls of Python that stay on one machine: decision 0032.
PICKLER = "msrun/worker/pickled.py"

# Words for names, without those that also have an innocent use.
WORD_OF = {
    "dist_rank": "rank",
    "global_rank": "rank",
    "local_id": "local_rank",
    "local_worker_num": "local_world_size",
    "machine_rank": "node_rank",
    "mesh_dim": "axis",
    "meta_server": "scheduler",
    "nproc": "local_world_size",
    "num_machines": "nnodes",
    "num_processes": "world_size",
    "parallel_num": "degree",
    "rank_id": "rank",
    "restart_count": "generation",
    "trainer": "worker",
    "worker_num": "world_size",
}
# Names of modules, classes and functions that had a private meaning here; the field has these.
FIELD_WORD_OF_MODULE = {
    "account": "cost_breakdown",
    "alike": "module_dedup",
    "ask": "offline/search",
    "carry": "redistribute",
    "draws": "step_rng",
    "kept": "saved_activations",
    "layouts": "mesh_search",
    "meeting": "rendezvous",
    "member": "scheduler_host",
    "placement": "cpu_binding",
    "pulse": "freeze_detector",
    "readings": "uses",
    "refused": "unsupported_ops",
    "roles": "processes",
    "saved": "plan_io",
    "seats": "rank_assignment",
    "staged": "pipeline_executor",
    "tables": "sparse_embedding",
    "warm": "preload",
    "world": "system",
    "zero_order": "collective_order",
}
FIELD_WORD_OF_DEFINITION = {
    "Account": "CostBreakdown",
    "Alike": "ModuleDeduplicator",
    "Because": "StopReason",
    "Birth": "SpawnContext",
    "Carrier": "Redistributor",
    "Contents": "ParameterSnapshot",
    "Draws": "StepRng",
    "Keeper": "SchedulerHost",
    "Kept": "SavedActivations",
    "LeftOut": "PlaceholderModule",
    "Lives": "CrashLoopGuard",
    "Meeting": "Rendezvous",
    "Pulse": "FreezeDetector",
    "Question": "SearchRequest",
    "UnitOrder": "CollectiveOrder",
    "World": "System",
    "in_mindspores_words": "from_mindspore_notation",
    "seat": "assign_ranks",
}
# The names of these classes are the tags of messages: renaming one changes the protocol.
WIRE_FORMAT = "msrun/cluster/wire/"
PHRASES = (
    (re.compile(r"\bmeta[- ]servers?\b", re.IGNORECASE), "scheduler"),
    (re.compile(r"\bmachine[- ]rank\b", re.IGNORECASE), "node_rank"),
    (re.compile(r"\b(?:dead|timed[- ]out) nodes?\b", re.IGNORECASE), "lost node"),
    (re.compile(r"\bmesh dim(?:ension)?s?\b", re.IGNORECASE), "axis"),
)
# Files that speak the peers' language to the outside: whole folders end with a slash.
OTHER_VOCABULARY = (
    "ranktable/",
    "msrun/environ.py",
    "msrun/cli/options/catalog.py",
    "msrun/cli/options/foreign.py",
    "msrun/cli/options/peers.py",
)
EMPTY_NAMES = {"base", "common", "helper", "helpers", "manager", "misc", "util", "utils"}
EMPTY_CLASS = re.compile(r"_*Base[A-Z]|.*(?:Manager|Helper|Utils?)$")

UNOWNED = re.compile(r"\b(TODO|FIXME|XXX)\b(?!.*#\d)")
WORKPLACE = re.compile(r"(?<![\w.~/})$-])/(?:work|root|Users/\w+|tmp/venv\w*)(?![\w.-])")
SKIPPED_FOLDERS = {
    "__pycache__",
    "build",
    "ckpt",
    "dist",
    "logs",
    "msrun_logs",
    "node_modules",
    "site",
}
HIDDEN_FOLDERS = {".ci", ".github"}

PROSE = re.compile(r"(?:docs/.*|README|CONTRIBUTING|CHANGELOG|SECURITY)\.md")
LINK_TARGET = re.compile(r"\]\([^)]*\)|<?https?://\S+|^\[[^\]]+\]: .*$|!\[")


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One line of output."""

    path: str
    line: int
    sentence: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.sentence}"


@dataclass(frozen=True, slots=True)
class Source:
    """A parsed Python file; `path` is relative to the root, with forward slashes."""

    path: str
    text: str
    nodes: Sequence[ast.AST]

    @property
    def module(self) -> str:
        """Dotted name under which the packages import this file."""
        parts = PurePosixPath(self.path).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def problem(self, where: ast.expr | ast.stmt | ast.arg | int, sentence: str) -> Problem:
        """Return `sentence` as a problem at a node or a line number of this file."""
        return Problem(self.path, where if isinstance(where, int) else where.lineno, sentence)


def check_file_lines(source: Source) -> Iterator[Problem]:
    """Report a file that is too long and gives no reason: `# tidy: long file, REASON`."""
    count = len(source.text.splitlines())
    if count > FILE_LINES_MAX and not LONG_FILE.search(source.text):
        sentence = f"file has {count} lines, the limit is {FILE_LINES_MAX}"
        yield source.problem(FILE_LINES_MAX + 1, sentence)


def check_function_lines(source: Source) -> Iterator[Problem]:
    """Report functions that are too long, from `def` to their last line."""
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            count = (node.end_lineno or node.lineno) - node.lineno + 1
            if count > FUNCTION_LINES_MAX:
                limit = f"the limit is {FUNCTION_LINES_MAX}"
                yield source.problem(node, f"{node.name} has {count} lines, {limit}")


def check_unowned(source: Source) -> Iterator[Problem]:
    """Report comments that promise work without naming its issue."""
    if not UNOWNED.search(source.text):
        return
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        promise = UNOWNED.search(token.string) if token.type == tokenize.COMMENT else None
        if promise:
            yield source.problem(token.start[0], f"{promise[1]} names no issue, such as #12")


def check_unsafe(source: Source) -> Iterator[Problem]:
    """Report what turns bytes or text into running code."""
    for node in source.nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for name in sorted({name.partition(".")[0] for name in _imported(node)}):
                if name in UNSAFE_MODULES and source.path != PICKLER:
                    yield source.problem(node, f"{name} runs code from data; use msgspec")
        elif isinstance(node, ast.Name) and node.id == "eval":
            yield source.problem(node, "eval runs code from data; parse the value instead")


def check_torch_private(source: Source) -> Iterator[Problem]:
    """Report private names of torch outside the adapter file."""
    if source.path == TORCH_ADAPTER:
        return
    aliases = _torch_aliases(source.nodes)
    for node in source.nodes:
        for name in _torch_names(node, aliases):
            if TORCH_PRIVATE.fullmatch(name):
                sentence = f"{name} is private to torch; reach it through {TORCH_ADAPTER}"
                yield source.problem(node, sentence)  # type: ignore[arg-type]


def check_words(source: Source) -> Iterator[Problem]:
    """Report names and phrases for which the house has another word."""
    yield from _check_empty_names(source)
    if source.path.startswith(OTHER_VOCABULARY):
        return
    for name, node in _definitions(source.nodes):
        word = WORD_OF.get(name.strip("_").lower())
        if word:
            yield source.problem(node, f"{name}: our word is {word}")
    for number, line in enumerate(source.text.splitlines(), 1):
        for pattern, word in PHRASES:
            for phrase in pattern.finditer(line):
                yield source.problem(number, f'"{phrase[0]}": our word is {word}')


def check_field_words(source: Source) -> Iterator[Problem]:
    """Report modules, classes and functions whose name an engineer would have to look up."""
    parts = PurePosixPath(source.path).with_suffix("").parts
    for part in dict.fromkeys((parts[-2], parts[-1])):
        word = FIELD_WORD_OF_MODULE.get(part)
        if word:
            yield source.problem(1, f"{part} is a riddle; say {word}")
    if source.path.startswith(WIRE_FORMAT):
        return
    for node in source.nodes:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            word = FIELD_WORD_OF_DEFINITION.get(node.name.strip("_"))
            if word:
                yield source.problem(node, f"{node.name} is a riddle; say {word}")


def check_class_names(sources: Iterable[Source]) -> Iterator[Problem]:
    """Report classes of the packages that share a name, so that each name has one meaning."""
    places: dict[str, list[tuple[Source, ast.ClassDef]]] = defaultdict(list)
    for source in sources:
        if source.path.startswith(_folders(PACKAGES)):
            for node in source.nodes:
                if isinstance(node, ast.ClassDef):
                    places[node.name].append((source, node))
    for name, definitions in places.items():
        paths = {source.path for source, _ in definitions}
        for source, node in definitions:
            others = sorted(paths - {source.path})
            if others:
                yield source.problem(node, f"{name} is another class in {', '.join(others)}")


def check_folders(sources: Iterable[Source]) -> Iterator[Problem]:
    """Report folders with more Python files than a reader takes in at a glance."""
    counts = Counter(PurePosixPath(source.path).parent.as_posix() for source in sources)
    for folder, count in counts.items():
        if count > FOLDER_FILES_MAX and f"{folder}/".startswith(_folders((*PACKAGES, "tests"))):
            sentence = f"folder has {count} Python files, the limit is {FOLDER_FILES_MAX}"
            yield Problem(folder, 1, sentence)


def check_imported(sources: Iterable[Source]) -> Iterator[Problem]:
    """Report modules of the packages that no other of their modules imports or names.

    A string counts when it is the module's dotted name or a `module:attribute`, as in
    the table of backends.
    """
    files = [source for source in sources if source.path.startswith(_folders(PACKAGES))]
    used = {name for source in files for name in _used(source) if name != source.module}
    for source in files:
        is_package = source.path.endswith("/__init__.py")
        if not is_package and source.path not in ENTRY_POINTS and source.module not in used:
            yield source.problem(1, "no module of the packages imports or names this file")


def check_workplace(path: str, text: str) -> Iterator[Problem]:
    """Report absolute paths that exist only on one developer's machine."""
    for number, line in enumerate(text.splitlines(), 1):
        for absolute in WORKPLACE.finditer(line):
            yield Problem(path, number, f"{absolute[0]} is a path of one machine")


def check_prose_columns(path: str, text: str) -> Iterator[Problem]:
    """Report lines of documentation that are too long to read in an editor.

    Tables and code blocks cannot be wrapped, and a link's target does not count.
    """
    if not PROSE.fullmatch(path):
        return
    in_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        is_prose = not in_code and not line.startswith(("    ", "|", "<!--"))
        columns = len(LINK_TARGET.sub("", line))
        if is_prose and columns > PROSE_COLUMNS_MAX:
            limit = f"the limit is {PROSE_COLUMNS_MAX}"
            yield Problem(path, number, f"line has {columns} columns, {limit}")


FILE_CHECKS: tuple[tuple[Callable[[Source], Iterator[Problem]], tuple[str, ...]], ...] = (
    (check_file_lines, (*OUR_CODE, "tests")),
    (check_function_lines, OUR_CODE),
    (check_unowned, ALL_CODE),
    (check_unsafe, PACKAGES),
    (check_torch_private, PACKAGES),
    (check_words, PACKAGES),
    (check_field_words, PACKAGES),
)
TREE_CHECKS = (check_imported, check_class_names, check_folders)


def check_tree(root: Path) -> list[Problem]:
    """Return every problem under `root`, in the order of files and lines."""
    problems: list[Problem] = []
    sources: list[Source] = []
    for path, text in _read_files(root):
        problems += check_workplace(path, text)
        problems += check_prose_columns(path, text)
        if path.endswith(".py") and path.startswith(_folders(ALL_CODE)):
            try:
                sources.append(Source(path, text, tuple(ast.walk(ast.parse(text)))))
            except SyntaxError as error:
                problems.append(Problem(path, error.lineno or 1, f"not Python: {error.msg}"))
    for source in sources:
        for check, folders in FILE_CHECKS:
            if source.path.startswith(_folders(folders)):
                problems += check(source)
    for check_all in TREE_CHECKS:
        problems += check_all(sources)
    return sorted(set(problems))


def _folders(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{name}/" for name in names)


def _read_files(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the relative path and the text of every text file of the project."""
    tracked = _tracked(root)
    for path in _walked(root) if tracked is None else tracked:
        file = root / path
        try:
            text = file.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):  # binary, a folder, or gone since it was listed
            continue
        yield path, text


def _tracked(root: Path) -> list[str] | None:
    """Return the paths that git tracks below `root`; None where it is no checkout, or git lacks."""
    if not (root / ".git").exists():  # an archive that was unpacked inside another checkout
        return None
    # As root git would not read a checkout of another user, such as CI's.
    command = ["git", "-c", "safe.directory=*", "-C", str(root), "ls-files", "-z"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return [os.fsdecode(path) for path in listed.stdout.split(b"\0") if path]


def _walked(root: Path) -> Iterator[str]:
    """Yield the paths of all files below `root` that belong to the project."""
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if _is_ours(Path(folder, name))]
        for file in files:
            yield Path(folder, file).relative_to(root).as_posix()


def _is_ours(folder: Path) -> bool:
    """Whether `folder` belongs to the project, and is no build, cache or environment."""
    if folder.name.startswith("."):
        return folder.name in HIDDEN_FOLDERS
    return (
        folder.name not in SKIPPED_FOLDERS
        and folder.suffix != ".egg-info"
        and not (folder / "pyvenv.cfg").exists()
    )


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """Yield the dotted names that an import statement may load."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif node.module:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _used(source: Source) -> Iterator[str]:
    """Yield dotted names that `source` imports, or spells out in a string."""
    for node in source.nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from _imported(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.partition(":")[0]


def _torch_aliases(nodes: Sequence[ast.AST]) -> dict[str, str]:
    """Return what each local name means, for names that imports of torch bind."""
    aliases = {"torch": "torch"}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname and _is_torch(alias.name):
                    aliases[alias.asname] = alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and _is_torch(node.module):
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return aliases


def _is_torch(module: str) -> bool:
    return module.partition(".")[0] == "torch"


def _torch_names(node: ast.AST, aliases: dict[str, str]) -> Iterator[str]:
    """Yield the full names under torch that `node` itself ends with."""
    match node:
        case ast.Import() | ast.ImportFrom():
            yield from _imported(node)
        case ast.Constant(value=str(text)):
            yield text
        case ast.Attribute(value=value, attr=attribute) if attribute.startswith("_"):
            names = [attribute]
            while isinstance(value, ast.Attribute):
                names.append(value.attr)
                value = value.value
            if isinstance(value, ast.Name) and value.id in aliases:
                yield ".".join([aliases[value.id], *reversed(names)])


def _definitions(
    nodes: Sequence[ast.AST],
) -> Iterator[tuple[str, ast.expr | ast.stmt | ast.arg]]:
    """Yield every name that a file chooses itself: not those it calls or passes on."""
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, node
            case ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name, node
            case ast.arg(arg=name) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name, node


def _check_empty_names(source: Source) -> Iterator[Problem]:
    """Report module and class names that say nothing."""
    stem = PurePosixPath(source.path).stem
    if stem in EMPTY_NAMES:
        yield source.problem(1, f"{stem} says nothing; name the file for what it holds")
    for node in source.nodes:
        if isinstance(node, ast.ClassDef) and EMPTY_CLASS.match(node.name):
            yield source.problem(node, f"{node.name} says nothing; name the class for its duty")


def main(arguments: list[str]) -> int:
    """Check the tree at the first argument, else the one this script belongs to."""
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    problems = check_tree(root)
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
