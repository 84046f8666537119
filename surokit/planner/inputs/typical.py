"""Find a typical shape for a number of parameters, which alone does not tell activations, logits and a KV cache.

It is the shape of the catalogue's dense model whose size is nearest, with as many layers as come nearest to the number.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

from surokit.planner.inputs import catalogue
from surokit.planner.inputs.configs import read_shape
from surokit.planner.inputs.shape import Shape, built_here

#: Largest relative difference between the shape's parameters and the number; beyond it no shape is called typical.
NEAR = 0.1


@cache
def typical_shape(parameters: float) -> tuple[Shape, str] | None:
    """Return (a shape of about so many parameters, the name of the model that it follows); None where no known model is near."""
    shapes = {name: read_shape(dict(each.config))[0] for name, each in catalogue.known().items()}
    dense = {name: shape for name, shape in shapes.items() if shape.experts is None and built_here(shape)}
    name, known = min(dense.items(), key=lambda item: abs(math.log(item[1].parameters / parameters)))
    block = known.parameters - replace(known, layers=known.layers - 1).parameters
    layers = known.layers + round((parameters - known.parameters) / block)
    if layers < 1:
        return None
    shape = replace(known, layers=layers)
    return (shape, name) if abs(shape.parameters / parameters - 1) <= NEAR else None
