"""Between a rank's part of the model and the whole tensors that files hold."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from optimus.checkpoint.distribute import Distribute, give
from optimus.chunks.setting import setting_of
from optimus.config import Config
from optimus.dist.collectives import receive, send
from optimus.dist.groups import Groups
from optimus.dist.mesh import Place
from optimus.parallel.layout import Layout, stage_parameters
from optimus.parallel.placement import Placement, place_parameters, whole_model


class WholeModel:
    """Names and shapes of the whole model, and which rank holds which part of it."""

    def __init__(
        self,
        config: Config,
        layout: Layout,
        groups: Groups,
        device: torch.device | None = None,
    ) -> None:
        """`device`: where the parts lie; None: on the CPU."""
        self._config, self._layout, self._groups, self._device = config, layout, groups, device
        self._meta = whole_model(config.model)
        self.shapes = {name: p.shape for name, p in self._meta.named_parameters()}
        self.names = tuple(self.shapes)
        self.trained = tuple(n for n in self.names if not setting_of(n, config.optim).frozen)
        """Those of `names` that have gradients and moments."""

    def spread(
        self,
        put: Callable[[str, Tensor], None],
        source: Callable[[str], Tensor],
        device: torch.device,
        how: Distribute = "broadcast",
    ) -> None:
        """Give every rank what it holds of whole tensors, one by one, which the first rank alone
        asks `source` for: `put(name, part)`. A collective of all ranks."""
        everyone = self._groups.everyone
        for name, shape in self.shapes.items():
            whole = torch.zeros(shape, dtype=torch.float32, device=device)
            if everyone.rank == 0:
                whole.copy_(source(name))
            give(whole.view(torch.int32), everyone, how)
            if name in self._layout.placements:
                put(name, self._layout.placements[name].take(whole))

    def gather(
        self,
        local: Mapping[str, Tensor],
        names: Collection[str] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> dict[str, Tensor]:
        """Whole tensors on the first rank's CPU, {} on others, of all parameters or of `names`; of
        `dtype` before they are sent, or as they are where one rank holds all. A collective of all
        ranks; ranks that hold but copies give nothing."""
        names = self.names if names is None else names
        group, place = self._groups.model, self._groups.place
        if group.size == 1:
            return dict(local) if self._groups.everyone.rank == 0 else {}
        if place.dp > 0:
            return {}
        mine = self._held_by(place)
        if group.rank > 0:
            for name in names:
                if name in mine:
                    send(local[name].to(dtype).contiguous(), group, 0).wait()
            return {}
        return self._receive_all(local, names, dtype)

    def _receive_all(
        self, local: Mapping[str, Tensor], names: Collection[str], dtype: torch.dtype
    ) -> dict[str, Tensor]:
        group, mesh = self._groups.model, self._layout.mesh
        places = [mesh.place(rank) for rank in mesh.group_of(0, ("pp", "ep", "tp"))]
        held = [self._held_by(place) for place in places]
        out: dict[str, Tensor] = {}
        for name in names:
            whole = torch.empty(self.shapes[name], dtype=dtype)
            for source, parts in enumerate(held):
                if name not in parts:
                    continue
                part = local.get(name)
                if source > 0:
                    shape = parts[name].local_shape
                    empty = torch.empty(shape, dtype=dtype, device=self._device)
                    part = receive(empty, group, source).wait()
                parts[name].put(whole, part)
            out[name] = whole
        return out

    def _held_by(self, place: Place) -> dict[str, Placement]:
        """What the rank at `place` gives: each part of each parameter is given once."""
        layout, config = self._layout, self._config
        everything = place_parameters(
            self._meta, layout.mesh, place, config.parallel.sequence_parallel
        )
        here = stage_parameters(config, everything, layout.mesh, place.pp, layout.layers)
        given = {}
        for name in here:
            kind = everything[name].kind
            is_copy = (not kind.expert and place.ep > 0) or (
                not kind.divided_by_tp and place.tp > 0
            )
            far_end = name == "embed.weight" and place.pp > 0
            if not (is_copy or far_end):
                given[name] = everything[name]
        return given
