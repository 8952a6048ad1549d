"""The commands that run: what they print where, and each mistake in one line with exit code 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_models import gpt2_folder
from small_studies import Here, cache, file, lines_of, local  # noqa: F401
from test_cli import lab, ok  # noqa: F401  # fixtures
from test_cli_mistakes import refused

from lab import console, records, report, results, single
from lab import study as studies
from lab.execute import local as pools
from lab.execute.local import Local

#: As small as a run can be.
SMALL = ["loop.prompts=2", "loop.group_size=2", "loop.epochs=1", "loop.minibatches=1"]
SMALL += ["run.budget.rollouts=2", "run.eval_prompts=4", "kl=none"]
TRAIN = ["train", "--recipe", "grpo", "--task", "bandit"]
TRAIN += [word for one in SMALL for word in ("--set", one)]
OUTPUT = "tables/contrasts.csv"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own, no pool, and no time between two lines of progress."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pools, "Local", local)
    monkeypatch.setattr(console, "QUIET", 0.0)
    return tmp_path


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs on paper, and a report of one line."""
    monkeypatch.setattr(pools, "Local", lambda limits: Here())
    monkeypatch.setattr(report, "rebuild", _rebuild)


def _rebuild(folder: Path) -> Path:
    found = results.load(folder)
    results.write(found)
    (folder / "report.html").write_text(str(found.counts))
    return folder / "report.html"


def narrow(text: str) -> str:
    assert max(map(len, text.splitlines()), default=0) <= 80, text
    assert "\x1b" not in text
    return text


# -- lab tasks


def test_tasks(lab: Any) -> None:  # noqa: F811  # the fixture
    text = narrow(ok(lab("tasks")))
    assert {"addition", "bandit", "chain", "copy", "reverse", "sort"} <= set(text.split())
    one = narrow(ok(lab("tasks", "sort", "--set", "task.digits=4")))
    assert "digits = 4" in one
    data = json.loads(ok(lab("tasks", "sort", "--set", "task.digits=4", "--json")))
    assert data["settings"] == {"digits": 4}
    assert set(json.loads(ok(lab("tasks", "--json")))) >= {"sort", "bandit"}


# -- lab train, lab show


def test_train_resume_and_show(lab: Any, here: Path) -> None:  # noqa: F811
    """stdout: the run and where it is; stderr: how far it was. A second call finds it finished.

    Wrong: a bar's codes in a log, progress among the results, the run trained again.
    """
    code, out, err = lab(*TRAIN, "--out", "mine", "--set", "task.arms=4")
    assert code == 0
    assert narrow(out).splitlines()[0] == "grpo on bandit arms=4, seed 0, model nano: ok"
    assert out.splitlines()[-1] == "in mine; all of it: lab show mine"
    assert [line.split()[:3] for line in narrow(err).splitlines()] == [
        ["50", "of", "100"],
        ["100", "of", "100"],
    ]
    before = (here / "mine" / records.METRICS).stat().st_mtime_ns
    again = lab(*TRAIN, "--out", "mine", "--set", "task.arms=4")
    assert again == (0, out, "")
    assert (here / "mine" / records.METRICS).stat().st_mtime_ns == before
    shown = ok(lab("show", "mine"))
    assert out.startswith(shown.rstrip("\n"))
    data = json.loads(ok(lab("show", "mine", "--json")), parse_constant=pytest.fail)
    assert data["result"]["status"] == "ok"
    line = refused(lab(*TRAIN, "--out", "mine"))
    assert line.startswith("mine holds another run (other settings, code or versions); give anoth")


def test_an_interrupted_run_goes_on(
    lab: Any,  # noqa: F811
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C in the second rollout: a line, 130; then from the checkpoint, to the same bytes."""
    more = ["--set", "run.checkpoint_every=1", "--set", "run.budget.rollouts=3"]
    lab(*TRAIN, *more, "--out", "whole")
    honest = console.Console.progress

    def interrupted(self: Any, done: int, of: int, text: str) -> None:
        honest(self, done, of, text)
        if done > 50:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(console.Console, "progress", interrupted)
        code, out, err = lab(*TRAIN, *more, "--out", "mine")
    assert (code, out) == (130, "")
    said = "lab: stopped; the run's last checkpoint is kept, and the same command goes on from it"
    assert err.splitlines()[-1] == said
    assert "under way" in ok(lab("show", "mine"))
    code, _, err = lab(*TRAIN, *more, "--out", "mine")
    assert (code, err.splitlines()[0]) == (0, "going on after rollout 2")
    files = [lines_of(here / name) for name in ("whole", "mine")]
    kept = [{n: x for n, x in f.items() if not n.startswith("checkpoint")} for f in files]
    assert kept[0] == kept[1]


TRAIN_MISTAKES: dict[str, tuple[list[str], str]] = {
    "recipe": (["--recipe", "cipso"], "no recipe 'cipso'. Did you mean 'cispo'?"),
    "task": (["--task", "srot"], "no task 'srot'. Did you mean 'sort'?"),
    "setting": (["--set", "task.arm=3"], "has no setting 'arm'; it has arms. Did you mean 'arms'?"),
    "a run's": (["--set", "run.modle=tiny"], "unknown setting 'modle'. Did you mean 'model'?"),
    "a slot": (["--set", "surogate.cap=3"], "unknown slot 'surogate'. Did you mean 'surrogate'?"),
    "model": (["--set", "run.model=nanoo"], "no model 'nanoo'. Did you mean 'nano'?"),
    "plugin": (["--plugin", "no.py"], "no.py: no such Python file"),
    "option": (["--sed", "3"], "No such option"),
    "seed": (["--seed", "x"], "Invalid value for '--seed'"),
}


@pytest.mark.parametrize("what", TRAIN_MISTAKES)
def test_a_run_that_cannot_be_trained(lab: Any, what: str) -> None:  # noqa: F811
    arguments, said = TRAIN_MISTAKES[what]
    assert said in refused(lab(*TRAIN, *arguments))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that cannot count beyond 6."""
    return gpt2_folder(tmp_path_factory.mktemp("model") / "gpt2", "0123456>")


def test_a_vocabulary_that_misses_a_character(lab: Any, here: Path, gpt2: Path) -> None:  # noqa: F811
    """Before a rollout, for a run and for a study; a study's folder is not even made."""
    words = ["model ", "gpt2: its vocabulary ", "'7'"]
    model = ["--task", "sort", "--set", f'run.model="{gpt2}"']
    line = refused(lab(*TRAIN, *model))
    assert [w for w in words if w not in line] == []
    study = file(here, task="sort")
    study.write_text(study.read_text().replace("[all.loop]", f'model = "{gpt2}"\n[all.loop]', 1))
    line = refused(lab("run", str(study), "--scale", "smoke"))
    assert [w for w in words if w not in line] == []
    assert not (here / "results").exists()


def test_no_run_to_show(lab: Any, here: Path) -> None:  # noqa: F811
    assert refused(lab("show", "nothing")) == "nothing holds no run: there is no run.json\n"
    assert refused(lab("show", "nothing", "--json")).startswith("nothing holds no run")
    assert "Missing argument" in refused(lab("show"))


# -- lab run, lab status, lab report


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Data has no positive values")
def test_a_study_from_its_file_to_its_report(lab: Any, here: Path) -> None:  # noqa: F811
    """All of it, but for the pool: 4 runs, tables, figures, a page; then the page once more."""
    file(here)
    code, out, err = lab("run", "tiny.toml", "--scale", "smoke", "--workers", "2")
    assert (code, out) == (0, "results/tiny/report.html\n"), err
    lines = narrow(err).splitlines()
    assert lines[0] == "4 runs, 0 finished; measuring how long they take"
    assert lines[1].startswith("about ")
    assert lines[1].endswith(" for 4 runs on 2 workers")
    assert [line.split()[:3] for line in lines[2:-1]] == [[f"{i}", "of", "4"] for i in range(1, 5)]
    assert lines[-1] == "writing tables, figures and the report"
    folder = here / "results" / "tiny"
    assert {p.name for p in folder.iterdir()} >= {"runs", "runs.csv.gz", "tables", "figures"}
    before = {name: (folder / name).read_bytes() for name in (OUTPUT, "report.html", "runs.csv.gz")}
    for name in before:
        (folder / name).unlink()
    assert ok(lab("report", "tiny")) == "results/tiny/report.html\n"
    assert {name: (folder / name).read_bytes() for name in before} == before


@pytest.mark.usefixtures("quick")
def test_status_and_report_find_a_study(lab: Any, here: Path) -> None:  # noqa: F811
    """By name, by folder, and all of them."""
    for name in ("one", "two"):
        file(here).rename(here / f"{name}.toml")
        code, out, _ = lab("run", f"{name}.toml", "--scale", "smoke")
        assert (code, out) == (0, f"results/{name}/report.html\n")
    heads = [line for line in narrow(ok(lab("status"))).splitlines() if "of 4 runs" in line]
    assert [line.split()[0] for line in heads] == ["one", "two"]
    assert heads[0].endswith(": 4 of 4 runs")
    one = ok(lab("status", "one"))
    assert one == ok(lab("status", "results/one"))
    assert "two" not in one
    (here / "results" / "two" / "report.html").unlink()
    assert ok(lab("report", "results/two")) == "results/two/report.html\n"
    assert (here / "results" / "two" / "report.html").is_file()


@pytest.mark.usefixtures("quick")
def test_a_second_call_has_nothing_to_do(lab: Any, here: Path) -> None:  # noqa: F811
    """It writes the report again; a larger scale goes on in the same folder."""
    file(here)
    lab("run", "tiny.toml", "--scale", "smoke")
    code, out, err = lab("run", "tiny.toml", "--scale", "smoke")
    assert (code, out) == (0, "results/tiny/report.html\n")
    assert err.splitlines()[0] == "all 4 runs are finished"
    code, out, err = lab("run", "tiny.toml")
    assert err.splitlines()[0].startswith("6 runs, 4 finished; ")
    assert "6 of 6 runs" in ok(lab("status", "tiny"))


@pytest.mark.usefixtures("quick")
def test_another_studys_folder_is_refused(lab: Any, here: Path) -> None:  # noqa: F811
    study = file(here)
    lab("run", "tiny.toml", "--scale", "smoke")
    before = (here / "results" / "tiny" / results.STUDY).read_bytes()
    study.write_text(study.read_text().replace("Does the cap", "Does any cap"))
    line = refused(lab("run", "tiny.toml", "--scale", "smoke"))
    assert line.startswith("results/tiny holds the results of another study (tiny, hash ")
    assert line.endswith("give another --out\n")
    assert (here / "results" / "tiny" / results.STUDY).read_bytes() == before
    assert lab("run", "tiny.toml", "--scale", "smoke", "--out", "new")[1] == "new/report.html\n"
    (here / "full").mkdir()
    (here / "full" / "x").touch()
    line = refused(lab("run", "tiny.toml", "--scale", "smoke", "--out", "full"))
    assert line == "full is not empty and holds no study: give another --out\n"


@pytest.mark.usefixtures("quick")
def test_an_interrupt_keeps_what_is_finished(
    lab: Any,  # noqa: F811
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After the second run: 130, one line that says how to go on, the pool ended; and it does."""
    file(here, rollouts=3)
    executors: list[Here] = []

    def stops(limits: Any) -> Here:
        def act(job: Any) -> Any:
            if len(whole(here)) == 2:
                raise KeyboardInterrupt
            return honest(job)

        honest = Here().act
        executors.append(Here(act))
        return executors[0]

    with monkeypatch.context() as patch:
        patch.setattr(pools, "Local", stops)
        code, out, err = lab("run", "tiny.toml", "--scale", "smoke")
    assert (code, out) == (130, "")
    said = "lab: stopped; finished runs are kept, and the same command goes on with the others"
    assert err.splitlines()[-1] == said
    assert executors[0].cancelled
    assert "2 of 4 runs" in ok(lab("status"))
    code, _, err = lab("run", "tiny.toml", "--scale", "smoke")
    assert (code, err.splitlines()[0].split("; ")[0]) == (0, "4 runs, 2 finished")


def whole(here: Path) -> list[Path]:
    return list((here / "results" / "tiny" / results.RUNS).glob("[!.]*"))


STUDY_MISTAKES: dict[str, tuple[list[str], str]] = {
    "name": (["run", "frist"], "no study 'frist'. Did you mean 'first'? Available: first"),
    "file": (["run", "no.toml"], "no.toml: No such file or directory"),
    "not TOML": (["run", "broken.toml"], "broken.toml is not TOML: "),
    "not UTF-8": (["run", "latin.toml"], "latin.toml is not TOML: "),
    "key": (["run", "key.toml"], "unknown key 'marign'. Did you mean 'margin'?"),
    "scale": (["run", "tiny.toml", "--scale", "smal"], "no scale 'smal'. Did you mean 'small'?"),
    "plugin": (["run", "tiny.toml", "--plugin", "bad.py"], "bad.py: ModuleNotFoundError: No modu"),
    "workers": (["run", "tiny.toml", "--workers", "-1"], "Invalid value for '--workers'"),
    "folder": (["run", "tiny.toml", "--out", "bad.py"], "bad.py/runs: Not a directory"),
    "no study": (["run"], "Missing argument"),
    "status": (
        ["status", "tiny"],
        "no results of 'tiny'. There are none; or give a results folder",
    ),
    "all": (["status"], "no results here: lab run STUDY makes some in results/"),
    "report": (["report", "tiny"], "no results of 'tiny'. There are none; or give a results fo"),
    "no report": (["report"], "Missing argument"),
    "tasks": (["tasks", "srot"], "no task 'srot'. Did you mean 'sort'?"),
    "its setting": (["tasks", "sort", "--set", "task.digit=3"], "no setting 'digit'; it has dig"),
    "of none": (["tasks", "--set", "task.digits=3"], "--set changes one task: lab tasks NAME --se"),
    "of a recipe": (["tasks", "sort", "--set", "loop.lr=3"], "--set changes one task"),
    "not for the recipe": (["tasks", "sort", "--set", "digits=3"], "--set changes one task"),
}


@pytest.mark.parametrize("what", STUDY_MISTAKES)
def test_a_study_that_cannot_be_run(lab: Any, here: Path, what: str) -> None:  # noqa: F811
    """One line that begins with `lab: `, exit code 2, nothing on stdout, no folder made."""
    study = file(here)
    (here / "broken.toml").write_text("[study\n")
    (here / "latin.toml").write_bytes(b'[study]\nquestion = "\xe9"\n')
    (here / "key.toml").write_text(study.read_text().replace("eval_every", "marign"))
    (here / "bad.py").write_text("import no_such_module\n")
    arguments, said = STUDY_MISTAKES[what]
    before = sorted(p.name for p in here.iterdir())
    line = refused(lab(*arguments))
    assert said in line
    assert sorted(p.name for p in here.iterdir()) == before


def test_the_pool_is_the_real_one_elsewhere() -> None:
    """What these tests put in its place has its three methods, and no other does the work."""
    for name in ("submit", "poll", "cancel"):
        assert callable(getattr(Local, name))
        assert callable(getattr(Here, name))
    assert single.CHECKPOINT_EVERY > 0
    assert studies.MOST_FAILURES < studies.MOST_KILLS
