"""A device kind `npu` and a backend `hccl` in plain Python, for what `torch_npu` adds to torch.

Tensors of the kind lie in the memory of the host, but torch sees them on the device: what has no
kernel there comes to `_on_host`, which runs it on the same memory.  Collectives of the device are
those of gloo on that memory.  What is missing is what Python cannot give: memory that shrinks,
streams that run beside each other, random numbers of the device's own.
"""

import contextlib
import ctypes
import sys
import types
import warnings
from collections import Counter

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.utils import backend_registration, dlpack
from torch.utils._pytree import tree_leaves, tree_map

NAME = "npu"
# Kinds of devices in DLPack's header: that of the host, and that of an extension.
_HOST, _EXTENSION = 1, 12
_COLLECTIVES = ("allreduce_", "broadcast_", "allgather_")
_COLLECTIVES += ("_allgather_base_", "_reduce_scatter_base_", "send", "recv_")

_libraries = []
calls = Counter()
# Bytes of tensors that were copied between the host and the device, by the kind they came to.
copied = Counter()


def _seen_as(tensor, kind):
    """Return the memory of `tensor` as a tensor on a device of that kind."""
    capsule = dlpack.to_dlpack(tensor.detach())
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    header = pointer(capsule, b"dltensor")
    where = (ctypes.c_int32 * 2).from_address(header + ctypes.sizeof(ctypes.c_void_p))
    where[:] = kind, 0 if kind == _HOST else torch.npu.current_device()
    return dlpack.from_dlpack(capsule)


def _is_here(value):
    return isinstance(value, torch.Tensor) and value.device.type == NAME


def _host(value):
    return _seen_as(value, _HOST) if _is_here(value) else value


def _on_host(operator, *args, **options):
    """Run `operator`, for which the device has no kernel, on the memory of its tensors."""
    calls["operators"] += 1
    given = [value for value in tree_leaves((args, options)) if _is_here(value)]
    there = {id(value): _host(value) for value in given}

    def moved(value):
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return there.get(id(value), value)

    found = operator(*tree_map(moved, args), **tree_map(moved, options))
    back = {id(there[id(value)]): value for value in given}

    def returned(value):
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in back:
            return back[id(value)]
        if operator.is_view:
            return _view_of(given[0], there[id(given[0])], value)
        return _seen_as(value, _EXTENSION)

    return tree_map(returned, found)


def _view_of(base, base_there, view):
    """Return the part of `base` that `view` is of the same memory."""
    apart = (view.data_ptr() - base_there.data_ptr()) // view.element_size()
    return _as_strided(base, view.shape, view.stride(), base.storage_offset() + apart)


def _as_strided(tensor, size, stride, storage_offset=None):
    """Return a view: the kernel of the host looks at sizes alone."""
    kernel = torch.ops.aten.as_strided.default
    return kernel._op_dk(torch._C.DispatchKey.CPU, tensor, size, stride, storage_offset)


def _copy(source, target, non_blocking=False):  # noqa: FBT002 - torch's schema
    del non_blocking
    if source.device.type != target.device.type:
        copied[target.device.type] += source.nbytes
    _host(target).copy_(_host(source))
    return target


def _collective(name):
    operator = getattr(torch.ops.c10d, name).default

    def run(*args):
        calls[name] += 1
        there = {}

        def moved(value):
            if _is_here(value):
                there[value.data_ptr()] = value
            return _host(value)

        found = operator(*tree_map(moved, args))
        return tree_map(
            lambda value: there[value.data_ptr()] if isinstance(value, torch.Tensor) else value,
            found,
        )

    return run


def _nothing(*args, **options):
    del args, options


class Stream:
    """Work in order: there is one, and it is the host."""

    def __init__(self, *args, **options):
        pass

    def __getattr__(self, name):
        return _nothing


class Npu(types.ModuleType):
    """What `torch_npu` adds as `torch.npu`."""

    Stream = Event = Stream

    def __init__(self, devices):
        super().__init__("torch.npu")
        self.current, self.devices = 0, devices

    def device_count(self):
        return self.devices

    def is_available(self):
        return True

    def is_initialized(self):
        return True

    def _is_in_bad_fork(self):
        return False

    def current_device(self):
        return self.current

    def set_device(self, device):
        self.current = torch.device(device).index

    def manual_seed_all(self, seed):
        pass

    manual_seed = manual_seed_all

    def get_rng_state(self, device=None):
        del device
        return torch.get_rng_state()

    def set_rng_state(self, state, device=None):
        del state, device

    def synchronize(self, device=None):
        pass

    def current_stream(self, device=None):
        del device
        return Stream()

    def stream(self, stream):
        del stream
        return contextlib.nullcontext()


def install(devices=1):
    """Give this process the kind and the backend.

    Args:
        devices: How many it sees; gradients can be computed on the first alone, as a guard in
            Python cannot tell autograd of others.
    """
    module = Npu(devices)
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=module)
    sys.modules["torch_npu"] = types.ModuleType("torch_npu")
    others = torch.library.Library("_", "IMPL")
    others.fallback(_on_host, "PrivateUse1")
    own = torch.library.Library("aten", "IMPL")
    for name in ("_copy_from", "_copy_from_and_resize"):
        own.impl(name, _copy, "PrivateUse1")
    own.impl("as_strided", _as_strided, "PrivateUse1")
    c10d = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for name in _COLLECTIVES:  # torch's own would hand gloo memory that it does not know
            c10d.impl(name, _collective(name), "PrivateUse1", allow_override=True)
    _libraries.extend((others, own, c10d))
    # Memory of the device cannot shrink, so what was gathered stays, to be written again.
    _fsdp_param.free_storage = _nothing
    dist.Backend.register_backend(
        "hccl",
        lambda store, rank, size, timeout: dist.ProcessGroupGloo(
            store, rank, size, timeout=timeout
        ),
        devices=["cpu", NAME],
    )
