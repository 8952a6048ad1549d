"""Components as people get them wrong, as files: one line that names plugin, component, way out.

`Shelf.installed([file])` and a bench are what `--plugin idea.py` and `lab.evaluate` do. A raw
traceback here is what an author would see.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
from cases import bench

from lab.errors import LabError
from lab.shelf import Shelf

HEAD = """
    from __future__ import annotations
    from typing import Annotated, Any, Literal
    import torch
    from lab import Choice, Float, Int, LabError, alias, surrogate
"""


def idea(folder: Path, text: str) -> Path:
    file = folder / "idea.py"
    file.write_text(textwrap.dedent(HEAD) + textwrap.dedent(text), encoding="utf-8")
    return file


def message(folder: Path, text: str, **slots: Any) -> str:
    """The one line that a person reads, from the shelf or from the bench."""
    file = idea(folder, text)
    with pytest.raises(LabError) as error:
        bench(Shelf.installed([file]), **(slots or {"surrogate": "mine"}))
    line = str(error.value)
    assert len(line.splitlines()) == 1
    assert " at 0x" not in line  # no object's address
    assert "Error:" not in line.replace("KeyError:", "")  # nor a raw exception, but for KeyError
    return line


def component(signature: str, body: str = "return ratio * advantages", mark: str = "") -> str:
    return f'''
@surrogate{mark}
def mine({signature}):
    """One line."""
    {body}
'''


SIGNATURES = {
    # what is written: what the line must say, in this order
    "*args": ("*args", ["idea.py: mine:", "*args", "name each input"]),
    "**kwargs": ("ratio, **kwargs", ["idea.py: mine:", "**kwargs", "name each input"]),
    "unknown input": (
        "ratoi, advantages",
        ["idea.py: mine:", "'ratoi'", "surrogate", "Did you mean 'ratio'?", "logp, old_logp"],
    ),
    "another hook's input": ("ratio, values", ["idea.py: mine:", "'values'", "hyperparameters"]),
    "a default on an input": (
        "ratio, advantages=None",
        ["idea.py: mine:", "'advantages'", "default", "after '*'"],
    ),
    "a parameter before the star": ("ratio, tau=1.0", ["idea.py: mine:", "'tau'", "after '*'"]),
    "a reserved input": ("ratio, memory", ["idea.py: mine:", "'memory'", "after '*'"]),
    "a default outside": (
        "ratio, *, tau: Annotated[float, Float(1, 2)] = 3.0",
        ["idea.py: mine:", "tau=3.0", "outside its search space", "Float(", "1", "2"],
    ),
    "a default of no choice": (
        'ratio, *, kind: Annotated[str, Choice("a", "b")] = "c"',
        ["idea.py: mine:", "kind='c'", "Choice(", "'a', 'b'"],
    ),
    "two spaces": (
        "ratio, *, tau: Annotated[float, Float(1, 2), Float(1, 3)] = 1.5",
        ["idea.py: mine:", "tau", "2 search spaces"],
    ),
    "a default of another type": (
        'ratio, *, tau: float = "x"',
        ["idea.py: mine:", "tau='x'", "is not float"],
    ),
    "none without saying so": ("ratio, *, tau: float = None", ["idea.py: mine:", "tau=None"]),
    "an unknown annotation": (
        "ratio, *, tau: Flaot = 1.0",
        ["idea.py: mine:", "tau", "Flaot"],
    ),
    "a broken annotation": (
        "ratio, *, tau: Annotated[float, Float(2, 1)] = 1.0",
        ["idea.py: mine:", "tau", "Float(2, 1): low must lie below high"],
    ),
    "a tensor as a parameter": (
        "ratio, *, tau: torch.Tensor = None",
        ["idea.py: mine:", "tau", "Tensor"],
    ),
    "a parameter called name": (
        "ratio, *, name: str = 'x'",
        ["idea.py: mine:", "'name'"],
    ),
}


@pytest.mark.parametrize("what", SIGNATURES)
def test_a_wrong_signature_is_refused_by_the_shelf(tmp_path: Path, what: str) -> None:
    signature, words = SIGNATURES[what]
    line = message(tmp_path, component(signature, "return ratio * 1"))
    place = -1
    for word in words:
        assert word in line[place + 1 :], line
        place = line.index(word, place + 1)


def test_a_parameter_called_like_a_slot_option_is_refused(tmp_path: Path) -> None:
    text = '''
        from lab import kl_reward

        @kl_reward
        def mine(old_logp, ref_logp, *, credit: str = "x"):
            """One line."""
            return old_logp - ref_logp
        '''
    line = message(tmp_path, text, kl="mine")
    assert line.startswith("idea.py: mine: 'credit' is an option of the slot; rename")


@pytest.mark.parametrize("doc", ["", '    """"""\n', '    """ """\n'])
def test_a_component_without_a_docstring_is_refused(tmp_path: Path, doc: str) -> None:
    text = f"\n@surrogate\ndef mine(ratio):\n{doc}    return ratio * 1\n"
    assert message(tmp_path, text).startswith("idea.py: mine: no docstring; its first line is")


WRAPPERS = {
    "a generator without wrapper": (
        component("ratio", "result = yield\n    return result"),
        {"surrogate": "mine"},
        ["idea.py: mine:", "it yields", "@surrogate(wrapper=True)"],
    ),
    "a wrapper without yield": (
        component("ratio", "return ratio * 1", "(wrapper=True)"),
        {"wrap": ["mine"]},
        ["idea.py: mine:", "`result = yield`"],
    ),
    "a wrapper that never yields": (
        component("ratio", "if False:\n        yield\n    return ratio * 1", "(wrapper=True)"),
        {"wrap": ["mine"]},
        ["wrap 'mine'", "yield"],
    ),
    "a wrapper that yields twice": (
        component("ratio", "result = yield\n    yield\n    return result", "(wrapper=True)"),
        {"wrap": ["mine"]},
        ["wrap 'mine'", "yield"],
    ),
    "a wrapper that forgets its return": (
        component("ratio", "result = yield", "(wrapper=True)"),
        {"wrap": ["mine"]},
        ["wrap 'mine' returned nothing; is there a `return`?"],
    ),
    "a wrapper in the slot of what it wraps": (
        component("ratio", "return (yield)", "(wrapper=True)"),
        {"surrogate": "mine"},
        ["no surrogate 'mine'."],
    ),
    "a component in wrap": (
        component("ratio", "return ratio * 1"),
        {"wrap": ["mine"]},
        ["no wrap 'mine'."],
    ),
}


@pytest.mark.parametrize("what", WRAPPERS)
def test_a_wrong_wrapper_is_refused(tmp_path: Path, what: str) -> None:
    """pluggy raises a RuntimeError from its teardown, or passes a wrapper by in silence."""
    text, slots, words = WRAPPERS[what]
    line = message(tmp_path, text, **slots)
    assert [w for w in words if w not in line] == [], line


DECLARATIONS = {
    "an unknown one": ("needsgroup=2", ["needsgroup", "needs_group"]),
    "a parameter that is not there": ("bounds=lambda lo: (lo, 2)", ["mine", "bounds", "'lo'"]),
    "another in needs_group": ("needs_group=lambda n: n", ["mine", "needs_group", "'n'"]),
    "another in remember": (
        "remember=lambda memory, step, *, beta: {}",
        ["mine", "remember", "'beta'"],
    ),
    "needs_group of text": ("needs_group='2'", ["mine", "needs_group", "'2'"]),
    "needs_group of nothing": ("needs_group=lambda: None", ["mine", "needs_group", "None"]),
    "needs_group below one": ("needs_group=0", ["mine", "needs_group", "0"]),
    "corrects something else": ("corrects='rolout'", ["mine", "corrects", "'rollout'"]),
    "bounds that are numbers": ("bounds=(0.8, 1.2)", ["mine", "bounds"]),
    "bounds of one number": ("bounds=lambda: 1.2", ["mine", "bounds"]),
    "bounds of three": ("bounds=lambda: (0, 1, 2)", ["mine", "bounds"]),
    "bounds the wrong way": ("bounds=lambda: (1.2, 0.8)", ["mine", "bounds"]),
    "bounds that raise": ("bounds=lambda: {}['x']", ["mine", "bounds"]),
    "a level of text": ("sequence_level='no'", ["mine", "sequence_level", "'no'"]),
    "a controller of one argument": ("remember=lambda memory: {}", ["mine", "remember"]),
    "a controller that is none": ("remember=3", ["mine", "remember"]),
    "an exemption without a reason": ("exempt='P8'", ["mine", "exempt"]),
}


@pytest.mark.parametrize("what", DECLARATIONS)
def test_a_wrong_declaration_is_refused(tmp_path: Path, what: str) -> None:
    """A declaration that is never read is a check that never happens."""
    mark, words = DECLARATIONS[what]
    line = message(tmp_path, component("ratio, advantages", mark=f"({mark})"))
    assert [w for w in words if w not in line] == [], line


RAISED = {
    "KeyError": ("return {}['clip']", ["surrogate 'mine' of idea.py", "KeyError: 'clip'", "line"]),
    "AttributeError": ("return ratio.clipp(1)", ["surrogate 'mine' of idea.py", "clipp", "line"]),
    "TypeError": ("return ratio + {}", ["surrogate 'mine' of idea.py", "TypeError", "line"]),
    "shapes": ("return ratio @ advantages", ["surrogate 'mine' of idea.py", "shapes", "line"]),
    "ValueError": ("raise ValueError('tau=-1; it is positive')", ["'mine': tau=-1; it is positi"]),
    "lines": ("raise ValueError('tau=-1\\nis not')", ["surrogate 'mine': tau=-1", "is not"]),
    "LabError": ("raise LabError('tau=-1; no')", ["'mine'", "tau=-1; no"]),
    "StopIteration": ("raise StopIteration", ["surrogate 'mine' of idea.py", "StopIteration"]),
    "AssertionError": ("assert False, 'why'", ["surrogate 'mine' of idea.py", "why", "line"]),
    "SystemExit": ("raise SystemExit(3)", ["surrogate 'mine' of idea.py", "SystemExit", "line"]),
}


@pytest.mark.parametrize("kind", RAISED)
@pytest.mark.parametrize("place", ["component", "before the yield", "after the yield"])
def test_what_a_component_raises_is_told_with_its_name(
    tmp_path: Path, kind: str, place: str
) -> None:
    """A bare KeyError: 'clip' says neither which component nor where."""
    body, words = RAISED[kind]
    text = component("ratio, advantages", body)
    slots: dict[str, Any] = {"surrogate": "mine"}
    if place != "component":
        body = f"yield\n    {body}" if place == "after the yield" else f"{body}\n    yield"
        text, slots = component("ratio, advantages", body, "(wrapper=True)"), {"wrap": ["mine"]}
        words = [w.replace("surrogate 'mine'", "wrap 'mine'") for w in words]
    file = idea(tmp_path, text)
    with pytest.raises(LabError) as error:
        bench(Shelf.installed([file]), **slots)
    line = str(error.value)
    assert len(line.splitlines()) == 1
    assert [w for w in words if w not in line] == [], line


def test_ctrl_c_in_a_component_is_heard(tmp_path: Path) -> None:
    file = idea(tmp_path, component("ratio", "raise KeyboardInterrupt"))
    with pytest.raises(KeyboardInterrupt):
        bench(Shelf.installed([file]), surrogate="mine")


NAMES = {
    "twice by name=": (
        component("ratio, advantages").replace("@surrogate", "@surrogate(name='same')")
        + component("ratio, advantages")
        .replace("@surrogate", "@surrogate(name='same')")
        .replace("def mine", "def yours"),
        ["surrogate 'same' is offered twice: by idea.py and by idea.py"],
    ),
    "a built-in's": (
        component("ratio, advantages").replace("@surrogate", "@surrogate(name='cispo')"),
        ["surrogate 'cispo' is offered twice: by lab_cispo and by idea.py"],
    ),
    "an alias of a taken name": (
        component("ratio, advantages, *, t: float = 1.0")
        + "other = alias(mine, 'ppo_clip', 'Other.', t=2.0)\n",
        ["surrogate 'ppo_clip' is offered twice: by lab_ppo and by idea.py"],
    ),
}


@pytest.mark.parametrize("what", NAMES)
def test_a_taken_name_is_refused_with_both_plugins(tmp_path: Path, what: str) -> None:
    text, words = NAMES[what]
    line = message(tmp_path, text)
    assert [w for w in words if w not in line] == [], line


KL = '''
from lab import kl_loss, kl_reward

@kl_reward(name="k")
def reward(old_logp, ref_logp, *, beta: float = 0.1):
    """One."""
    return beta * (old_logp - ref_logp)

@kl_loss(name="k")
def loss(logp, ref_logp, *, beta: float = {beta}):
    """Two."""
    return beta * (logp - ref_logp)
'''


def test_a_kl_name_with_unequal_parameters_is_refused(tmp_path: Path) -> None:
    """`beta` would mean two numbers."""
    line = message(tmp_path, KL.format(beta=0.2), kl="k")
    assert line.startswith("kl 'k' stands on two hooks, by idea.py (kl_loss) and idea.py (kl_rew")
    assert line.endswith("that takes one plugin and equal parameters")
    assert bench(Shelf.installed([idea(tmp_path, KL.format(beta=0.1))]), kl="k")


def test_a_kl_name_from_two_plugins_is_refused(tmp_path: Path) -> None:
    both = textwrap.dedent(KL.format(beta=0.1))
    first, second = tmp_path / "first.py", tmp_path / "second.py"
    cut = both.index("@kl_loss")
    first.write_text(both[:cut])
    second.write_text("from lab import kl_loss\n" + both[cut:])
    with pytest.raises(LabError, match=r"by first\.py \(kl_reward\) and second\.py \(kl_loss\)"):
        bench(Shelf.installed([first, second]), kl="k")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"name": "mine", "tua": 1}, ["surrogate 'mine' has no parameter 'tua'", "'tau'?"]),
        ({"name": "mine", "tau": "x"}, ["surrogate 'mine': tau='x' is not float"]),
        ({"name": "mine", "tau": None}, ["surrogate 'mine': tau=None is not float"]),
        ({"name": "mine", "on": 1}, ["surrogate 'mine': on=1 is not bool"]),
        ({"name": "mine", "kind": "c"}, ["surrogate 'mine': kind='c' is not 'a' or 'b'"]),
        ({"name": "mien"}, ["no surrogate 'mien'. Did you mean 'mine'?", "Available: cispo"]),
    ],
)
def test_a_recipe_that_gets_a_good_component_wrong(
    tmp_path: Path, given: dict[str, Any], words: list[str]
) -> None:
    text = component(
        'ratio, *, tau: float = 1.0, on: bool = True, kind: Literal["a", "b"] = "a"',
        "return tau * ratio",
    )
    line = message(tmp_path, text, surrogate=given)
    assert [w for w in words if w not in line] == [], line
