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
from optimus.model.layers import MLP, Embedding, make_norm
from optimus.model.loss import CrossEntropy
from optimus.model.moe import FastSparseMoE
from optimus.model.rope import Rotary
from optimus.model.router import Routing, layer_losses


class LossTerms(NamedTuple):
    """Terms of the objective of one microbatch, before their coefficients."""

    ce_sum: Tensor
    """fp32 scalar: cross-entropy summed over the targets, in nats."""
    num_targets: int
    """B * (S-1): the targets inside the sequences."""
    aux: Tensor
    """fp32 scalar: load-balancing loss, averaged over MoE layers; 0 for a dense model."""
    z: Tensor
    """fp32 scalar: router z-loss, averaged over MoE layers; 0 for a dense model."""


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): [B, S, D] -> [B, S, D], Routing if sparse."""

    def __init__(self, config: ModelConfig) -> None:
        """Build the block from the configuration of its layer (`ModelConfig.layer`)."""
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
        """Compile the block with torch.compile, as one graph without breaks, at its first call. The
        block's hooks stay outside the graph."""
        self._compiled = torch.compile(self.run, fullgraph=True)

    def run(
        self, x: Tensor, rope: tuple[Tensor, Tensor], documents: list[int] | None = None
    ) -> tuple[Tensor, Routing | None]:
        """Return the block's output and routing, without calling the block's hooks."""
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

    The constructor does not set weights: call `optimus.model.init.initialise_` or load some. Build
    large models under `torch.device("meta")`.

    The steps of `forward` and `losses` are separate methods and blocks are keyed by their global
    number, so that a pipeline stage is this model without the other stages' modules
    (`keep_stages`).

    `document_ids` [B, S], integers, preferably on the CPU, divide sequences into documents that do
    not attend to each other: a document begins where the id changes (CONTRACT.md, "Data
    set"). Positions count through the sequence. Rotary embedding is relative, so a document gets
    the logits that it gets alone, up to rounding (except for rope_scaling = dynamic, which depends
    on the length of the sequence).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config)
        self.rotary = Rotary(config)
        self.blocks = nn.ModuleDict(
            {str(i): Block(config.layer(i)) for i in range(config.num_layers)}
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
        """Return the loss of predicting tokens[:, 1:] from the tokens before (CONTRACT.md, "Loss").

        The first token of a document is a target too, predicted from the document before it.
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
        """Run blocks.

        Args:
            x: [B, S, D].
            document_ids: as the docstring of the class says.
            layers: numbers of the layers to run; None for all layers of this model.

        Returns:
            The output [B, S, D] of the last of these layers, and the routings of the layers with
            experts.
        """
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
        """Return logits [..., V] for the last block's output [..., D]."""
        return self._head(self.final_norm(x))

    def logits_at(self, x: Tensor, position: int) -> Tensor:
        """Return the logits [B, V] of the token after `position`, for the last block's output
        [B, S, D]."""
        # The norm comes before the slice: with sequence parallelism it gathers the sequence.
        return self._head(self.final_norm(x)[:, position])

    def _head(self, x: Tensor) -> Tensor:
        if self.head is not None:
            return self.head(x)
        weight: Tensor = self.embed.weight
        if self._tied_head is not None:
            same = self._tied_head.data_ptr() == weight.data_ptr()
            assert same, "the embedding has moved: call separate_tied_uses() again"
            weight = self._tied_head
        return F.linear(x, weight)

    def token_loss(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, int]:
        """Return the summed cross-entropy of the last block's output x [B, S, D], in nats, and the
        number of targets."""
        targets = tokens[:, 1:]
        x = self.final_norm(x)  # before the slice, as in logits_at
        logits = self._head(x[:, : targets.shape[1]].flatten(0, 1))
        return self.cross_entropy(logits, targets.flatten()), targets.numel()

    def router_losses(self, routings: list[Routing]) -> tuple[Tensor, Tensor]:
        """Return `aux` and `z` of LossTerms; for a stage with some of the blocks, their share."""
        if not routings:
            zero = torch.zeros((), device=next(self.parameters()).device)
            return zero, zero
        aux, z, _ = layer_losses(self.config, routings)
        layers = len(self.config.sparse_layers)
        return aux.sum() / layers, z.sum() / layers

    def compile_blocks(self) -> None:
        """Compile each block with torch.compile. Blocks with the same settings share the compiled
        code; names and parameters do not change."""
        for block in self.each_block():
            block.compile_run()

    def each_block(self) -> Iterator[Block]:
        """Return the blocks of this model in order."""
        for block in self.blocks.values():
            assert isinstance(block, Block)
            yield block

    def keep_stages(self, layers: Collection[int], has_first: bool, has_last: bool) -> None:
        """Delete all modules that pipeline stages of these layers do not use.

        Tied embeddings stay on the last stage too, which uses them as its head.
        """
        for name in list(self.blocks):
            if int(name) not in layers:
                del self.blocks[name]
        if not has_first and not (has_last and self.config.tie_embeddings):
            self.embed = None  # type: ignore[assignment]  # only stages that do not use it
        if not has_last:
            self.final_norm = None  # type: ignore[assignment]  # the same
            self.head = None

    def separate_tied_uses(self) -> None:
        """Give the head's use of tied embeddings a separate leaf over the same storage.

        Each use then has a separate gradient, and the two can be added in the same order on every
        layout (CONTRACT.md, "Deterministic mode"). Call this after the weights have their storage;
        casting or moving the model repeats it. Code that clears or reduces gradients must include
        the leaves of `tied_uses`.
        """
        if self.config.tie_embeddings and self.final_norm is not None:
            self._tied_head = self.embed.weight.detach().requires_grad_()

    def tied_uses(self) -> dict[str, Tensor]:
        """Return the separate leaves by name: {} for an untied model or before
        `separate_tied_uses`."""
        return {} if self._tied_head is None else {"head.weight": self._tied_head}

    def _apply(self, fn: Any, recurse: bool = True) -> Transformer:
        super()._apply(fn, recurse)
        if self._tied_head is not None:
            self.separate_tied_uses()
        return self
