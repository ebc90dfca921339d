"""Checks of arguments against annotations."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
import pytest
from lightning import LightningModule
from pydantic import Field

from marl_lightning.envs import EnvSpec
from marl_lightning.validation import Fraction, PositiveFloat, PositiveInt, checked, find_problems, nearest

if TYPE_CHECKING:
    from decimal import Decimal


class Example:
    @checked
    def __init__(
        self,
        *,
        size: PositiveInt,
        rate: PositiveFloat = 0.1,
        gamma: Fraction = 0.99,
        clip: PositiveFloat | None = None,
        sizes: Annotated[Sequence[PositiveInt], Field(min_length=1)] = (64,),
        pair: tuple[int, int] = (1, 2),
        critic: Literal["state", "observation"] = "state",
        spec: EnvSpec | None = None,
        unresolvable: Decimal | None = None,
    ):
        self.arguments = {name: value for name, value in locals().items() if name != "self"}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"size": 0}, "x.size=0: must be greater than or equal to 1"),
        ({"size": True}, "x.size=True: must be a valid integer"),
        ({"size": 2.0}, "x.size=2.0: must be a valid integer"),
        ({"size": "3"}, "x.size='3': must be a valid integer"),
        ({}, "x.size: is required"),
        ({"size": 1, "rate": float("nan")}, "x.rate=nan: must be a finite number"),
        ({"size": 1, "rate": float("inf")}, "x.rate=inf: must be a finite number"),
        ({"size": 1, "gamma": 1.5}, "x.gamma=1.5: must be less than or equal to 1"),
        ({"size": 1, "clip": -1.0}, "x.clip=-1.0: must be greater than 0 or None"),
        ({"size": 1, "sizes": []}, "x.sizes=[]: must be"),
        ({"size": 1, "sizes": [64, 0]}, "x.sizes[1]=0: must be greater than or equal to 1"),
        ({"size": 1, "pair": [1, "a"]}, "x.pair[1]='a': must be a valid integer"),
        ({"size": 1, "critic": "sate"}, "must be 'state' or 'observation'; did you mean 'state'?"),
        ({"size": 1, "spec": 3}, "x.spec=3: must be an instance of EnvSpec or None"),
        ({"size": 1, "gama": 0.9}, "x.gama: there is no such setting; did you mean 'gamma'?"),
    ],
)
def test_each_problem_is_one_line(arguments, problem):
    (found,) = find_problems(Example, arguments, prefix="x")
    assert problem in found


def test_all_problems_are_listed_at_once():
    found = find_problems(Example, {"rate": 0, "gamma": 2, "critc": "state"}, prefix="x")
    assert [line.partition(":")[0].partition("=")[0] for line in found] == ["x.rate", "x.gamma", "x.critc", "x.size"]


def test_arguments_that_fit_have_no_problems():
    assert find_problems(Example, {"size": 1, "rate": 1, "pair": [3, 4], "sizes": (1, 2), "unresolvable": "any"}) == []


def test_names_that_are_filled_in_are_neither_checked_nor_required():
    assert find_problems(Example, {}, filled_in=("size",)) == []
    assert find_problems(Example, {"size": "later"}, filled_in=("size",)) == []


def test_keyword_arguments_may_be_anything_unless_their_receiver_is_known():
    def open_ended(*, a: int = 0, **rest: int) -> None: ...

    def receiver(*, b: PositiveInt = 1) -> None: ...

    assert find_problems(open_ended, {"c": 1}) == []
    assert find_problems(open_ended, {"a": 1, "b": 2}, forwards_to=receiver) == []
    assert find_problems(open_ended, {"b": 0, "c": 1}, forwards_to=receiver) == [
        "b=0: must be greater than or equal to 1",
        "c: there is no such setting",
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("gama", "gamma"), ("lr", "learning_rate"), ("hidden", "hidden_sizes"), ("xyzzy", None)],
)
def test_nearest_knows_typos_abbreviations_and_its_limits(name, expected):
    hint = nearest(name, ["gamma", "learning_rate", "layer_norm", "hidden_sizes"])
    assert hint == (f"; did you mean {expected!r}?" if expected else "")


def test_nearest_of_nothing_is_nothing():
    assert nearest("a", []) == ""


def test_checked_raises_one_error_with_all_problems():
    with pytest.raises(ValueError, match=r"Example\.size=0: .*\nExample\.gama: "):
        Example(size=0, gama=1)


def test_checked_converts_only_int_to_float_and_list_to_tuple():
    arguments = Example(size=1, rate=2, pair=[3, 4], sizes=[5]).arguments
    assert (arguments["rate"], type(arguments["rate"])) == (2.0, float)
    assert arguments["pair"] == (3, 4)
    assert arguments["sizes"] == [5]


def test_checked_passes_objects_through_unchanged():
    marker = np.zeros(3)
    assert Example(size=1, unresolvable=marker).arguments["unresolvable"] is marker


def test_checked_refuses_positional_arguments():
    with pytest.raises(TypeError):
        Example(1)


def test_checked_keeps_the_signature():
    assert list(inspect.signature(Example).parameters)[:2] == ["size", "rate"]
    assert Example.__init__.__name__ == "__init__"


def test_checked_keeps_save_hyperparameters_working():
    class Module(LightningModule):
        @checked
        def __init__(self, *, width: PositiveInt = 1, name: str = "a"):
            super().__init__()
            self.save_hyperparameters(ignore=["name"])

    class Child(Module):
        def __init__(self, *, depth: int = 2, width: int = 3):
            super().__init__(width=width)
            self.save_hyperparameters()

    assert dict(Module(width=4).hparams) == {"width": 4}
    assert dict(Child(depth=5).hparams) == {"depth": 5, "width": 3}
