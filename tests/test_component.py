"""A component read off its signature: inputs, parameters, types, spaces, declarations."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from lab.component import REQUIRED, Component, Param, describe, type_name
from lab.declarations import call_by_name
from lab.errors import LabError
from lab.hooks import kl_loss, kl_reward, observe, surrogate
from lab.shelf import Shelf, load_file
from lab.spaces import Choice, Float, Int


@surrogate(needs_group=lambda steps: steps + 1)
def mine(
    advantages: Any,
    ratio: Any,
    *,
    memory: Any,
    cap: Annotated[float | None, Float(1, 10, log=True)] = 5.0,
    kind: Literal["std", "none"] = "std",
    steps: Annotated[int, Int(1, 8)] = 2,
    rng: Any,
    scale=0.5,
    needed: float,
    on: bool = True,
) -> Any:
    """The first line.

    The others.
    """


@pytest.fixture
def component() -> Component:
    return describe(mine, "lab_x")


def of(function: Callable[..., Any], decorate: Any = surrogate) -> Component:
    return describe(decorate(function), "lab_x")


def test_a_signature_is_the_declaration(component: Component) -> None:
    """Positional names are inputs in their own order, keywords are parameters or reserved."""
    assert component.inputs == ("advantages", "ratio")
    assert component.reserved == ("memory", "rng")
    assert list(component.params) == ["cap", "kind", "steps", "scale", "needed", "on"]
    assert (component.hook, component.slot, component.name) == ("surrogate", "surrogate", "mine")
    assert (component.doc, component.plugin) == ("The first line.", "lab_x")
    assert str(component) == "surrogate 'mine'"


def test_annotations_carry_type_and_search_space(component: Component) -> None:
    params = component.params
    assert (params["cap"].type, params["cap"].space) == (float | None, Float(1, 10, log=True))
    assert (params["steps"].type, params["steps"].space) == (int, Int(1, 8))
    assert (params["kind"].space, params["on"].space) == (None, None)
    assert params["scale"].type is float  # read off the default
    assert params["needed"].default is REQUIRED
    assert str(params["cap"]) == "float | None 1..10 log"


def test_the_slot_is_the_hooks_or_wrap_or_observe() -> None:
    def around(advantages: Any) -> Any:
        """Around."""
        return (yield)

    def cost(old_logp: Any) -> Any:
        """Cost."""

    def numbers(mask: Any) -> Any:
        """Numbers."""

    assert of(around, surrogate(wrapper=True)).slot == "wrap"
    assert of(cost, kl_reward).slot == "kl"
    assert of(numbers, observe).slot == "observe"


def test_annotations_as_text_are_read_in_their_module(tmp_path: Path) -> None:
    """`from __future__ import annotations`, an alias, and an input's type under TYPE_CHECKING."""
    file = tmp_path / "idea.py"
    text = '''
        from __future__ import annotations
        from typing import TYPE_CHECKING, Annotated
        from lab import Float, surrogate

        if TYPE_CHECKING:
            from nowhere import Tensor

        Tau = Annotated[float, Float(0.5, 4.0)]

        @surrogate
        def idea(ratio: Tensor, advantages: Tensor, *, tau: Tau = 1.0) -> Tensor:
            """One."""
            return tau * ratio * advantages
        '''
    file.write_text(textwrap.dedent(text), encoding="utf-8")
    (found,) = Shelf([load_file(file)])
    assert found.params["tau"] == Param(float, 1.0, Float(0.5, 4.0))


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("cap", 3, 3.0),  # TOML's 3 is a float where one is due
        ("cap", None, None),
        ("cap", "none", None),  # TOML has no null
        ("cap", "None", None),
        ("kind", "none", "none"),  # but a value of that name stays itself
        ("steps", 4, 4),
        ("on", False, False),
        ("cap", 1e9, 1e9),  # a space is advice, not the legal range
    ],
)
def test_values_come_in_the_parameters_type(
    component: Component, name: str, given: Any, value: Any
) -> None:
    bound = component.bind({"needed": 1.0, name: given})[name]
    assert bound == value
    assert type(bound) is type(value)


@pytest.mark.parametrize(
    ("name", "given", "due"),
    [
        ("cap", "3", "float | None"),
        ("cap", True, "float | None"),  # True would count as 1.0
        ("steps", 2.0, "int"),
        ("steps", "none", "int"),
        ("steps", True, "int"),
        ("kind", "Std", "'std' or 'none'"),
        ("on", 1, "bool"),
        ("on", "true", "bool"),
        ("scale", "none", "float"),
        ("cap", [3.0], "float | None"),
    ],
)
def test_a_value_of_another_type_is_refused(
    component: Component, name: str, given: Any, due: str
) -> None:
    """Silent conversion: the string "3" or the flag 1 would run as something else."""
    line = f"surrogate 'mine': {name}={given!r} is not {due}"
    with pytest.raises(LabError, match=f"^{re.escape(line)}$"):
        component.bind({"needed": 1.0, name: given})


def test_bind_fills_up_with_defaults(component: Component) -> None:
    values = component.bind({"needed": 2, "steps": 3})
    assert values == {
        "cap": 5.0,
        "kind": "std",
        "steps": 3,
        "scale": 0.5,
        "needed": 2.0,
        "on": True,
    }


def test_an_unknown_parameter_is_refused_with_the_nearest(component: Component) -> None:
    line = r"surrogate 'mine' has no parameter 'cpa'; it has .*cap.*Did you mean 'cap'\?"
    with pytest.raises(LabError, match=line):
        component.bind({"needed": 1.0, "cpa": 3})
    with pytest.raises(LabError, match="has no parameter 'memory'"):  # the loop fills it
        component.bind({"needed": 1.0, "memory": {}})
    with pytest.raises(LabError, match="has no parameter 'ratio'"):  # nor is an input one
        component.bind({"needed": 1.0, "ratio": 1})


def test_a_parameter_without_a_default_must_be_given(component: Component) -> None:
    with pytest.raises(LabError, match=r"surrogate 'mine' needs a value for needed \(float\)"):
        component.bind({})


def test_a_list_of_numbers_fits_a_tuple_parameter() -> None:
    """TOML has lists only: refused, such a parameter could not be set from a recipe at all."""

    def ranged(ratio: Any, *, window: tuple[float, float] = (0.8, 1.2)) -> Any:
        """Ranged."""

    assert of(ranged).bind({"window": [0.5, 2]})["window"] == (0.5, 2.0)


def test_a_declaration_may_be_a_function_of_parameters(component: Component) -> None:
    assert component.declaration("needs_group", {"steps": 3, "cap": 1.0}) == 4  # 3 + 1
    assert component.declaration("sequence_level", {}) is False


def test_call_by_name_gives_what_is_named_only() -> None:
    assert call_by_name(lambda low, high=9: (low, high), {"low": 1, "other": 2}) == (1, 9)


def test_types_read_as_a_person_writes_them() -> None:
    assert type_name(float) == "float"
    assert type_name(float | None) == "float | None"
    assert type_name(Literal["a", 1]) == "'a' or 1"
    assert type_name(list[int]) == "list[int]"


@pytest.mark.parametrize("option", ["credit", "when", "centre"])
def test_a_parameter_with_a_slot_options_name_is_refused(option: str) -> None:
    """The recipe writes both side by side: one of the two would never be read."""

    def cost() -> Any:
        namespace: dict[str, Any] = {}
        exec(f'def cost(old_logp, *, {option}="x"):\n    """Cost."""', namespace)
        return namespace["cost"]

    with pytest.raises(LabError, match=f"lab_x: cost: '{option}' is an option of the slot"):
        of(cost(), kl_reward)
    assert list(of(cost(), surrogate).params) == [option]  # a hook without options is free


@pytest.mark.parametrize("space", [Float(1, 2), Int(1, 2), Choice(1, 2)])
def test_a_default_outside_its_space_is_refused(space: Any) -> None:
    def odd(ratio: Any, *, tau: Annotated[int, space] = 3) -> Any:
        """Odd."""

    odd.__annotations__["tau"] = Annotated[int, space]
    line = rf"lab_x: odd: default tau=3 lies outside its search space {type(space).__name__}\("
    with pytest.raises(LabError, match=line):
        of(odd)


def test_a_default_of_none_lies_in_every_space() -> None:
    def fine(ratio: Any, *, cap: Annotated[float | None, Float(1, 2)] = None) -> Any:
        """Fine."""

    assert of(fine).bind({}) == {"cap": None}


def test_a_default_of_another_type_is_refused() -> None:
    def odd(ratio: Any, *, tau: float = "x") -> Any:  # type: ignore[assignment]
        """Odd."""

    with pytest.raises(LabError, match="lab_x: odd: default tau='x' is not float"):
        of(odd)


def test_a_name_may_stand_on_both_kl_hooks_with_equal_parameters_only() -> None:
    """Equality of parameters is of type, default and space, whatever the function."""

    def first(old_logp: Any, *, beta: Annotated[float, Float(0.1, 1)] = 0.5) -> Any:
        """One."""

    def second(logp: Any, *, beta: Annotated[float, Float(0.1, 1)] = 0.5) -> Any:
        """Two."""

    def third(logp: Any, *, beta: Annotated[float, Float(0.1, 2)] = 0.5) -> Any:
        """Three."""

    params = of(first, kl_reward).params
    assert params == of(second, kl_loss).params
    assert params != of(third, kl_loss).params
