"""Constructors that take the arguments of their base class too."""

import inspect
from typing import Literal

import pytest

from marl_lightning.validation import (
    Fraction,
    PositiveInt,
    checked,
    extends,
    find_problems,
    own_arguments,
)


class Base:
    @checked
    def __init__(self, *, size: PositiveInt = 1, share: Fraction = 0.5, mode: Literal["hard", "soft"] = "hard"):
        self.built = {"size": size, "share": share, "mode": mode} | own_arguments(self)


class Child(Base):
    @extends(Base.__init__, share=0.25)
    def __init__(self, *, width: PositiveInt, depth: PositiveInt = 2) -> None:
        """Has more."""
        if depth > width:
            raise ValueError(f"depth={depth} is above width={width}")


class Grandchild(Child):
    @extends(Child.__init__, depth=3, mode="soft")
    def __init__(self, *, length: PositiveInt = 7, size: PositiveInt = 6) -> None: ...


def test_all_arguments_reach_the_base_class_in_time():
    assert Child(width=4).built == {"size": 1, "share": 0.25, "mode": "hard", "width": 4, "depth": 2}
    assert Child(width=4, share=1, depth=1, size=9).built == {
        "size": 9, "share": 1.0, "mode": "hard", "width": 4, "depth": 1,
    }  # fmt: skip


def test_it_can_be_repeated_and_arguments_taken_over():
    built = Grandchild(width=5).built
    assert built == {"size": 6, "share": 0.25, "mode": "soft", "width": 5, "depth": 3, "length": 7}


def test_the_base_class_is_as_before():
    assert Base().built == {"size": 1, "share": 0.5, "mode": "hard"}
    with pytest.raises(ValueError, match="width"):
        Base(width=1)


def test_own_arguments_are_handed_over_once():
    child = Child(width=4)
    assert own_arguments(child) == {}
    assert "_own_arguments" not in vars(child)


def test_all_problems_at_once_with_the_name_of_the_class():
    with pytest.raises(ValueError, match="Child") as error:
        Child(size=0, mode="sof", widht=3, depth=2.5)
    lines = str(error.value).splitlines()
    assert lines == [
        "Child.size=0: must be greater than or equal to 1",
        "Child.mode='sof': must be 'hard' or 'soft'; did you mean 'soft'?",
        "Child.depth=2.5: must be a valid integer",
        "Child.widht: there is no such setting; did you mean 'width'?",
        "Child.width: is required",
    ]


def test_a_constructor_may_refuse_its_own_arguments():
    with pytest.raises(ValueError, match="depth=3 is above width=1"):
        Child(width=1, depth=3)


def test_defaults_are_checked_too():
    class Wrong(Base):
        @extends(Base.__init__, share=2.0)
        def __init__(self, *, width: PositiveInt = 1) -> None: ...

    with pytest.raises(ValueError, match=r"Wrong.share=2\.0"):
        Wrong()


def test_the_signature_is_complete():
    parameters = inspect.signature(Grandchild).parameters
    assert {name: parameter.default for name, parameter in parameters.items()} == {
        "size": 6, "share": 0.25, "mode": "soft", "width": inspect.Parameter.empty, "depth": 3, "length": 7,
    }  # fmt: skip
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters.values())
    assert Child.__init__.__doc__ == "Has more."
    assert Child.__init__.__qualname__ == "Child.__init__"


def test_configurations_are_checked_before_anything_is_built():
    assert find_problems(Grandchild, {"width": 3, "size": 2}) == []
    problems = find_problems(Grandchild, {"size": -1, "lenght": 3}, prefix="algorithm")
    assert problems == [
        "algorithm.size=-1: must be greater than or equal to 1",
        "algorithm.lenght: there is no such setting; did you mean 'length'?",
        "algorithm.width: is required",
    ]
