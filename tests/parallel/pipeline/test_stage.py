"""Tests of the stages of a pipeline against the whole model."""

from __future__ import annotations

import pytest
import torch

from optimus.parallel.pipeline.stage import Objective, Stage, backward
from tests.model.small import small_model, some_tokens


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", ["olmo", "olmoe"])
def test_two_stages_have_the_loss_and_gradients_of_the_model(architecture: str, tied: bool):
    """Each stage computes its layers with a separate copy of the model. For each parameter, also
    for a tied embedding, the gradients of both copies must add up to the gradient of the whole
    model."""
    model, *copies = (small_model(architecture, tie_embeddings=tied) for _ in range(3))
    tokens = some_tokens()
    terms = model.losses(tokens)
    expected = terms.ce_sum / terms.num_targets + 0.01 * terms.aux + 0.001 * terms.z
    expected.backward()

    sparse, last = len(model.config.sparse_layers), model.config.num_layers
    objective = Objective(terms.num_targets, 1, max(1, sparse), aux_coef=0.01, z_coef=0.001)
    first = Stage(copies[0], range(1), True, False, objective)
    second = Stage(copies[1], range(1, last), False, True, objective)
    sent = first.forward(None, tokens)
    received = sent.x.detach().requires_grad_()
    result = second.forward(received, tokens)
    backward(result, None)
    backward(sent, received.grad)

    loss = sum(float(out.objective.detach()) for out in (sent, result) if out.objective is not None)
    assert loss == pytest.approx(float(expected.detach()), rel=1e-6)
    for name, parameter in model.named_parameters():
        grads = [copy.get_parameter(name).grad for copy in copies]
        total = sum(grad for grad in grads if grad is not None)
        torch.testing.assert_close(total, parameter.grad, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("architecture", ["olmo", "olmoe"])
def test_all_loss_terms_are_on_the_device_of_the_tokens(architecture: str):
    """All loss terms are sent to other ranks together. A dense model has no router losses. The
    tensors in place of these losses must nevertheless be on the device of the tokens."""
    model = small_model(architecture).to("meta")
    objective = Objective(1, 1, 1, aux_coef=0.01, z_coef=0.001)
    stage = Stage(model, range(model.config.num_layers), True, True, objective)
    terms = stage.forward(None, some_tokens().to("meta")).terms
    assert {term.device.type for term in (terms.ce_sum, terms.aux, terms.z)} == {"meta"}
