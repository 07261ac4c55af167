"""``shardbook verify``: exit codes, what is said on which stream, and what can be wrong with what it is given."""

import json
import shutil
import subprocess
import sys

import pytest
import torch

import shardbook as sb
from shardbook.cli.main import run
from shardbook.train import verify as verifying
from shardbook.verifying import judge as judging
from shardbook.verifying.verdict import Verdict
from tests.verdict_samples import different, identical, within


def recorded(path, *, width=4, steps=3, seed=0):
    """A tiny loop that is the same each time."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(width, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sb.record(model, optimizer, path) as recorder:
        for _ in range(steps):
            rows = torch.randn(5, width)
            loss = model(rows).square().mean()
            loss.backward()
            recorder.step(loss=loss, batch=rows)
            optimizer.step()
            optimizer.zero_grad()
    return path


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Never written to."""
    folder = tmp_path_factory.mktemp("records")
    return {
        "a": recorded(folder / "a.rec"),
        "b": recorded(folder / "b.rec"),
        "short": recorded(folder / "short.rec", steps=2),
        "wide": recorded(folder / "wide.rec", width=6),
        "other": recorded(folder / "other.rec", seed=1),
    }


@pytest.fixture
def decided(monkeypatch):
    """The verdict to come, whatever is read; and what was asked."""
    asked = {}

    def decide(verdict):
        def judge(candidate, baseline, **rest):
            asked.update(rest, candidate=candidate, baseline=baseline)
            return verdict

        monkeypatch.setattr(judging, "judge", judge)
        return asked

    return decide


def said(arguments, capsys):
    code = run(["verify", *map(str, arguments)])
    found = capsys.readouterr()
    return code, found.out, found.err


@pytest.mark.parametrize(
    ("verdict", "code"), [(identical(), 0), (within(), 0), (different(), 1)], ids=lambda one: getattr(one, "kind", one)
)
def test_the_exit_code_says_whether_it_is_the_same(records, decided, capsys, verdict, code):
    decided(verdict)
    found, out, err = said([records["a"], records["b"]], capsys)
    assert (found, err) == (code, "")
    assert out.startswith(verdict.kind.replace("_", " "))
    found, out, err = said([records["a"], records["b"], "--json"], capsys)
    assert (found, err) == (code, "")
    assert Verdict.from_json(out) == verdict


def test_all_steps_and_reruns_reach_the_judge(records, decided, capsys):
    asked = decided(identical())
    assert said([records["a"], records["b"], "--rerun", records["other"], records["short"]], capsys)[0] == 0
    assert (asked["candidate"].folder, asked["baseline"].folder) == (records["a"], records["b"])
    assert [one.folder for one in asked["reruns"]] == [records["other"], records["short"]]
    assert asked.get("steps") is None


def test_a_page_is_written_beside_what_is_printed(records, decided, capsys, tmp_path):
    pytest.importorskip("altair", reason="the page's pictures need the extra: pip install 'shardbook[report]'")
    decided(different())
    target = tmp_path / "new" / "verdict.html"
    code, out, err = said([records["a"], records["b"], "--html", target, "--json"], capsys)
    assert (code, err) == (1, f"written to {target}\n")
    assert json.loads(out)["kind"] == "different"
    assert target.read_text().endswith("</html>\n")
    assert [path.name for path in target.parent.iterdir()] == ["verdict.html"]


def truncated(path, records):
    shutil.copytree(records["a"], path)
    (file,) = path.glob("*.rec")
    file.write_bytes(file.read_bytes()[:-40])
    return path


def bad_cases(folder, records):
    """Name -> (arguments, what the line says)."""
    a, b = records["a"], records["b"]
    cut = truncated(folder / "cut.rec", records)
    yaml = folder / "run.yaml"
    yaml.write_text("steps: 3\n")
    return {
        "no such folder": ([folder / "none.rec", b], "none.rec: no such folder; give the one that was passed to sb.record"),
        "no such recipe": ([folder / "none.toml"], "none.toml: no such file; give the recipe"),
        "no such rerun": ([a, b, "--rerun", folder / "none.rec"], "none.rec: no such folder"),
        "a file of a record": ([a / "manifest.json", b], f"a record is a folder; it lies in {a}"),
        "an unknown file": ([yaml, b], "run.yaml: a file, and a record is a folder; give the folder"),
        "a folder of something else": ([folder, b], "no record: it has no manifest.json"),
        "a record alone": ([a], f"nothing to be compared with; give the baseline's record behind it, as in shardbook verify {a}"),
        "a truncated record": ([cut, b], "--unfinished"),
        "another model": ([records["wide"], b], "records of different models: weight is [2, 6] in the candidate, [2, 4] in the baseline"),
        "other data": ([records["other"], b], "records of different batches"),
        "fewer steps": ([records["short"], b], "b.rec has 3; record as many in both, or compare the first 2: --steps 2"),
        "no steps": ([a, b, "--steps", "0"], "--steps 0: allowed is 1 or more"),
        "more steps than one has": ([a, records["short"], "--steps", "3"], "compare the first 2: --steps 2"),
        "more steps than both have": ([a, b, "--steps", "4"], "--steps 4: the records have 3 steps; leave it out"),
        "a recipe's option": ([a, b, "--fp64"], "--fp64: allowed is it with a recipe"),
        "a page that is a folder": ([a, b, "--html", folder], "is a folder; give a file"),
        "a page below a file": ([a, b, "--html", yaml / "x" / "page.html"], f"can't be written, as {yaml} is no folder"),
    }  # fmt: skip


NAMES = (
    "no such folder", "no such recipe", "no such rerun", "a file of a record", "an unknown file", "a folder of something else",
    "a record alone", "a truncated record", "another model", "other data", "fewer steps",
    "no steps", "more steps than one has", "more steps than both have", "a recipe's option", "a page that is a folder",
    "a page below a file",
)  # fmt: skip


def test_every_case_is_tried(records, tmp_path):
    assert tuple(bad_cases(tmp_path, records)) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_what_is_wrong_is_said_in_one_line(records, capsys, tmp_path, name):
    arguments, words = bad_cases(tmp_path, records)[name]
    code, out, err = said(arguments, capsys)
    assert (code, out) == (2, "")
    assert err.startswith("shardbook: ")
    assert words in err
    assert err.count("\n") == 1


def test_two_runs_alike_are_identical_and_a_first_part_can_be_compared(records, capsys):
    code, out, err = said([records["a"], records["b"]], capsys)
    assert (code, err) == (0, "")
    assert out.startswith("identical: 3 steps, every bit")
    code, out, err = said([records["a"], records["short"], "--steps", "2", "--json"], capsys)
    assert (code, err) == (0, "")
    assert (Verdict.from_json(out).kind, Verdict.from_json(out).num_steps) == ("identical", 2)


def test_what_is_whole_of_a_truncated_record_can_be_compared(records, capsys, tmp_path):
    cut = truncated(tmp_path / "cut.rec", records)
    code, out, err = said([cut, records["b"], "--unfinished", "--steps", "2", "--json"], capsys)
    assert (code, err) == (0, "")
    assert Verdict.from_json(out).kind == "identical"


def test_a_recipe_is_run_as_the_options_say(capsys, monkeypatch, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("")
    asked = []
    monkeypatch.setattr(verifying, "verify", lambda *args, **rest: asked.append((*args, rest)) or different())
    nothing = {"precision": None, "units": (), "reruns": (), "folder": None, "unfinished": False}
    assert said([recipe], capsys)[0] == 1
    options = ["--steps", "2", "--fp64", "--units", "blocks.0", "blocks.1", "--out", tmp_path / "kept"]
    assert said([recipe, *options], capsys)[0] == 1
    all_of_them = {"steps": 2, "precision": "fp64", "units": ("blocks.0", "blocks.1"), "folder": tmp_path / "kept"}
    assert asked == [(recipe, None, nothing | {"steps": 5}), (recipe, None, nothing | all_of_them)]


@pytest.mark.full
@pytest.mark.ranks
def test_a_recipe_beside_its_plain_loop(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        "[model]\nlayers = 1\nwidth = 32\nheads = 2\nkv_heads = 1\nffn = 48\n[batch]\nmicro_batch = 2\nsequence = 32\n[run]\nranks = 2\n"
    )
    command = [sys.executable, "-P", "-c", "from shardbook.cli.main import main; main()", "verify", str(recipe), "--steps", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert (Verdict.from_json(done.stdout).kind, Verdict.from_json(done.stdout).num_steps) == ("identical", 2)


def test_options_of_records_have_no_effect_on_a_recipe(capsys, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("")
    code, out, err = said([recipe, "--unfinished"], capsys)
    assert (code, out) == (2, "")
    assert "--unfinished: allowed is it with records" in err
