"""Modules as a plan is checked against them, and the rules that a plan that ships has for them."""

from __future__ import annotations

import msgspec

from msrun.parallel.settings.plan_rules import PlanRule


class ModuleShape(msgspec.Struct, frozen=True, kw_only=True):
    """Kind and parameters of one module.

    Args:
        kind: Name of its class.
        base: Class whose styles it takes: `Linear`, `Embedding`, `Conv1D`, `Experts`, `Conv` (a
            convolution), `ConvTranspose` or `GroupedConv`; empty if it takes `sequence` alone.
        params: Name of each parameter of the module itself -> its shape.
        shared: Parameter -> its further names in the model, if it has several.
        adapters: Of a LoRA layer, the names of its modules: the layer that it adapts, those of
            `lora_A`, those of `lora_B`; else None.
        computed: Parameters of its class that it computes from others -> their shape, which is
            empty unless `nn.utils.parametrize` computes the weight of a product, a table or a
            convolution.
        has_own_forward: Whether it computes otherwise than the class `kind` or `base` of torch.
        members: Modules of a list or mapping of modules.
    """

    kind: str
    base: str = ""
    params: dict[str, tuple[int, ...]]
    shared: dict[str, tuple[str, ...]] = {}
    adapters: tuple[str, tuple[str, ...], tuple[str, ...]] | None = None
    computed: dict[str, tuple[int, ...]] = {}
    has_own_forward: bool = False
    members: int = 0


class NamedRules(msgspec.Struct, frozen=True, kw_only=True):
    """The rules that a plan that ships has for one model.

    Args:
        name: Name of the plan.
        rules: Module -> its rule.
    """

    name: str
    rules: dict[str, PlanRule]
