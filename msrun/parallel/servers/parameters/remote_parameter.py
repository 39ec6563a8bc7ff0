"""What a rank knows of one parameter that lives on servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

from msrun import environ
from msrun.cluster.servers.ownership import Table
from msrun.errors import ConfigError
from msrun.parallel.servers.contents import slices_for
from msrun.parallel.servers.first_rows.meta_tables import source_of, without_memory
from msrun.parallel.servers.parameters.chosen import KEY
from msrun.transport.data_sockets import FRAME_BYTES_MAX


class RemoteParameter:
    """One parameter that lives on servers.

    Args:
        name: Its first name in the model.
        parameter: It.
        lookups: The modules that look it up, where nothing else uses it; else none.
    """

    def __init__(
        self, name: str, parameter: Parameter, lookups: list[nn.Embedding | nn.EmbeddingBag]
    ) -> None:
        self.name = name
        self.parameter = parameter
        self.is_table = bool(lookups)
        self.is_sparse = bool(lookups) and all(module.sparse for module in lookups)
        # Of a table that no rank has.
        self.source = source_of(parameter)
        self.device, self.dtype, self.shape = parameter.device, parameter.dtype, parameter.shape
        rows = self.shape[0] if parameter.dim() else 1
        self.row_bytes = parameter.nbytes // max(rows, 1)
        if self.row_bytes > FRAME_BYTES_MAX or rows < 1:
            text = f"{KEY}: {name} of shape {tuple(self.shape)} has no row that fits a message"
            raise ConfigError(text, hint=f"a row has at most {FRAME_BYTES_MAX} bytes")
        # A copy travels whole: with few slices it is copied least on the way.
        servers = environ.servers_place(environ.current()).count
        sizes = (rows, self.row_bytes)
        slices = slices_for(*sizes) if self.is_table else slices_for(*sizes, servers)
        self.table = Table(name=name, rows=rows, row_bytes=self.row_bytes, slices=slices)

    def release(self) -> None:
        """Give up the memory of a table."""
        if self.is_table:
            self.parameter.data = without_memory(self.shape, self.dtype, self.device)

    def renew(self, slices: Mapping[int, Tensor]) -> None:
        """Have the values of these slices, in the memory that is there."""
        here = self.parameter.data
        rows = here if here.dim() else here.view(1)
        for index, piece in slices.items():
            rows[index :: self.table.slices].copy_(piece)

    def fill(self, whole: Tensor) -> None:
        """Have these values, in the memory that is there."""
        whole = whole.reshape(self.shape)
        if self.is_table:
            self.parameter.data = whole.to(self.device)
        else:
            self.parameter.data.copy_(whole)


def remote_parameters(model: nn.Module, names: set[str]) -> list[RemoteParameter]:
    """Return the parameters of `model` with these names.

    Raises:
        ConfigError: One of them cannot live on servers.
    """
    users: dict[Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            users.setdefault(parameter, []).append((module, attribute))
    found = []
    for name, parameter in model.named_parameters():
        if name in names:
            owners = users[parameter]
            lookups: list[Any] = [
                module
                for module, attribute in owners
                if type(module) in {nn.Embedding, nn.EmbeddingBag} and attribute == "weight"
            ]
            only = lookups if len(lookups) == len(owners) else []
            found.append(RemoteParameter(name, parameter, only))
            for module, _ in owners:
                if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
                    continue
                # A copy is renewed by each step, and would lose what the lookup has written.
                is_counted = module.scale_grad_by_freq and bool(only)
                if module.max_norm is not None or is_counted:
                    option = "scale_grad_by_freq" if is_counted else "max_norm"
                    text = f"{KEY}: {name} has {option}, which needs the whole table"
                    raise ConfigError(text)
    return found
