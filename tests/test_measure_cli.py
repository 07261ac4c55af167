"""``shardbook measure``: scripts as people write them, run as Python runs them, and what the document says of each.

A script runs in a process of its own, forked from one that has torch already; those of several ranks under torchrun.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest

from shardbook.cli import measure as measure_command
from shardbook.cli.main import run
from shardbook.cli.measure import parse_budget, with_own_boundary
from shardbook.document import RunDocument
from shardbook.errors import ConfigError
from tests import ranks

SOURCE = Path(__file__).parents[1] / "src"
COMMAND = "from shardbook.cli.main import main; main()"
SECONDS = 100
SHARE = 0.01  # of the peak that no account may explain

HEAD = """
    import os, signal, sys
    import torch
    from torch import nn

    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self, depth=2, width=256):
            super().__init__()
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(depth)
            )

        def forward(self, x):
            for layer in self.layers:
                x = x + layer(x)
            return x

    model = Net()
    """
LOOP = (
    HEAD
    + """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1, 5):
        x = torch.randn(64, 256)
        loss = (model(x) - x).square().mean()
        loss.backward()
        {event}
        optimizer.step()
        optimizer.zero_grad()
    print("last loss", loss.item())
    """
)
NUM_PARAMETERS = 2 * (2 * 256 * 1024 + 1024 + 256)


def script(folder, text, name="loop.py"):
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


def measured(folder, arguments):
    """Runs in a process of its own: exit code, what was printed, and the document's text."""
    os.chdir(folder)
    for number, name in ((1, "stdout"), (2, "stderr")):
        handle = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, number)
    try:
        code = run(["measure", *map(str, arguments)])
    except SystemExit as error:  # a child that the script forked
        sys.stdout.flush()
        os._exit(error.code)
    sys.stdout.flush()
    sys.stderr.flush()
    path = folder / "run.json"
    return code, (folder / "stdout").read_text(), (folder / "stderr").read_text(), path.read_text() if path.exists() else None


def measure(folder, *arguments):
    """(exit code, stdout, stderr, document) of one command line."""
    ending = ranks.alone(measured, folder, arguments)
    assert ending.how == "value", ending.text
    code, stdout, stderr, text = ending.value
    return code, stdout, stderr, None if text is None else RunDocument.from_json(text)


def environment(**extra):
    return {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", **extra}


def torchrun(folder, *arguments, num_ranks=2):
    """The same on several ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (folder / "shardbook_main.py").write_text(COMMAND)
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}", f"--master-port={port}"]
    done = subprocess.run(
        [*launcher, str(folder / "shardbook_main.py"), "measure", *map(str, arguments)],
        cwd=folder,
        env=environment(GLOO_SOCKET_IFNAME="lo"),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    path = folder / "run.json"
    return done.returncode, done.stdout, done.stderr, RunDocument.from_json(path.read_text()) if path.exists() else None


def assert_explained(document, *accounts):
    """Every rank's peak is, to the given share, in accounts; those named are among them."""
    assert document.reconciliations
    for found in document.reconciliations:
        assert found.allocated > 2**20
        assert found.books["UNACCOUNTED"] <= SHARE * found.allocated, found.books
        assert found.overstated <= SHARE * found.allocated
        assert set(accounts) <= set(found.books), found.books


def steps_of(document, rank=0):
    return [one.step for one in document.steps if one.rank == rank]


# ---- one process -----------------------------------------------------------------------------------------------------------


def test_a_plain_loop(tmp_path):
    code, stdout, stderr, document = measure(tmp_path, script(tmp_path, LOOP.format(event="")))
    assert code == 0
    assert stdout.startswith("last loss ")
    assert len(stdout.splitlines()) == 1, "what measure says goes to stderr"
    assert steps_of(document) == [1, 2, 3, 4]
    assert_explained(document, "PARAM", "MOMENT", "GRAD", "WORKSPACE")
    assert document.engine == "plain"
    assert document.num_parameters == NUM_PARAMETERS
    assert document.peak["PARAM"] == document.peak["GRAD"] == 4 * NUM_PARAMETERS
    assert not document.notes
    assert "books and allocator at the peak" in stderr
    assert "written to run.json" in stderr
    assert {path.name for path in tmp_path.iterdir()} == {"loop.py", "run.json", "stdout", "stderr"}, "nothing else is left behind"


def test_the_script_is_main_as_under_python(tmp_path):
    (tmp_path / "neighbour.py").write_text("VALUE = 7\n")
    path = script(
        tmp_path,
        """
        import json, pickle, sys
        import neighbour

        class Mine:
            pass

        pickle.loads(pickle.dumps(Mine()))  # is found in __main__
        print(json.dumps([sys.argv, sys.path[0], __name__, __file__, __spec__ is None, sys.modules["__main__"].__dict__ is globals()]))
        """,
    )
    arguments = ["a", "--out", "mine.json", "--help", "--", "--light", "-x"]
    code, stdout, _, _ = measure(tmp_path, "--out", "run.json", path, *arguments)
    under_python = subprocess.run([sys.executable, path, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert code == 0
    assert json.loads(stdout) == json.loads(under_python.stdout)
    assert json.loads(stdout)[0] == [str(path), *arguments]
    assert not (tmp_path / "mine.json").exists()


def test_a_script_with_argparse_has_its_own_options_and_usage_errors(tmp_path):
    path = script(
        tmp_path,
        """
        import argparse
        parser = argparse.ArgumentParser()
        parser.add_argument("data")
        parser.add_argument("--light", type=int, required=True)
        print(parser.parse_args())
        """,
    )
    code, stdout, _, document = measure(tmp_path, path, "words", "--light", "3")
    assert (code, stdout) == (0, "Namespace(data='words', light=3)\n")
    assert document.mode == "full"
    code, stdout, stderr, _ = measure(tmp_path, path, "words")
    assert (code, stdout) == (2, "")
    assert "usage: loop.py" in stderr


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_data_loader(tmp_path, num_workers):
    text = f"""
    from torch.utils.data import DataLoader, TensorDataset

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(torch.randn(192, 256)), batch_size=64, num_workers={num_workers})
    for (x,) in loader:
        (model(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    """
    code, _, stderr, document = measure(tmp_path, script(tmp_path, HEAD + text))
    assert code == 0, stderr
    assert steps_of(document) == [1, 2, 3]
    assert_explained(document, "PARAM", "MOMENT", "GRAD", "INPUT")


def test_two_optimizers_in_turn_make_two_steps_of_a_round(tmp_path):
    text = """
    critic = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 1))
    generate, judge = torch.optim.Adam(model.parameters()), torch.optim.Adam(critic.parameters())
    for _ in range(3):
        real, noise = torch.randn(64, 256), torch.randn(64, 256)
        (critic(model(noise).detach()).mean() - critic(real).mean()).backward()
        judge.step()
        judge.zero_grad()
        (-critic(model(noise)).mean()).backward()
        generate.step()
        generate.zero_grad()
        judge.zero_grad()
    """
    code, _, stderr, document = measure(tmp_path, script(tmp_path, HEAD + text))
    assert code == 0, stderr
    assert steps_of(document) == [1, 2, 3, 4, 5, 6]
    assert_explained(document, "PARAM", "MOMENT", "GRAD")
    critic = 256 * 512 + 512 + 512 + 1
    assert document.num_parameters == NUM_PARAMETERS + critic
    assert document.peak["PARAM"] == 4 * document.num_parameters


def test_a_compiled_model(tmp_path):
    text = LOOP.format(event="").replace("model = Net()", 'model = torch.compile(Net(), backend="eager")')
    code, stdout, stderr, document = measure(tmp_path, script(tmp_path, text))
    assert code == 0, stderr
    assert stdout.startswith("last loss ")
    assert steps_of(document) == [1, 2, 3, 4]
    assert_explained(document, "PARAM", "MOMENT", "GRAD")
    assert document.num_parameters == NUM_PARAMETERS
    assert "global hooks" not in stderr


@pytest.mark.skipif(find_spec("transformers") is None or find_spec("accelerate") is None, reason="transformers' Trainer needs accelerate")
def test_a_trainer_of_transformers(tmp_path):
    text = """
    import warnings
    warnings.simplefilter("ignore")  # theirs
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    config = LlamaConfig(vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4)
    rows = [{"input_ids": torch.arange(64) % 512, "labels": torch.arange(64) % 512} for _ in range(8)]
    options = TrainingArguments("out", max_steps=2, per_device_train_batch_size=4, report_to=[], use_cpu=True, save_strategy="no")
    Trainer(LlamaForCausalLM(config), options, train_dataset=rows).train()
    """
    code, _, stderr, document = measure(tmp_path, script(tmp_path, text))
    assert code == 0, stderr
    assert steps_of(document) == [1, 2]
    assert_explained(document, "PARAM", "MOMENT", "ACTIVATION")  # no GRAD: backward has hardly begun where activations are most
    assert document.peak["PARAM"] == 4 * document.num_parameters


@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")
def test_a_trainer_of_lightning(tmp_path):
    text = """
    import warnings
    warnings.simplefilter("ignore")  # theirs
    import lightning
    from torch.utils.data import DataLoader, TensorDataset

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = model
        def training_step(self, batch, _):
            return (self.net(batch[0]) - batch[0]).square().mean()
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    rows = DataLoader(TensorDataset(torch.randn(192, 256)), batch_size=64)
    lightning.Trainer(max_steps=3, accelerator="cpu", **quiet).fit(Module(), rows)
    """
    code, _, stderr, document = measure(tmp_path, script(tmp_path, HEAD + text))
    assert code == 0, stderr
    assert steps_of(document) == [1, 2, 3]
    assert_explained(document, "PARAM", "MOMENT", "GRAD")


# ---- however it ends ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "code", "note"),
    [
        ("if step == 2: sys.exit(3)", 3, "SystemExit: 3"),
        ("if step == 2: sys.exit()", 0, None),
        ("if step == 2: sys.exit('enough')", 1, "SystemExit: enough"),
        ("if step == 2: raise ValueError('too much')", 1, "ValueError: too much"),
        ("if step == 2: raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
        ("if step == 2: os.kill(os.getpid(), signal.SIGINT)", 130, "KeyboardInterrupt"),
        ("if step == 2: os.kill(os.getpid(), signal.SIGTERM)", 128 + signal.SIGTERM, "SystemExit: 143"),
    ],
)
def test_what_was_seen_is_written_however_the_script_ends(tmp_path, event, code, note):
    found, _, stderr, document = measure(tmp_path, script(tmp_path, LOOP.format(event=event)))
    assert found == code, stderr
    assert steps_of(document) == [1], "the second step did not end"
    assert_explained(document, "PARAM", "MOMENT", "GRAD")
    assert [note in said for said in document.notes] == ([True] if note else [])
    if note:
        assert f"note: ended by {note}" in " ".join(stderr.split())
    if "'enough'" in event:
        assert "\nenough\n" in f"\n{stderr}"


def test_a_script_stuck_in_a_call_is_written_about_from_outside(tmp_path):
    event = """if step == 3:
            import datetime, threading
            import torch.distributed as dist
            from shardbook.ledger import signals

            signals.GRACE_SECONDS = 0.3
            store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
            store.wait(["what a rank that is gone would say"], datetime.timedelta(seconds=60))"""
    ending = ranks.alone(measured, tmp_path, [script(tmp_path, LOOP.format(event=event))])
    assert ending.how == "lost", "the process ends at once"
    document = RunDocument.from_json((tmp_path / "run.json").read_text())
    assert steps_of(document) == [1, 2]
    assert_explained(document, "PARAM", "MOMENT", "GRAD")
    assert any("ended by SIGTERM inside a call that did not return" in note for note in document.notes)


def test_a_script_that_measures_itself_is_refused(tmp_path):
    event = "if step == 2: import shardbook; shardbook.measure(model).__enter__()"
    code, _, stderr, document = measure(tmp_path, script(tmp_path, LOOP.format(event=event)))
    assert code == 1
    assert "a measurement is open already" in stderr
    assert steps_of(document) == [1]


@pytest.mark.parametrize(
    "text",
    [
        "def deeper():\n    raise ValueError('x')\ntry:\n    deeper()\nexcept ValueError as error:\n    raise KeyError('y') from error\n",
        "x = [1,\n",
        "import sys\nsys.excepthook = lambda kind, _, trace: print('mine', kind, trace.tb_lineno, file=sys.stderr)\n1 / 0\n",
        "raise ExceptionGroup('several', [ValueError('one'), TypeError('two')])\n",
    ],
)
def test_the_traceback_is_the_one_that_python_shows(tmp_path, text):
    path = script(tmp_path, text)
    under_python = subprocess.run([sys.executable, path], cwd=tmp_path, capture_output=True, text=True, check=False)
    code, _, stderr, document = measure(tmp_path, path)
    assert under_python.returncode == code == 1
    assert under_python.stderr in stderr
    assert "shardbook" not in stderr.split("written to")[0]
    assert document is not None


def test_an_error_inside_an_operator_shows_no_frames_of_the_measurement(tmp_path):
    code, _, stderr, _ = measure(tmp_path, script(tmp_path, LOOP.format(event="if step == 2: x @ x")))
    assert code == 1
    assert "mat1 and mat2 shapes cannot be multiplied" in stderr
    assert "shardbook/" not in stderr.split("written to")[0]


def test_a_script_that_never_steps(tmp_path):
    text = HEAD + "\n    model(torch.randn(64, 256)).sum().backward()\n"
    code, _, stderr, document = measure(tmp_path, script(tmp_path, text))
    assert code == 0
    assert not document.steps
    assert any("optimizer never stepped" in note for note in document.notes)
    assert "the optimizer never stepped" in " ".join(stderr.split())
    assert document.peak["PARAM"] == 4 * NUM_PARAMETERS


def test_a_child_that_runs_out_of_the_script_writes_nothing(tmp_path):
    text = (
        LOOP.format(event="")
        + "\n    if os.fork() == 0:\n        sys.exit(5)\n    print('child', os.waitstatus_to_exitcode(os.wait()[1]))\n"
    )
    code, stdout, stderr, document = measure(tmp_path, script(tmp_path, text))
    assert code == 0, stderr
    assert "child 5" in stdout
    assert stderr.count("written to") == 1
    assert steps_of(document) == [1, 2, 3, 4]


# ---- options -----------------------------------------------------------------------------------------------------------------


def test_light_json_and_another_name(tmp_path):
    path = script(tmp_path, LOOP.format(event=""))
    code, stdout, stderr, other = measure(tmp_path, "--light", "--json", "--out", "deeper/light.json", path)
    assert (code, other) == (0, None)
    document = RunDocument.from_json(stdout)
    assert document == RunDocument.from_json((tmp_path / "deeper" / "light.json").read_text())
    assert "last loss" in stderr
    assert document.mode == "light"
    assert not document.reconciliations
    assert document.peak["PARAM"] == 4 * NUM_PARAMETERS


def test_a_crossed_budget_ends_the_script_and_is_explained(tmp_path):
    code, _, stderr, document = measure(tmp_path, "--budget", "9MiB", script(tmp_path, LOOP.format(event="")))
    assert code == 1
    assert "BudgetError" in stderr
    assert document.shortage.budget == 9 * 2**20
    assert document.shortage.live["PARAM"] == 4 * NUM_PARAMETERS
    assert "out of memory on rank 0" in stderr


@pytest.mark.skipif(find_spec("altair") is None or find_spec("vl_convert") is None, reason="pages need shardbook[report]")
def test_a_page_beside_the_document(tmp_path):
    code, _, stderr, _ = measure(tmp_path, "--html", "page.html", script(tmp_path, LOOP.format(event="")))
    assert code == 0, stderr
    assert (tmp_path / "page.html").read_text().lstrip().lower().startswith("<!doctype html>")


def test_a_page_without_the_packages_is_refused_before_the_script_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measure_command, "find_spec", lambda name: None if name == "altair" else find_spec(name))
    path = script(tmp_path, "raise SystemExit('it ran')")
    assert run(["measure", "--html", "page.html", str(path)]) == 1
    assert "--html needs altair" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.py"], "nowhere.py: no such file"),
        (["."], ".: not a file"),
        (["words.txt"], "words.txt: not a Python file"),
        (["--budget", "8Gb", "loop.py"], "--budget '8Gb': allowed is a number above 0 with one of B, kB, MB, GB, KiB, MiB, GiB"),
        (["--budget", "1GiB", "--light", "loop.py"], "--budget 1GiB with --light"),
        (["--out", "words.txt", "loop.py"], "--out words.txt: it exists and is no run document"),
        (["--out", "loop.py/run.json", "loop.py"], "can't be written to"),
    ],
)
def test_wrong_usage(tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.py").write_text("raise SystemExit('it ran')\n")
    (tmp_path / "words.txt").write_text("words\n")
    assert run(["measure", *arguments]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert len(captured.err.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loop.py", "words.txt"]


@pytest.mark.parametrize("text", ["8", "8Gb", "8 gib", "GiB", "-1GiB", "0GiB", "1e3MB", "8GiB/s", ""])
def test_sizes_that_are_refused(text):
    with pytest.raises(ConfigError, match="allowed is a number above 0"):
        parse_budget(text)


def test_sizes():
    sizes = ["1B", "2kB", "3MB", "4GB", "5KiB", "6MiB", "7 GiB", "0.5KiB"]
    assert list(map(parse_budget, sizes)) == [1, 2000, 3 * 10**6, 4 * 10**9, 5120, 6 * 2**20, 7 * 2**30, 512]


def test_the_boundary_is_found_behind_options_with_values():
    assert with_own_boundary(["measure", "--html", "a.html", "--json", "b.py", "--out", "c"]) == [
        "measure", "--html", "a.html", "--json", "--", "b.py", "--out", "c",
    ]  # fmt: skip
    assert with_own_boundary(["measure", "--", "-odd.py", "x"]) == ["measure", "--", "-odd.py", "x"]
    assert with_own_boundary(["measure", "--out=a", "b.py"]) == ["measure", "--out=a", "--", "b.py"]
    assert with_own_boundary(["measure", "--help"]) == ["measure", "--help"]


def test_help_needs_no_torch_and_measuring_says_how_to_get_it(tmp_path, monkeypatch, capsys):
    code = (
        "import sys\nfrom shardbook.cli.main import run\ntry:\n    run(['measure', '--help'])\nfinally:\n    print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "False"
    assert "SCRIPT.PY" in done.stdout
    monkeypatch.setattr(measure_command, "find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    script(tmp_path, "print('it ran')")
    assert run(["measure", "loop.py"]) == 1
    assert capsys.readouterr().err == "shardbook: measuring needs torch, which is not here: pip install 'shardbook[train]'\n"


def test_the_example_of_the_page_runs():
    (example,) = re.findall(r"```python\n(.*?)```", (SOURCE.parent / "docs" / "measure.md").read_text(), re.DOTALL)
    ending = ranks.alone(run_text, example)
    assert ending.how == "value", ending.text


def run_text(text):
    exec(compile(text, "measure.md", "exec"), {"__name__": "page"})


# ---- several ranks -------------------------------------------------------------------------------------------------------------

GROUP = """
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    """
CLOSE = "\n    dist.destroy_process_group()\n"


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.slow
def test_ddp_under_torchrun(tmp_path):
    wrapped = "model = nn.parallel.DistributedDataParallel(Net())"
    text = LOOP.format(event="").replace("model = Net()", GROUP.strip() + "\n    " + wrapped) + CLOSE
    code, _, stderr, document = torchrun(tmp_path, script(tmp_path, text))
    assert code == 0, stderr
    assert document.engine == "ddp"
    assert [found.rank for found in document.reconciliations] == [0, 1]
    assert steps_of(document, 0) == steps_of(document, 1) == [1, 2, 3, 4]
    assert_explained(document, "PARAM", "MOMENT", "GRAD", "COMM")
    assert document.peak["PARAM"] == 4 * NUM_PARAMETERS == 4 * document.num_parameters
    assert not document.notes
    assert stderr.count("written to run.json") == 1, "one rank tells for all"
    assert not list(tmp_path.glob(".*")), "the ranks' parts are gone"


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.full
def test_fsdp2_under_torchrun(tmp_path):
    wrapped = """
    from torch.distributed.fsdp import fully_shard

    model = Net(depth=3)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    """
    text = LOOP.format(event="").replace("model = Net()", GROUP.strip() + "\n" + wrapped) + CLOSE
    code, _, stderr, document = torchrun(tmp_path, script(tmp_path, text))
    assert code == 0, stderr
    assert document.engine == "fsdp2"
    assert steps_of(document, 0) == steps_of(document, 1) == [1, 2, 3, 4]
    assert_explained(document, "PARAM", "MOMENT", "GRAD", "GATHERED")
    num_parameters = NUM_PARAMETERS // 2 * 3
    assert document.num_parameters == num_parameters
    assert document.peak["PARAM"] == 4 * num_parameters // 2


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("dying", [0, 1])
def test_a_rank_that_is_killed_is_named_by_the_other(tmp_path, dying):
    event = f"if step == 3 and rank == {dying}: os.kill(os.getpid(), signal.SIGKILL)"
    wrapped = "model = nn.parallel.DistributedDataParallel(Net())"
    text = LOOP.format(event=event).replace("model = Net()", GROUP.strip() + "\n    " + wrapped) + CLOSE
    code, _, stderr, document = torchrun(tmp_path, script(tmp_path, text))
    assert code != 0
    assert [found.rank for found in document.reconciliations] == [1 - dying], stderr
    assert steps_of(document, 1 - dying)[:2] == [1, 2]
    assert_explained(document, "PARAM", "MOMENT", "GRAD", "COMM")
    told = [note for note in document.notes if note.startswith(f"rank {dying} told nothing")]
    assert len(told) == 1
    assert "killed" in told[0]
    assert not list(tmp_path.glob(".*"))
