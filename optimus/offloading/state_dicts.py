"""Hooks that let `state_dict` and `load_state_dict` of an offloaded model use host memory."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from optimus.errors import refuse_if
from optimus.offloading.checks import NotCopied


class Owner(Protocol):
    """The offloaded model."""

    named: dict[str, nn.Parameter]
    """The parameters by name."""

    def keep(self, *handles: RemovableHandle) -> None:
        """Keep handles of hooks, to remove the hooks when the offloading ends."""

    def show_values(self, parameters: dict[str, nn.Parameter]) -> None:
        """Wait for all updates. Then set `data` of each offloaded parameter in `parameters` to a
        view of host memory."""

    def hide_values(self, parameters: dict[str, nn.Parameter]) -> None:
        """Undo `show_values`."""

    def adopt_values(self, parameters: dict[str, nn.Parameter]) -> None:
        """Set the master weights of parameters from the values that were written to the parameters
        after `show_values`."""


class StateDictHooks(NotCopied):
    """Hooks that let `state_dict` and `load_state_dict` use the values on the host."""

    def __init__(self, owner: Owner, model: nn.Module) -> None:
        self._owner = owner
        self._names = {id(parameter): name for name, parameter in owner.named.items()}
        self._modules = [m for m in model.modules() if any(True for _ in m.parameters(False))]
        self._alone: dict[str, Tensor] = {}
        """A dict from the name of a parameter to a tensor whose storage has only the elements of
        this parameter."""

    def register(self) -> None:
        """Register the hooks of all modules that have parameters."""
        for module in self._modules:
            # torch sets an attribute on each hook. A bound method has no settable attributes, but a
            # `partial` has.
            self._owner.keep(
                module.register_state_dict_pre_hook(partial(self._show)),
                module.register_state_dict_post_hook(partial(self._hide)),
                module.register_load_state_dict_pre_hook(self._before_load),
                module.register_load_state_dict_post_hook(self._after_load),
            )

    def _parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        named = {self._names.get(id(p), ""): p for p in module.parameters(recurse=False)}
        return {name: parameter for name, parameter in named.items() if name}

    def _show(self, module: nn.Module, *_: Any) -> None:
        self._owner.show_values(self._parameters(module))

    def _hide(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        for key, parameter in module._parameters.items():
            name, value = self._names.get(id(parameter)), state_dict.get(prefix + key)
            # With keep_vars=True, the value is the parameter.
            if name is not None and isinstance(value, Tensor) and value is not parameter:
                self._separate(name, value)
        self._owner.hide_values(self._parameters(module))

    def _separate(self, name: str, value: Tensor) -> None:
        """Give a tensor of a state dict a separate storage. This storage is in the same memory, but
        has only the elements of this tensor.

        The parameters of a chunk share a storage. safetensors and accelerate treat all tensors that
        share a storage as tied parameters, and save only a single tensor of each storage.
        Parameters that are really tied have the same `name`, so that they still share a storage in
        the state dict.

        Args:
            name: Name of the parameter in `Owner.named`.
            value: The tensor of the state dict. Its storage is replaced.
        """
        alone = self._alone.get(name)
        if alone is None or alone.data_ptr() != value.data_ptr():
            with torch.inference_mode(False):
                # `alone` keeps the detached tensor, and with it the memory. `value` itself would
                # not keep it, because its storage is replaced below.
                alone = self._alone[name] = torch.from_dlpack(value.detach())
        if alone.shape == value.shape:
            value.data = alone  # this keeps the version counter of the parameter

    def _before_load(
        self, module: nn.Module, state_dict: Any, prefix: str, local_metadata: Any, *_: Any
    ) -> None:
        refuse_if(
            local_metadata.get("assign_to_params_buffers", False),
            "load_state_dict(assign=True) would replace offloaded parameters; use assign=False",
        )
        self._show(module)

    def _after_load(self, module: nn.Module, *_: Any) -> None:
        parameters = self._parameters(module)
        self._owner.adopt_values(parameters)
        self._owner.hide_values(parameters)
