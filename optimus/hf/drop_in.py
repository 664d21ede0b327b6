"""`use_fast_moe`: makes Hugging Face models compute their experts with the kernels of
FastSparseMoE.

transformers 5 merges the parameters of all experts of a layer. `use_fast_moe` uses these merged
parameters without a copy. transformers 4 has one module per expert. `use_fast_moe` copies the
weights of these modules to merged parameters, but does not change the names of the weights in state
dicts.

This module recognizes classes by name and does not import transformers.

Dims: T tokens, D hidden, F intermediate of an expert, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import optimus_kernels as kernels
from optimus.errors import ConfigError, refuse_if

_Model = TypeVar("_Model", bound=nn.Module)
_HfModule = Any
"""Type of modules whose classes are defined by transformers or by users. Their attributes are
checked at run time by the functions of this file, not by type checkers."""

MERGED = (
    "OlmoeExperts",
    "FlexOlmoExperts",
    "MixtralExperts",
    "Qwen2MoeExperts",
    "Qwen3MoeExperts",
)
"""Names of transformers classes with merged experts. Each class computes the same function as
`FastExperts`."""
BY_MODULE = ("OlmoeSparseMoeBlock",)
"""Names of the supported transformers classes of MoE blocks that have one module per expert."""
_HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
    "_post_accumulate_grad_hooks",
)
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def use_fast_moe(model: _Model) -> _Model:
    """Replace the experts of all MoE blocks of a transformers model by `FastExperts`, in place.

    The state dict and the outputs of the router do not change. Call this function after loading
    weights and before creating an optimizer, because parameters may be replaced.

    Args:
        model: the model. It is not changed if an error is raised.

    Returns:
        `model`.

    Raises:
        ConfigError: the model has no MoE block, or is itself an MoE block that must be replaced.
        ConfigError: the experts are not supported. Experts are not supported, for example, if they
            have hooks or are quantized, offloaded or sharded.
    """
    all_blocks = [
        module
        for module in model.modules()
        if isinstance(module._modules.get("experts"), nn.Module)
    ]
    blocks: list[_HfModule] = [
        block for block in all_blocks if not isinstance(block.experts, FastExperts)
    ]
    refuse_if(
        not all_blocks,
        f"{type(model).__name__} has no MoE block; use_fast_moe supports "
        f"{', '.join(BY_MODULE)} and all blocks with experts of class {', '.join(MERGED)}",
    )
    for block in blocks:
        _check(block)
        _check_hooks(block)
        refuse_if(
            block is model and isinstance(block.experts, nn.ModuleList),
            f"{type(model).__name__} is itself the block to be replaced; call use_fast_moe "
            "with the model that contains it",
        )
    for block in blocks:
        if not isinstance(block.experts, nn.ModuleList):
            fast = FastExperts(block.experts.gate_up_proj, block.experts.down_proj)
            block.experts = fast.train(block.experts.training)
    for name, block in list(model.named_modules()):
        if block in blocks and isinstance(block.experts, nn.ModuleList):
            parent, _, child = name.rpartition(".")
            model.get_submodule(parent).register_module(child, FastBlock(block))
    return model


class FastExperts(nn.Module):
    """SwiGLU experts with the merged parameters gate_up_proj [E, 2F, D] and down_proj [E, D, F].

    E is the number of experts, F the intermediate size and D the hidden size.
    """

    def __init__(self, gate_up_proj: nn.Parameter, down_proj: nn.Parameter) -> None:
        super().__init__()
        self.num_experts, self.hidden_dim, self.intermediate_dim = down_proj.shape
        self.gate_up_proj, self.down_proj = gate_up_proj, down_proj

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return, for each token, the weighted sum of the outputs of its experts.

        Args:
            hidden_states: [T, D], for T tokens of size D.
            top_k_index: int64 [T, K], indices of each token's K experts. Indices outside 0 to E-1
                are ignored.
            top_k_weights: [T, K], routing weights.

        Returns:
            [T, D] in the dtype of `hidden_states`. Matrix products use the dtype of autocast
            if autocast is enabled, else the dtype of the parameters.
        """
        rows = kernels.route(top_k_index, 0, self.num_experts, of=self.num_experts)
        merged = (self.gate_up_proj, self.down_proj)
        x, weights = (value.to(merged[0].dtype) for value in (hidden_states, top_k_weights))
        return kernels.experts(x, weights, *merged, rows).to(hidden_states.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_experts} x ({self.hidden_dim} -> {self.intermediate_dim})"


class FastExpertsByModule(FastExperts):
    """Version of `FastExperts` whose state dict contains, instead of the merged parameters, one
    entry per expert and projection, such as `0.gate_proj.weight`."""

    def _slices(self, gate_up: Tensor, down: Tensor, prefix: str) -> dict[str, Tensor]:
        """Return the entries of a state dict: for each projection of each expert, the name of the
        weight and a view of gate_up or down."""
        inner, views = self.intermediate_dim, {}
        for expert in range(self.num_experts):
            weights = (gate_up[expert, :inner], gate_up[expert, inner:], down[expert])
            for projection, weight in zip(_PROJECTIONS, weights, strict=True):
                views[f"{prefix}{expert}.{projection}.weight"] = weight
        return views

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        gate_up: Tensor = self.gate_up_proj
        down: Tensor = self.down_proj
        if not keep_vars:
            gate_up, down = gate_up.detach(), down.detach()
        destination.update(self._slices(gate_up, down, prefix))

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if local_metadata.get("assign_to_params_buffers"):  # load_state_dict(assign=True)
            self._adopt_dtype_and_device(state_dict, prefix)
        views = self._slices(self.gate_up_proj.detach(), self.down_proj.detach(), prefix)
        for name, view in views.items():
            if name not in state_dict:
                missing_keys.append(name)
            elif state_dict[name].shape != view.shape:
                error_msgs.append(
                    f"size mismatch for {name}: {tuple(state_dict[name].shape)} in the state dict, "
                    f"{tuple(view.shape)} in the model"
                )
            else:
                view.copy_(state_dict[name])
        if strict:
            unexpected_keys.extend(
                key for key in state_dict if key.startswith(prefix) and key not in views
            )

    def _adopt_dtype_and_device(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        """Convert the parameters to the dtype and device of expert 0's weight in `state_dict`."""
        like = state_dict.get(f"{prefix}0.{_PROJECTIONS[0]}.weight")
        if like is None:
            return
        for name, parameter in list(self.named_parameters()):
            if (parameter.device, parameter.dtype) == (like.device, like.dtype):
                continue
            if parameter.is_meta:
                new = torch.empty_like(parameter, device=like.device, dtype=like.dtype)
            else:
                new = parameter.detach().to(like.device, like.dtype)
            setattr(self, name, nn.Parameter(new, requires_grad=parameter.requires_grad))


class FastBlock(nn.Module):
    """Replacement for an OlmoeSparseMoeBlock of transformers 4.

    The new block uses the router of the old block and a merged copy of the old block's expert
    weights.
    """

    def __init__(self, block: _HfModule) -> None:
        super().__init__()
        self.num_experts, self.top_k = block.num_experts, block.top_k
        self.norm_topk_prob = block.norm_topk_prob
        self.gate, self.experts = block.gate, _from_modules(block.experts)
        self.train(block.training)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output [..., D] and the router's logits [T, E]."""
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        router_logits = self.gate(x)
        weights, chosen = F.softmax(router_logits, dim=1, dtype=torch.float).topk(self.top_k)
        if self.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        out = self.experts(x, chosen, weights.to(x.dtype))
        return out.view(hidden_states.shape), router_logits


def _check(block: _HfModule) -> None:
    """Raise ConfigError if `FastExperts` cannot replace the experts of `block`."""
    experts, name = block.experts, type(block).__name__
    if isinstance(experts, nn.ModuleList):
        refuse_if(
            name not in BY_MODULE,
            f"use_fast_moe does not support {name} with one module per expert; use "
            "transformers 5, which merges the experts",
        )
        for expert in experts:
            _check_modules(name, expert)
        activations = {type(getattr(expert, "act_fn", None)).__name__ for expert in experts}
    else:
        class_name = type(experts).__name__
        refuse_if(
            class_name not in MERGED,
            f"use_fast_moe does not support the experts {class_name} of {name}; use a "
            f"model with experts of class {', '.join(MERGED)}",
        )
        refuse_if(
            getattr(experts, "_is_expert_parallel", False),
            f"{class_name} is sharded over devices, which use_fast_moe does not support; load "
            "the model without expert parallelism",
        )
        activations = {type(getattr(experts, "act_fn", None)).__name__}
    refuse_if(
        not activations <= {"SiLU", "SiLUActivation"},
        f"{name} has the activation {', '.join(activations)}; use_fast_moe supports only SiLU",
    )
    parameters = list(experts.parameters())
    kinds = {(p.dtype, p.device, p.requires_grad) for p in parameters}
    refuse_if(
        len(kinds) != 1 or not parameters[0].is_floating_point() or parameters[0].is_meta,
        f"the experts of {name} have parameters with (dtype, device, requires_grad) = "
        f"{sorted(map(str, kinds))}; use the same for all parameters, with a floating-point "
        "dtype and a device other than meta",
    )


def _check_hooks(block: _HfModule) -> None:
    """Raise ConfigError if a module or parameter that `use_fast_moe` will remove has hooks."""
    removed = list(block.experts.modules())
    if isinstance(block.experts, nn.ModuleList):
        removed.append(block)
        removed += block.experts.parameters()
    refuse_if(
        any(getattr(owner, kind, None) for owner in removed for kind in _HOOKS),
        f"the experts of {type(block).__name__} have hooks, which would be lost; "
        "register the hooks after the call of use_fast_moe",
    )


def _check_modules(name: str, expert: nn.Module) -> None:
    children = dict(expert.named_children())
    children.pop("act_fn", None)
    plain = all(type(c) is nn.Linear and c.bias is None for c in children.values())
    if tuple(children) != _PROJECTIONS or not plain:
        modules = ", ".join(f"{key}: {type(child).__name__}" for key, child in children.items())
        raise ConfigError(
            f"an expert of {name} has {modules}; use_fast_moe supports only linear layers "
            f"{', '.join(_PROJECTIONS)} without bias"
        )


def _from_modules(experts: nn.ModuleList) -> FastExpertsByModule:
    """Return a `FastExpertsByModule` with a copy of the weights of `experts`. `experts` contains
    one module per expert."""
    first: _HfModule = experts[0]
    weight: nn.Parameter = first.gate_proj.weight
    inner, hidden = weight.shape
    like: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device}
    grad = weight.requires_grad
    fast = FastExpertsByModule(
        nn.Parameter(torch.empty(len(experts), 2 * inner, hidden, **like), requires_grad=grad),
        nn.Parameter(torch.empty(len(experts), hidden, inner, **like), requires_grad=grad),
    )
    fast.load_state_dict(experts.state_dict())
    return fast
