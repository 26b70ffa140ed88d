"""Declared readers of parameters: who waits for what, and what waits for everything."""

import torch
from torch import Tensor, nn

from olmo_shard.nn.readers import ParameterReaders, parameter_readers, undeclared_classes


class Scale(nn.Module):
    """Multiplies by its weight, and declares it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight

    def parameter_readers(self) -> ParameterReaders:
        return [(self, self.parameters())]


class Louder(Scale):
    """A subclass that could read more than its base class, and does not declare."""


class Root(nn.Module):
    """A model that declares the given readers, and contains the given modules."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.declared: ParameterReaders = ()

    def parameter_readers(self) -> ParameterReaders:
        return self.declared


class Pair(Root):
    """Two modules inside one, with a declaration for all that is inside."""

    def parameter_readers(self) -> ParameterReaders:
        return [(self, self.parameters())]


def test_a_module_waits_for_what_it_declares() -> None:
    model = Root(Scale(), Scale())
    assert parameter_readers(model) == {
        "parts.0.weight": [model.parts[0]],
        "parts.1.weight": [model.parts[1]],
    }


def test_a_parameter_without_a_reader_is_the_models() -> None:
    """A ``Linear`` declares nothing: code around it may read the weight without calling it."""
    model = Root(Scale(), nn.Linear(1, 1, bias=False))
    assert parameter_readers(model)["parts.1.weight"] == [model]
    assert parameter_readers(model)["parts.0.weight"] == [model.parts[0]]


def test_two_readers_wait_both() -> None:
    first, second = Scale(), Scale()
    model = Root(first, second)
    model.declared = [(first, [second.weight])]
    assert parameter_readers(model)["parts.1.weight"] == [first, second]


def test_a_reader_inside_another_one_is_left_out() -> None:
    pair = Pair(Scale(), Scale())
    model = Root(pair)
    assert set(map(tuple, parameter_readers(model).values())) == {(pair,)}


def test_a_module_of_two_parents_waits_itself() -> None:
    """The second parent could run before the first one, which declares for its inside."""
    shared = Scale()
    pair = Pair(shared, Scale())
    model = Root(pair, shared)
    assert parameter_readers(model)["parts.0.parts.0.weight"] == [pair, shared]
    assert parameter_readers(model)["parts.0.parts.1.weight"] == [pair]


def test_a_class_without_its_own_declaration_makes_the_model_wait_for_everything() -> None:
    model = Root(Scale(), Louder())
    assert undeclared_classes(model) == ["Louder"]
    assert set(map(tuple, parameter_readers(model).values())) == {(model,)}
    assert undeclared_classes(Root(Scale(), nn.Linear(1, 1))) == []
