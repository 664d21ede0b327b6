from __future__ import annotations

import pytest

from optimus.model.shapes import model_shapes
from optimus.parallel.placement import whole_model
from tests.model.small import small_model
from tests.model.test_flops import FEATURES


@pytest.mark.parametrize("feature", FEATURES)
def test_shapes_are_those_of_the_model_in_order(feature):
    config = small_model(**{"num_layers": 3, **FEATURES[feature]}).config
    built = [(name, tuple(p.shape)) for name, p in whole_model(config).named_parameters()]
    assert list(model_shapes(config).items()) == built
