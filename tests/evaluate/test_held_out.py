from __future__ import annotations

import pytest
import torch

from optimus.data.dataset import TokenDataset
from optimus.distributed.collectives import ALONE
from optimus.evaluate.held_out import by_model, held_out_loss
from optimus.model.init import initialise_
from optimus.model.transformer import Transformer
from tests.kit.runs.tiny import tiny_config


@pytest.mark.parametrize("instances, batch", [(0, 8), (5, 2), (1, 8), (10_000, 16)])
def test_it_is_the_mean_over_exactly_the_asked_instances(tiny_data, instances, batch):
    model = Transformer(tiny_config("d", "r").model)
    initialise_(model, 1)
    dataset = TokenDataset(tiny_data / "eval")
    count = min(instances or dataset.num_instances, dataset.num_instances)
    with torch.no_grad():
        tokens = torch.from_numpy(dataset.read(0, count))
        logits = model(tokens)[:, :-1].flatten(0, 1)
        direct = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
    run = by_model(model, torch.device("cpu"))
    result = held_out_loss(run, dataset, batch, ALONE, max_instances=instances)
    assert result.loss == pytest.approx(float(direct), abs=1e-6)
    assert result.tokens == count * dataset.context
