"""Checks of arguments against the annotations of a constructor, all at once and with the nearest valid name.

Constructors say what they take where they take it::

    @checked
    def __init__(self, *, gamma: Fraction = 0.99, critic: Literal["state", "observation"] = "state"):

From the same annotations :func:`find_problems` checks a configuration before anything is built.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Annotated, Any, Literal, ParamSpec, TypeVar

from pydantic import ConfigDict, Field, InstanceOf, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUndefinedAnnotation, PydanticUserError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]

_ALIKE = 0.5  # of 1: names less alike than this are not proposed

# Strict: "3" is not a number, True is not 1 and 2.5 is not 2; an int is still a float.
_STRICT = ConfigDict(strict=True, arbitrary_types_allowed=True)


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns ``"; did you mean 'x'?"`` for the known name most like ``name``, or nothing if none is like it.

    Names are compared in full and by their initials: ``lr`` is ``learning_rate``.
    """

    def likeness(candidate: str) -> float:
        initials = "".join(word[0] for word in candidate.split("_") if word)
        forms = (candidate, initials) if len(initials) > 1 else (candidate,)
        return max(difflib.SequenceMatcher(a=name, b=form).ratio() for form in forms)

    best = max(known, key=likeness, default=None)
    return f"; did you mean {best!r}?" if best is not None and likeness(best) >= _ALIKE else ""


def find_problems(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    *,
    prefix: str = "",
    filled_in: Collection[str] = (),
    forwards_to: Callable[..., Any] | None = None,
) -> list[str]:
    """Lists all that is wrong with keyword arguments, without calling anything.

    Args:
        function: class or function that would be called.
        arguments: its keyword arguments.
        prefix: put before the names in the messages, such as ``"algorithm"``.
        filled_in: names that somebody else gives: neither checked nor required.
        forwards_to: class or function that takes the ``**kwargs`` of ``function``; without it they may be anything.

    Returns:
        One line a problem: unknown names, missing names, values of a wrong type or out of range.
    """
    checkable = {name: value for name, value in arguments.items() if name not in filled_in}
    return _check(_signature(function, forwards_to), checkable, prefix=prefix, filled_in=filled_in)[1]


def checked(init: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Makes a keyword-only ``__init__`` raise one ``ValueError`` that lists all problems of its arguments.

    Values arrive as they were given, except that an int becomes a float and a list a tuple where these are asked for.
    Annotations that cannot be checked are not. ``save_hyperparameters`` works in the decorated constructor; Lightning
    does not look through it for the arguments of subclasses, which call ``save_hyperparameters`` themselves.
    """

    @functools.wraps(init)
    def wrapper(self: Any, **arguments: Any) -> Result:
        values, problems = _check(_signature(init, None), arguments, prefix=type(self).__name__)
        if problems:
            raise ValueError("\n".join(problems))
        return init(self, **values)

    wrapper.__signature__ = inspect.signature(init)
    return wrapper


def extends(parent: Callable[..., None], **defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a keyword-only ``__init__`` take the arguments of the constructor of its base class too.

    The decorated function names further arguments, or takes inherited ones with another annotation or default, and may
    refuse them; it sets nothing. All arguments are checked as by :func:`checked`; the further ones reach the base class
    as :func:`own_arguments`, in time for what it builds from them.

    Args:
        parent: constructor of the base class, decorated by :func:`checked` or by this.
        defaults: of inherited arguments, where they differ from those of the base class.
    """

    def decorate(init: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(init).parameters
        inherited = inspect.signature(parent).parameters
        further = [name for name in own if name not in inherited]
        parameters = {
            name: own.get(name, parameter.replace(default=defaults.get(name, parameter.default)))
            for name, parameter in inherited.items()
        } | {name: own[name] for name in further}
        given = {name: p.default for name, p in parameters.items() if p.default is not p.empty}

        def wrapper(self: Any, **arguments: Any) -> None:
            values, problems = _check(_signature(wrapper, None), given | arguments, prefix=type(self).__name__)
            if problems:
                raise ValueError("\n".join(problems))
            init(self, **{name: values[name] for name in own if name != "self"})
            self.__dict__.setdefault(_OWN, {}).update({name: values[name] for name in further})
            parent(self, **{name: value for name, value in values.items() if name not in further})

        wrapper.__signature__ = inspect.Signature(list(parameters.values()))
        wrapper.__annotations__ = {**_annotations(parent), **_annotations(init)}
        wrapper.__doc__, wrapper.__name__, wrapper.__qualname__ = init.__doc__, init.__name__, init.__qualname__
        return wrapper

    return decorate


def own_arguments(instance: Any) -> dict[str, Any]:
    """Returns, once, the arguments that :func:`extends` took for the classes above the one that asks."""
    return instance.__dict__.pop(_OWN, {})


_OWN = "_own_arguments"


class _Signature(typing.NamedTuple):
    """What can be given by keyword.

    Attributes:
        validators: by name, ``None`` if anything goes.
        required: names without a default.
        choices: by name, the strings of a ``Literal``.
        open_ended: whether further names may be given.
    """

    validators: Mapping[str, TypeAdapter | None]
    required: tuple[str, ...]
    choices: Mapping[str, tuple[str, ...]]
    open_ended: bool


@functools.cache
def _signature(function: Callable[..., Any], forwards_to: Callable[..., Any] | None) -> _Signature:
    parameters = [p for name, p in inspect.signature(function).parameters.items() if name != "self"]
    annotations = _annotations(function)
    named = [p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    own = _Signature(
        validators={p.name: _validator(annotations.get(p.name, Any)) for p in named},
        required=tuple(p.name for p in named if p.default is p.empty),
        choices={p.name: tuple(_literals(annotations.get(p.name))) for p in named},
        open_ended=any(p.kind is p.VAR_KEYWORD for p in parameters),
    )
    if forwards_to is None:
        return own
    rest = _signature(forwards_to, None)
    return _Signature(
        validators={**rest.validators, **own.validators},
        required=own.required + rest.required,
        choices={**rest.choices, **own.choices},
        open_ended=rest.open_ended,
    )


def _annotations(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns annotations as objects; leaves out those that cannot be resolved at run time."""
    target = inspect.unwrap(function.__init__ if inspect.isclass(function) else function)
    resolved = {}
    for name, annotation in getattr(target, "__annotations__", {}).items():
        alone = types.SimpleNamespace(__annotations__={name: annotation})
        try:
            resolved |= typing.get_type_hints(alone, globalns=target.__globals__, include_extras=True)
        except (NameError, TypeError):  # imported for type checkers only, or no type at all
            continue
    return resolved


def _validator(annotation: Any) -> TypeAdapter | None:
    try:
        return TypeAdapter(annotation, config=_STRICT)
    except (PydanticUserError, PydanticSchemaGenerationError, PydanticUndefinedAnnotation):
        return TypeAdapter(InstanceOf[annotation]) if inspect.isclass(annotation) else None


def _literals(annotation: Any) -> Iterable[str]:
    """Yields the strings of the ``Literal`` in an annotation."""
    if typing.get_origin(annotation) is Literal:
        yield from (choice for choice in typing.get_args(annotation) if isinstance(choice, str))
    else:
        for argument in typing.get_args(annotation):
            yield from _literals(argument)


def _check(
    signature: _Signature, arguments: Mapping[str, Any], *, prefix: str, filled_in: Collection[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """Returns the values to use and the problems."""
    values, problems = {}, []
    prefix = f"{prefix}." if prefix else ""
    for name, value in arguments.items():
        if name not in signature.validators:
            values[name] = value
            if not signature.open_ended:
                problems.append(f"{prefix}{name}: there is no such setting{nearest(name, signature.validators)}")
            continue
        values[name], found = _check_value(signature.validators[name], value)
        for place, allowed in found.items():
            shown = f"{prefix}{name}{place}={_short(_entry(value, place))}"
            hint = nearest(value, signature.choices[name]) if isinstance(value, str) else ""
            problems.append(f"{shown}: must be {' or '.join(dict.fromkeys(allowed))}{hint}")
    missing = [name for name in signature.required if name not in arguments and name not in filled_in]
    problems += [f"{prefix}{name}: is required" for name in missing]
    return values, problems


def _check_value(validator: TypeAdapter | None, value: Any) -> tuple[Any, dict[str, list[str]]]:
    """Returns the value to use and, per place inside it such as ``"[1]"``, what is allowed there."""
    if validator is None:
        return value, {}
    attempts = [value, tuple(value)] if isinstance(value, list) else [value]
    for attempt in attempts:
        try:
            return validator.validate_python(attempt), {}
        except ValidationError as error:
            errors = error.errors(include_url=False)
    found: dict[str, list[str]] = {}
    for problem in errors:
        place = "".join(f"[{index}]" for index in problem["loc"] if isinstance(index, int))
        found.setdefault(place, []).append(problem["msg"].removeprefix("Input should be "))
    if validator.core_schema["type"] == "nullable":
        found.get("", []).append("None")
    return value, found


def _entry(value: Any, place: str) -> Any:
    for index in place.strip("[]").split("][") if place else ():
        value = value[int(index)]
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
