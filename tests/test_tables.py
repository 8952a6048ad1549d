"""Scores, verdicts and tables of results folders whose numbers are made, so that each is known."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from small import go
from studies_made import Made

from lab import records, results, tables
from lab.errors import LabError
from lab.recipe import Use
from lab.results import Results
from lab.settings import OBSERVERS
from lab.tables import compared, ran, terms
from lab.tables.scores import evaluations, judged, progress, reference, scores
from lab.tables.table import NOTHING, interval_text, markdown, plain, weights

ROOT = Path(__file__).parent.parent
ONE = "as given"
UP = [0.50, 0.52, 0.49, 0.55, 0.51, 0.53, 0.50, 0.54]
DOWN = [0.30, 0.33, 0.28, 0.31, 0.35, 0.30, 0.29, 0.32]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Results]:
    """A made study, written and loaded; it need not survive a power cut."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)

    def make(**what: Any) -> Results:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        return results.load(Made(**what).write(folder))

    return make


def of(table: pd.DataFrame, **place: Any) -> pd.DataFrame:
    for name, value in place.items():
        table = table[table[name] == value]
    return table


def test_the_final_score_is_the_mean_of_the_last_tenth_never_the_best(made: Any) -> None:
    """The maximum, the last value alone, or the mean of all would each be another number."""
    study = made(rollouts=40, updates=2, seeds=2, finals={("ppo", ONE): [0.4, 0.1]})
    curve = of(evaluations(study), recipe="ppo", seed=9001)["score"]
    # evaluations at 0, 2, .. 40 are 21, of which 21 // 10 = 2 count
    assert len(curve) == 21
    final = of(scores(study), recipe="ppo", seed=9001)["final"].item()
    assert final == pytest.approx((curve.iloc[-2] + 0.1) / 2, abs=1e-15)
    assert final < max(curve)


def test_a_diverged_run_scores_the_floor_at_every_evaluation_after_its_end(made: Any) -> None:
    """Its last score carried on, or a mean over what it reached, would reward divergence."""
    study = made(
        rollouts=38, updates=2, seeds=2, diverged={("ppo", ONE, 9000): 37, ("grpo", ONE, 9001): 3}
    )
    # 20 evaluations at 0, 2, .. 38; the last 2, at 36 and 38, count
    late = of(evaluations(study), recipe="ppo", seed=9000)
    assert list(late["rollout"]) == list(range(0, 39, 2))
    assert list(late["reached"]) == [True] * 19 + [False]
    at_36 = late["score"].iloc[-2]
    by_run = scores(study).set_index(["recipe", "seed"])
    assert by_run.loc[("ppo", 9000), "final"] == pytest.approx((at_36 + 0.0) / 2, abs=1e-15)
    early = of(evaluations(study), recipe="grpo", seed=9001)
    assert list(early["reached"]) == [True, True] + [False] * 18  # 0 and 2
    assert by_run.loc[("grpo", 9001), ["final", "at_floor"]].tolist() == [0.0, 18]


@pytest.mark.parametrize(
    "budget",
    [{"rollouts": 6}, {"updates": 24}, {"generated_tokens": 600}, {"trained_tokens": 1200}],
)
def test_the_grid_of_a_failed_run_is_that_of_its_siblings(made: Any, budget: Any) -> None:
    """The floor counts at as many evaluations as the plan has, whatever the budget counts.

    A rollout has 4 updates and 100 generated tokens, each trained on twice: 6 rollouts each way.
    """
    study = made(seeds=2, rollouts=6, updates=4, budget=budget, diverged={("ppo", ONE, 9000): 4})
    fine, failed = (of(evaluations(study), recipe="ppo", seed=s) for s in (9001, 9000))
    columns = ["number", "update", "rollout", "generated_tokens", "trained_tokens"]
    assert failed[columns].to_numpy().tolist() == fine[columns].to_numpy().tolist()
    assert list(failed["reached"]) == [True, True, False, False]


def test_scores_are_normalised_by_the_mean_start_of_the_seeds(made: Any) -> None:
    """Each run by its own start, the floor for the start, or a seed that counts once a recipe."""
    study = made(
        seeds=2,
        starts=[0.1, 0.2],
        finals={("ppo", ONE): [0.55, 0.15]},
        crashed={("grpo", ONE, 9001)},
    )
    scored = scores(study)
    # by runs the mean start would be (.1 + .1 + .2)/3; by seeds it is (.1 + .2)/2
    assert reference(scored) == pytest.approx(0.15, abs=1e-15)
    # (.55 - .15)/(1 - .15) and 0
    assert of(scored, recipe="ppo")["normalised"].tolist() == pytest.approx([0.4 / 0.85, 0.0])


def test_a_crashed_run_counts_with_the_floor_and_has_no_start(made: Any) -> None:
    """It has no evaluation at all: it must not vanish from the mean."""
    study = made(seeds=3, finals={("ppo", ONE): [0.3, 0.6, 0.9]}, crashed={("ppo", ONE, 9001)})
    row = of(scores(study), recipe="ppo", seed=9001)
    assert (row["final"].item(), row["at_floor"].item(), row["evaluations"].item()) == (0.0, 3, 3)
    assert math.isnan(row["start"].item())
    table = of(compared.comparison(study).data, recipe="ppo")
    assert table["mean"].item() == pytest.approx((0.3 + 0.0 + 0.9) / 3)
    assert (table["n"].item(), table["failures"].item()) == (3, 1)


def test_what_training_brought_is_counted_from_each_seed_s_own_start(made: Any) -> None:
    """From the mean start, the spread of starts would widen the interval of every gain."""
    study = made(
        seeds=3,
        starts=[0.1, 0.2, 0.3],
        finals={("ppo", ONE): [0.15, 0.26, 0.34]},
        crashed={("grpo", ONE, 9002)},
    )
    assert of(scores(study), recipe="ppo")["gain"].tolist() == pytest.approx([0.05, 0.06, 0.04])
    row = of(compared.comparison(study).data, recipe="ppo")
    # mean .05, s = .01: half-width 4.302653 * .01 / sqrt 3 = .024841
    low_high = [row["gain_low"].item(), row["gain_high"].item()]
    assert low_high == pytest.approx([0.025159, 0.074841], abs=1e-6)
    crashed = of(scores(study), recipe="grpo", seed=9002)
    assert crashed["gain"].item() == pytest.approx(0.0 - 0.3)  # it started like its sibling


def test_where_nothing_is_left_to_learn_scores_are_refused(made: Any) -> None:
    """A division by 0 would print as nan in every table."""
    with pytest.raises(LabError, match="starting policy scores 1 and the best possible is 1"):
        scores(made(seeds=2, starts=[1.0, 1.0]))


def test_a_metric_that_no_run_recorded_is_named(made: Any) -> None:
    """A typing error in the study would end in a KeyError of a recipe."""
    with pytest.raises(LabError, match=r"run \w{8} has no held-out number 'score'"):
        judged(made(seeds=1, omitted=("score",)))


def test_pairs_are_made_by_seed(made: Any) -> None:
    """Paired by place, a study whose plan lists seeds in another order would be another study."""
    study = made(finals={("ppo", ONE): UP, ("grpo", ONE): DOWN})
    (straight,) = judged(study)
    (shuffled,) = judged(
        Results(
            study.folder, study.study, study.table.sample(frac=1, random_state=1), study.pulls,
            study.answers, study.runs.sample(frac=1, random_state=2),
        )
    )  # fmt: skip
    assert straight.word == shuffled.word == "better"
    assert shuffled.difference.mean == pytest.approx(straight.difference.mean, abs=1e-12)
    assert shuffled.rho == pytest.approx(straight.rho, abs=1e-12)
    d = [(x - y) / (1 - reference(scores(study))) for x, y in zip(UP, DOWN, strict=True)]
    assert straight.difference.mean == pytest.approx(sum(d) / 8)
    assert straight.contrast.name == "ppo - grpo"


@pytest.mark.parametrize(
    ("numbers", "word", "rail"),
    [
        ({"response_truncated": 0.95}, "inconclusive", "G4"),
        ({"zero_variance": 0.93}, "inconclusive", "G5"),
        ({"response_truncated": 0.6}, "better", ""),
    ],
)
def test_guard_rails_see_what_the_rollouts_recorded(
    made: Any, numbers: Any, word: str, rail: str
) -> None:
    """Read from the held-out numbers, or not at all, they would never be met."""
    (found,) = judged(made(finals={("ppo", ONE): UP, ("grpo", ONE): DOWN}, numbers=numbers))
    assert (found.word, "".join(found.rails[:1])) == (word, rail)
    warned = numbers.get("response_truncated") == 0.6
    assert ("truncated share .60" in " ".join(found.warnings)) == warned
    # what has decided is said once, in the note
    assert len(compared.told_warnings(found)) == warned


def test_identical_by_construction_needs_somebody_who_looked(made: Any) -> None:
    """Without a record of `outside` nobody knows that no token was; 0 of it is a record."""
    near = {("ppo", ONE): UP, ("grpo", ONE): [x + 1e-7 for x in UP]}
    silent = ("outside", "outside_positive", "outside_negative")
    assert "G6" in judged(made(finals=near, numbers=dict.fromkeys(silent, 0.0)))[0].rails
    assert "G6" not in judged(made(finals=near, omitted=silent))[0].rails


def test_an_unfinished_study_has_means_and_no_verdict(made: Any) -> None:
    """A look at half of the runs is not the test that was declared."""
    missing = {("ppo", ONE, 9007)}
    study = made(finals={("ppo", ONE): UP, ("grpo", ONE): DOWN}, missing=missing)
    assert judged(study) == []
    assert progress(study) == "15 of 16 runs"
    table = compared.comparison(study)
    assert list(table.data["n"]) == [7, 8]
    assert not any(table.bold)
    assert set(table.shown["by verdict"]) == {"no verdict"}
    shown = compared.contrasts(study)
    assert list(shown.data["note"]) == ["15 of 16 runs: no verdict"]
    assert shown.data["p"].isna().all()
    assert "unfinished: no verdicts" in markdown(table, tables.stamp(study))


def verdict(word: str) -> Any:
    return SimpleNamespace(word=word)


@pytest.mark.parametrize(
    ("said", "best"),
    [
        ([("a", "b", "inconclusive")], {"a", "b"}),
        ([("a", "b", "equivalent")], {"a", "b"}),
        ([("a", "b", "better")], {"a"}),
        ([("a", "b", "worse")], {"b"}),
        ([("a", "b", "better"), ("b", "c", "inconclusive")], {"a"}),  # c ties with a loser alone
        ([("a", "b", "better"), ("a", "c", "inconclusive")], {"a", "c"}),
        ([("a", "b", "")], set()),
        ([("a", "b", "exploratory")], set()),
    ],
)
def test_bold_is_by_verdict(said: Any, best: set[str]) -> None:
    """By the larger mean, a tie would have a winner; by "never lost", so would a bystander."""
    declared = [{"a": a, "b": b, "condition": ONE} for a, b, _ in said]
    stands = compared.standing(declared, [verdict(word) for *_, word in said])
    assert {arm for (arm, _), (_, ok) in stands.items() if ok} == best


def test_what_a_verdict_says_is_said_of_both_sides_and_of_its_condition() -> None:
    """`a worse than b` must not read as b's loss, nor reach another condition."""
    declared = [{"a": "a", "b": "b", "condition": "x"}, {"a": "a", "b": "b", "condition": "y"}]
    stands = compared.standing(declared, [verdict("worse"), verdict("equivalent")])
    assert {arm: words for arm, (words, _) in stands.items()} == {
        ("a", "x"): "worse than b",
        ("b", "x"): "better than a",
        ("a", "y"): "equivalent to b",
        ("b", "y"): "equivalent to a",
    }


def test_csv_is_exact_and_markdown_is_rounded_by_the_interval(made: Any) -> None:
    """Rounded files cannot be computed with; numparse would print .30 as 0.3."""
    study = made(finals={("ppo", ONE): UP, ("grpo", ONE): DOWN})
    files = {f.name: f for f in tables.write(study)}
    read = pd.read_csv(files["comparison.csv"])
    assert read["mean"].tolist() == compared.comparison(study).data["mean"].tolist()
    assert (read["study"] == study.study["hash"]).all()
    text = files["comparison.md"].read_text(encoding="utf-8")
    # s = .0205 over 8 runs: half-width 2.365 * .0205 / sqrt 8 = .0172
    assert "**.518 [.500, .535]**" in text
    assert study.study["hash"] in text
    assert "| grpo " in text
    assert "condition" not in text.split("\n")[2]


def test_a_bar_in_a_name_stays_in_its_cell() -> None:
    """It would open a column of its own."""
    shown = pd.DataFrame({"recipe": ["a|b"], "note": ["two\nlines"]})
    text = markdown(tables.Table("t", "T", shown, shown, "", [True], ("recipe",)), "")
    assert "| **a\\|b** | two lines |" in text


def test_numbers_of_one_run_have_no_interval(made: Any) -> None:
    """Nor have those of two: it would be 12 standard errors wide and look like a result."""
    study = made(seeds=2)
    assert compared.comparison(study).data[["low", "high"]].isna().all(axis=None)
    assert judged(study)[0].word == ""
    assert interval_text(0.25, math.nan, math.nan) == ".250"


def test_failures_are_counted_with_when_and_why(made: Any) -> None:
    """A table that shows the survivors alone would call the least stable recipe the best."""
    failed = {"diverged": {("ppo", ONE, 9000): 3}, "crashed": {("ppo", ONE, 9001)}}
    study = made(seeds=4, **failed)
    table = ran.failures(study).data
    # two whole rollouts of 2 updates, and one update of the third
    assert table[["seed", "status", "update"]].to_numpy().tolist() == [
        [9000, "diverged", 5],
        [9001, "crashed", 0],
    ]
    assert list(table["cause"]) == ["ppo: 3 of 96 values are not finite", "no memory left"]
    rates = of(ran.failure_rates(study).data, recipe="ppo")
    # Wilson, 2 of 4: (.5 + z^2/8 -+ z sqrt(.0625 + z^2/64))/(1 + z^2/4), z = 1.959964
    assert rates[["share", "low", "high"]].to_numpy()[0] == pytest.approx([0.5, 0.150039, 0.849961])


def test_a_reference_without_run_folders_gives_the_same_tables(made: Any) -> None:
    """The cause of a failure, a crashed run, the sampled answers: all must be in the four files."""
    study = made(
        seeds=3, diverged={("ppo", ONE, 9000): 3}, crashed={("grpo", ONE, 9001)}, answer="NA"
    )
    results.write(study)
    first = {f.name: f.read_bytes() for f in tables.write(study)}
    shutil.rmtree(study.folder / results.RUNS)
    again = results.load(study.folder)
    assert {f.name: f.read_bytes() for f in tables.write(again)} == first
    assert again.answers.to_dict("records") == study.answers.to_dict("records")
    assert set(again.answers["response"]) == {"NA"}
    assert again.complete
    pd.testing.assert_frame_equal(again.pulls, study.pulls, check_dtype=False)


def test_one_recipe_under_two_names_is_one_run_and_two_arms(made: Any) -> None:
    """Looked up by its key alone, a shared run would count twice once its folder is gone."""
    study = made(recipes=("ppo", "grpo"), seeds=6)
    plan = [dict(row) for row in study.study["plan"]]
    keys = {row["seed"]: row["run_key"] for row in plan if row["recipe"] == "ppo"}
    for row in plan:
        row["run_key"] = keys[row["seed"]]
    results.records.write_json(study.folder / results.STUDY, {**study.study, "plan": plan})
    same = results.load(study.folder)
    (found,) = judged(same)
    assert (found.word, found.rails[0]) == ("equivalent", "G6")
    results.write(same)
    shutil.rmtree(study.folder / results.RUNS)
    assert len(results.load(study.folder).table) == len(same.table)
    assert list(scores(results.load(study.folder))["final"]) == list(scores(same)["final"])


def test_what_was_run_is_told_once_where_it_is_the_same(made: Any) -> None:
    """Sixteen equal columns hide the one that differs."""
    study = made(recipes=("ppo", "cispo", "reinforce"), conditions=("lr 1e-4", "lr 3e-4"), seeds=1)
    table = ran.hyperparameters(study)
    assert list(table.shown)[-2:] == ["weight interval", "lr"]
    assert list(table.shown["weight interval"])[:3] == ["[0.8, 1.2]", "[0, 5]", "no bound"]
    assert "epochs 2" in table.note
    assert [weights(None, 5.0), weights(0.2, None)] == ["up to 5", "from 0.2"]
    told = dict(ran.environment(study).data.to_numpy().tolist())
    assert (told["hash"], told["seeds"]) == ("0123456789abcdef", "9000")
    assert [plain([3, 4, 5]), plain([3, 5]), plain({})] == ["3-5", "3, 5", NOTHING]


def lines_of_the_guide() -> str:
    return (ROOT / "results" / "README.md").read_text(encoding="utf-8")


def test_the_guide_defines_every_number_as_the_code_does() -> None:
    """Two texts on one number drift apart."""
    text = lines_of_the_guide()
    for name, what in [*terms.metrics().items(), *terms.COLUMNS.items(), *terms.WORDS.items()]:
        assert f"| `{name}` | {what.replace('|', chr(92) + '|')} |" in text, name


def test_every_column_of_every_table_is_defined(made: Any) -> None:
    """Settings of the loop are the recipe's, and defined with it."""
    contrasts = [("ppo", "grpo", "lr 1e-4")]
    study = made(conditions=("lr 1e-4", "lr 3e-4"), contrasts=contrasts, seeds=2)
    settings = {name for loop in study.study["loops"].values() for name in loop}
    for table in tables.every(study):
        assert set(table.data.columns) - settings - set(terms.COLUMNS) == set(), table.name


def test_every_number_of_a_record_is_defined(made: Any) -> None:
    study = made(crashed={("ppo", ONE, 9000)}, seeds=2)
    assert set(study.table["metric"]) - set(terms.metrics()) == set()


@pytest.mark.parametrize(("recipe", "task"), [("ppo", "chain"), ("reinforce", "bandit")])
def test_every_number_of_a_real_record_is_defined(tmp_path: Path, recipe: str, task: str) -> None:
    """A number that is added to the loop, an observer or an evaluation needs its line."""
    go(tmp_path, recipe, task=Use(name=task), observers=OBSERVERS, rollouts=1)
    found = {name for moment in records.moments(tmp_path) for name in moment.metrics}
    assert len(found) > 30
    assert found - set(terms.metrics()) == set()
