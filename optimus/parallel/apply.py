"""From a whole model to one rank's part: the whole order on one screen.

1. The model is built on the meta device: names and shapes, no memory.
2. Pipeline: what other stages hold is deleted, so that nothing of it is wired or filled.
3. Parameters get this rank's shapes (tensor and expert parallelism divide them by one value, the
   layout's placements) and memory.
4. Tensor parallelism wires communication around attention, feed-forward, embedding and loss.
5. Expert parallelism wires the exchange of tokens around the experts; it comes behind tensor
   parallelism, so that rows are exchanged once and then met by slices of experts.
6. Recomputation wraps what is wired, so that communication is recomputed with its module.
7. Linear layers of a zero-bubble schedule learn to put off their weight gradients, which experts
   always can: last, since it changes how a layer computes and not what.

At size 1 nothing is inserted.
"""

from __future__ import annotations

import torch

from optimus.config import Config
from optimus.dist.groups import Groups
from optimus.model.transformer import Transformer
from optimus.parallel.expert import wire_expert_parallel
from optimus.parallel.layout import Layout
from optimus.parallel.pipeline.split import split_linears
from optimus.parallel.placement import keep_stage, materialise, share, whole_model
from optimus.parallel.recompute import wire_recompute
from optimus.parallel.tensor import wire_tensor_parallel


def build_model(
    config: Config, layout: Layout, groups: Groups, device: torch.device
) -> Transformer:
    """This rank's part of the model, with empty parameters in fp32."""
    model = whole_model(config.model)
    layers = {layer for stage in layout.stages for layer in layout.layers[stage]}
    keep_stage(model, layers, layout.has_first, layout.has_last)
    materialise(model, layout.placements, device)
    parallel, mesh = config.parallel, layout.mesh
    if mesh.tp > 1:
        vocabulary = range(*share(config.model.vocab_size, layout.place.tp, mesh.tp))
        wire_tensor_parallel(model, groups.tp, vocabulary, parallel.sequence_parallel)
    if mesh.ep > 1:
        dispatch = parallel.ep_dispatch
        dispatch = "allgather" if dispatch == "auto" else dispatch  # until it is measured
        wire_expert_parallel(model, groups.ep, dispatch)
    if config.recompute.modules:
        wire_recompute(model, config.recompute.modules)
    if layout.schedule.splits_backward:
        split_linears(model)
    return model
