"""Variables that a script sets before `import torch`, in a process where torch is loaded already.

Under `python` they take effect, because torch reads them when it is imported.  A forked worker has
torch from the forkserver, so here they are noticed and followed:

- Where torch can be told later, it is told at the script's first `import torch`: until then
  `sys.modules` has no `torch`, and a finder that gives it back looks at the environment.
- Where it cannot, a script that sets such a variable is recognized before anything is loaded, and
  each worker is an interpreter of its own.  One that is set in a way that reading the script does
  not show, such as by a module that it imports, is named in one sentence.
"""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.machinery
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from msrun import environ
from msrun.supervise.orders import Configure
from msrun.worker import math_threads

_TORCH = "torch"
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_LOGS = ("TORCH_LOGS", "TORCH_LOGS_OUT")
_DEBUG = "TORCH_DISTRIBUTED_DEBUG"
_JIT = "PYTORCH_JIT"
# What torch, its libraries and numpy read while they are imported, and never again.  Read off a
# tracer of `getenv` and `os.environ`; `tests/torch/launch` looks whether a new torch reads more.
AT_IMPORT = re.compile(
    r"(GOMP|KMP|MKLDNN|ONEDNN|DNNL|NPY)_\w+|OMP_(?!NUM_THREADS$)\w+|MKL_(?!NUM_THREADS$)\w+"
    r"|OPENBLAS_(?!NUM_THREADS$)\w+|GOTO_NUM_THREADS|KINETO_USE_DAEMON|FX_PATCH_GETITEM"
    r"|PYTORCH_(JIT_\w+|MATCHER_LOGLEVEL|API_USAGE_STDERR)"
    r"|TORCH_(CPP_LOG_LEVEL|SHOW_CPP_STACKTRACES|CUSTOM_TERMINATE|ALLOW_TF32_CUBLAS_OVERRIDE)"
    r"|TORCH_((BLAS|LINALG|ROCM_FA)_PREFER_\w+|TRACE|DTRACE|LOGS_FORMAT|LOGS_TRACE_ID_FILTER)"
    r"|TORCH_(USE_RTLD_GLOBAL|DEVICE_BACKEND_AUTOLOAD|CUDA_SANITIZER|CUDAGRAPH_GC)"
    r"|TORCH_(FAKE_TENSOR_DEBUG|DISTRIBUTED_USE_TORCHCOMMS|DISTRIBUTED_COMPILE_ON_ONE_RANK)"
    r"|TORCH_COMPILE_\w+|TORCH_ENRICH_RPOFILER_STACK_TRACE|TORCH_PYTHON_NATIVE_\w+"
    r"|TORCHDYNAMO_(EXTENDED_DEBUG|TRANSLATION|NO_DATA_DEPENDENT)_\w+"
    r"|TORCHEXPORT_EXTENDED_DEBUG_\w+|TORCHINDUCTOR_FORCE_DISABLE_CACHES"
    r"|COMPILE_STROBELIGHT_\w+|NUMPY_(MADVISE_HUGEPAGE|WARN_IF_NO_MEM_POLICY)"
)
# These are read with the compiler, which the forkserver loads for some jobs.
_COMPILER = re.compile(r"TORCH(DYNAMO|INDUCTOR|_COMPILE)_\w+")
_SOURCE_BYTES_MAX = 1 << 20
_WRITERS = ("putenv", "setdefault", "update")


def why_exec(configure: Configure) -> str:
    """Return why the workers must load torch themselves; empty when forked ones may have it."""
    # The compiler is loaded with what a parallel configuration preloads.
    has_compiler = any(module.startswith("msrun.parallel") for module in configure.preload)
    files = list(_files(configure))
    names = sorted({name for file in files for name in _set_by_script(file, has_compiler)})
    if not names:
        return ""
    name = Path(configure.argv[0]).name
    return f"{name} sets {', '.join(names)}, which torch reads only while it is imported"


def _files(configure: Configure) -> Iterator[str]:
    """Yield the files that run as the program; of a module its packages too.  Imports nothing."""
    program = configure.argv[0]
    if configure.kind == "script":
        path = os.path.join(configure.cwd, program)  # noqa: PTH118 - as it was given
        yield f"{path}/__main__.py" if Path(path).is_dir() else path
    if configure.kind != "module":
        return
    places = [configure.cwd, *sys.path]
    parts = program.split(".")
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        spec = importlib.machinery.PathFinder.find_spec(name, places) if places else None
        if spec is None:
            return  # running it will say so
        if spec.origin:
            yield spec.origin
        places = list(spec.submodule_search_locations or ())
    yield from (f"{place}/__main__.py" for place in places)


def watch() -> None:
    """From now on, tell torch of changed variables at the program's first `import torch`."""
    torch = sys.modules.pop(_TORCH, None)
    if torch is not None:
        sys.meta_path.insert(0, _Finder(torch, environ.current()))


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives back the loaded torch, once.

    Args:
        torch: The module.
        before: The environment when it was taken away.
    """

    def __init__(self, torch: ModuleType, before: Mapping[str, str]) -> None:
        self._torch = torch
        self._before = before
        self._spec = torch.__spec__

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find torch; whoever only asks for it changes nothing."""
        del path, target
        if fullname != _TORCH:
            return None
        spec = importlib.machinery.ModuleSpec(fullname, self, origin=self._torch.__file__)
        spec.submodule_search_locations = list(self._torch.__path__)
        spec.has_location = True
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return the loaded module instead of a new one."""
        del spec
        return self._torch

    def exec_module(self, module: ModuleType) -> None:
        """Follow the environment; the module's code has run before."""
        module.__spec__ = self._spec
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        _follow(self._before, environ.current())


def _follow(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    changed = {name for name in {*before, *now} if before.get(name) != now.get(name)}
    if not changed:
        return
    if changed.intersection(_THREADS):
        math_threads.follow_environment(was=before.get(_THREADS[0], ""))
    if _DEBUG in changed:
        sys.modules["torch.distributed"].set_debug_level_from_env()
    if changed.intersection((*_LOGS, _JIT)):
        # By name: the room of torch is above this one.
        compat = importlib.import_module("msrun.parallel.torch_compat")
        if changed.intersection(_LOGS):
            compat.follow_log_variables()
        if _JIT in changed:
            compat.follow_jit_variable()
    late = sorted(name for name in changed if _is_too_late(name, now))
    if late and now.get("RANK") == "0":
        sys.stderr.write(
            f"[msrun] {', '.join(late)} changed after torch was loaded, without effect: "
            "start the job with --start-method exec\n"
        )


def _has_compiler() -> bool:
    """Tell whether torch's compiler is loaded, with its configuration."""
    return any(name.endswith("dynamo.config") for name in sys.modules)


def _is_too_late(name: str, now: Mapping[str, str]) -> bool:
    if name == "MKL_NUM_THREADS":  # torch sets both by one number
        return now.get(name) != now.get(_THREADS[0])
    if _COMPILER.fullmatch(name) and _has_compiler():
        return True
    return bool(AT_IMPORT.fullmatch(name))


def _set_by_script(path: str, has_compiler: bool) -> set[str]:  # noqa: FBT001 - private
    """Return variables that the script sets before it imports torch, and torch could not follow."""
    try:
        source = Path(path).read_bytes()[:_SOURCE_BYTES_MAX]
        pattern = AT_IMPORT.pattern + "|" + _COMPILER.pattern
        if not re.search(pattern.encode(), source):  # as in nearly all scripts
            return set()
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return set()  # running it will say so
    nodes = list(ast.walk(tree))
    first = min(filter(None, map(_line_of_import, nodes)), default=sys.maxsize)
    names = {name for node in nodes for line, name in _writes(node) if line < first}
    return {
        name
        for name in names
        if AT_IMPORT.fullmatch(name) or (has_compiler and _COMPILER.fullmatch(name))
    }


def _line_of_import(node: ast.AST) -> int:
    """Return the line where this part of a program imports torch, 0 when it does not."""
    match node:
        case ast.Import(names=names):
            modules = [alias.name for alias in names]
        case ast.ImportFrom(module=str(module), level=0):
            modules = [module]
        case _:
            return 0
    return node.lineno if any(name.partition(".")[0] == _TORCH for name in modules) else 0


def _writes(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of each variable that this part of a program sets."""
    match node:
        case ast.Assign(targets=targets):
            for target in targets:
                if isinstance(target, ast.Subscript) and _is_environ(target.value):
                    yield from _constant(target.slice)
        case ast.Call(func=ast.Attribute(value=value, attr=attr), args=args, keywords=keywords):
            if attr in _WRITERS and (_is_environ(value) or attr == "putenv"):
                yield from _keys(*args[:1])
                yield from ((node.lineno, keyword.arg or "") for keyword in keywords)
        case ast.AugAssign(target=target, value=value) if _is_environ(target):
            yield from _keys(value)


def _keys(*arguments: ast.expr) -> Iterator[tuple[int, str]]:
    """Yield the names that a text or a dict stands for."""
    for argument in arguments:
        for key in argument.keys if isinstance(argument, ast.Dict) else [argument]:
            yield from _constant(key)


def _constant(node: ast.AST | None) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.lineno, node.value


def _is_environ(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(attr="environ") | ast.Name(id="environ"):
            return True
    return False
