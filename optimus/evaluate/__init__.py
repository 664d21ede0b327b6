"""Evaluation of a model on held-out data, and sampling of text from a model."""

from optimus.evaluate.checkpoint import continue_text, evaluate_checkpoint, load_model
from optimus.evaluate.generate import sample_text
from optimus.evaluate.held_out import held_out_loss

__all__ = ["continue_text", "evaluate_checkpoint", "held_out_loss", "load_model", "sample_text"]
