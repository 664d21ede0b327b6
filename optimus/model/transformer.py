"""Transformer: the decoder of OLMo and OLMoE.

Dims: B batch (sequences), S sequence, T tokens (B*S), D hidden, V vocabulary, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optimus.config import ModelConfig
from optimus.model.attention import Attention, document_lengths
from optimus.model.layers import MLP, CrossEntropy, Embedding, make_norm
from optimus.model.moe import FastSparseMoE
from optimus.model.rope import Rotary
from optimus.model.router import Routing, layer_losses


class LossTerms(NamedTuple):
    """Loss terms of one microbatch, before multiplication by their coefficients."""

    ce_sum: Tensor
    """fp32 scalar: cross-entropy summed over the targets, in nats."""
    num_targets: int
    """Number of targets, B * (S-1)."""
    aux: Tensor
    """fp32 scalar: load-balancing loss, averaged over MoE layers; 0 for a dense model."""
    z: Tensor
    """fp32 scalar: router z-loss, averaged over MoE layers; 0 for a dense model."""


class Block(nn.Module):
    """Decoder block: x [B, S, D] -> (output [B, S, D], Routing).

    The block computes x = x + attention(norm(x)), then x + mlp(norm(x)). A block without experts
    returns None instead of a Routing.
    """

    def __init__(self, config: ModelConfig) -> None:
        """Build the block of one layer. `config` is the result of `ModelConfig.layer` for the
        layer."""
        super().__init__()
        self.config = config
        self.attention_norm = make_norm(config)
        self.attention = Attention(config)
        self.mlp_norm = make_norm(config)
        self.mlp = FastSparseMoE(config) if config.num_experts else MLP(config)
        self._compiled: Callable[..., tuple[Tensor, Routing | None]] | None = None

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], documents: list[int] | None = None
    ) -> tuple[Tensor, Routing | None]:
        run = self._compiled or self.run
        return run(x, rope, documents)

    def compile_run(self) -> None:
        """Compile `run` with torch.compile(fullgraph=True), and make `forward` call the compiled
        function. Hooks of the block are not compiled."""
        self._compiled = torch.compile(self.run, fullgraph=True)

    def run(
        self, x: Tensor, rope: tuple[Tensor, Tensor], documents: list[int] | None = None
    ) -> tuple[Tensor, Routing | None]:
        """Return the output and the Routing of the block, without calling hooks of the block."""
        x = x + self.attend(x, rope, documents)
        out = self.feed_forward(x)
        out, routing = out if isinstance(out, tuple) else (out, None)
        return x + out, routing

    def attend(self, x: Tensor, *where: Any) -> Tensor:
        return self.attention(self.attention_norm(x), *where)

    def feed_forward(self, x: Tensor) -> Any:
        return self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """Decoder: tokens int64 [B, S] -> logits [B, S, V] in the dtype of the parameters.

    The constructor does not initialise the weights: call `optimus.model.init.initialise_` or load
    weights. If `layers` is given, the model has only the blocks of these layers. `keep_stages`
    deletes all modules that the pipeline stages of a rank do not use.

    `document_ids` are integers [B, S], preferably on the CPU. The ids divide sequences into
    documents: a document starts where the id changes, and tokens attend only within their document.
    """

    def __init__(self, config: ModelConfig, layers: Collection[int] | None = None) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config)
        self.rotary = Rotary(config)
        # The keys are the layer numbers of the whole model, even on a pipeline stage.
        self.blocks = nn.ModuleDict(
            {
                str(i): Block(config.layer(i))
                for i in range(config.num_layers)
                if layers is None or i in layers
            }
        )
        self.final_norm = make_norm(config)
        self.head: nn.Module | None = None
        if not config.tie_embeddings:
            self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.cross_entropy = CrossEntropy()
        self._tied_head: Tensor | None = None

    def forward(self, tokens: Tensor, document_ids: Tensor | None = None) -> Tensor:
        x, _ = self.run_blocks(self.embed(tokens), document_ids)
        return self.logits(x)

    def losses(self, tokens: Tensor, document_ids: Tensor | None = None) -> LossTerms:
        """Return the loss terms of next-token prediction, with tokens[:, 1:] as targets.

        The first token of a document is also a target, unless it is the first token of a sequence.
        """
        x, routings = self.run_blocks(self.embed(tokens), document_ids)
        ce_sum, num_targets = self.token_loss(x, tokens)
        return LossTerms(ce_sum, num_targets, *self.router_losses(routings))

    def run_blocks(
        self,
        x: Tensor,
        document_ids: Tensor | None = None,
        layers: Collection[int] | None = None,
    ) -> tuple[Tensor, list[Routing]]:
        """Run the blocks of some or all layers in order.

        Args:
            x: [B, S, D].
            document_ids: integers [B, S] that divide sequences into documents; None if each
                sequence is one document.
            layers: indices of the layers to run; None for all layers of this model.

        Returns:
            The output [B, S, D] of the last layer that ran, and the Routing of each layer with
            experts.
        """
        # Positions count from the start of the sequence, even with documents. Attention with rotary
        # embedding depends only on differences of positions. Therefore the logits of a document do
        # not depend on the position of its first token, except with dynamic `rope_scaling`.
        rope = self.rotary(x.shape[1], x.device)
        documents = None if document_ids is None else document_lengths(document_ids)
        routings = []
        for number, block in self.blocks.items():
            if layers is not None and int(number) not in layers:
                continue
            x, routing = block(x, rope, documents)
            if routing is not None:
                routings.append(routing)
        return x, routings

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits [..., V] for the output x [..., D] of the last block."""
        return self._head(self.final_norm(x))

    def logits_at(self, x: Tensor, position: int) -> Tensor:
        """Return the logits [B, V] at `position` for the output x [B, S, D] of the last block."""
        # The norm comes before the slice: with sequence parallelism, the norm gathers the sequence.
        return self._head(self.final_norm(x)[:, position])

    def _head(self, x: Tensor) -> Tensor:
        if self.head is not None:
            return self.head(x)
        weight: Tensor = self.embed.weight
        if self._tied_head is not None:
            same = self._tied_head.data_ptr() == weight.data_ptr()
            assert same, "embed.weight has new storage: call separate_uses() again"
            weight = self._tied_head
        return F.linear(x, weight)

    def token_loss(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, int]:
        """Return the cross-entropy summed over targets, in nats, and the number of targets.

        Args:
            x: [B, S, D], output of the last block.
            tokens: int64 [B, S]; the targets are tokens[:, 1:].
        """
        targets = tokens[:, 1:]
        x = self.final_norm(x)  # before the slice, as in logits_at
        logits = self._head(x[:, : targets.shape[1]].flatten(0, 1))
        return self.cross_entropy(logits, targets.flatten()), targets.numel()

    def router_losses(self, routings: list[Routing]) -> tuple[Tensor, Tensor]:
        """Return the load-balancing loss and the router z-loss, averaged over MoE layers.

        Each pipeline stage sums the losses of its layers and divides by the number of MoE layers
        of the whole model. The results of all stages sum to the losses of the model.
        """
        if not routings:
            zero = torch.zeros((), device=next(self.parameters()).device)
            return zero, zero
        aux, z, _ = layer_losses(self.config, routings, next(self.parameters()).device)
        layers = len(self.config.sparse_layers)
        return aux.sum() / layers, z.sum() / layers

    def compile_blocks(self) -> None:
        """Compile each block with torch.compile. Parameters and their names do not change."""
        for block in self.each_block():
            block.compile_run()

    def each_block(self) -> Iterator[Block]:
        """Yield the blocks of this model in order."""
        for block in self.blocks.values():
            assert isinstance(block, Block)
            yield block

    def keep_stages(self, layers: Collection[int], has_first: bool, has_last: bool) -> None:
        """Delete all modules except the modules of the given pipeline stages.

        Args:
            layers: indices of the layers of the kept stages.
            has_first: True to keep the embedding, because the stages include the first stage.
            has_last: True to keep the final norm and the output head, because the stages include
                the last stage. With tied embeddings, the embedding is the output head.
        """
        for name in list(self.blocks):
            if int(name) not in layers:
                del self.blocks[name]
        if not has_first and not (has_last and self.config.tie_embeddings):
            self.embed = None  # type: ignore[assignment]  # only stages that do not use it
        if not has_last:
            self.final_norm = None  # type: ignore[assignment]  # the same
            self.head = None

    @property
    def shared_uses(self) -> dict[str, str]:
        """Maps the name of a weight that is not a parameter to the name of the parameter that is
        used as this weight.

        With tied embeddings, the dict is {"head.weight": "embed.weight"}: the output head on the
        last pipeline stage uses the weight of the embedding, which is on the first stage. With
        separate embeddings, the dict is empty.
        """
        return {"head.weight": "embed.weight"} if self.config.tie_embeddings else {}

    def separate_uses(self) -> None:
        """With tied embeddings, make the output head use a new leaf tensor as its weight. The leaf
        tensor shares the storage of the embedding.

        The head and the embedding then have separate gradients, which deterministic mode adds in a
        fixed order. Call this method after the weights have their final storage. Code that clears
        or reduces gradients must also process the leaf, which `separated_uses` returns.
        """
        if self.config.tie_embeddings and self.final_norm is not None:
            self._tied_head = self.embed.weight.detach().requires_grad_()

    def separated_uses(self) -> dict[str, Tensor]:
        """Return {"head.weight": leaf} for the leaf tensor that `separate_uses` created, or {} if
        there is no leaf."""
        return {} if self._tied_head is None else {"head.weight": self._tied_head}

    def _apply(self, fn: Any, recurse: bool = True) -> Transformer:
        super()._apply(fn, recurse)
        if self._tied_head is not None:
            self.separate_uses()
        return self
