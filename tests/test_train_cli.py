"""``shardbook train`` as a person runs it: processes, words and exit codes. Nothing here shares a process with a rank."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from shardbook.cli import train as train_command
from shardbook.cli.main import run
from shardbook.document import RunDocument

SOURCE = Path(__file__).parents[1] / "src"
COMMAND = [sys.executable, "-P", "-c", "from shardbook.cli.main import main; main()"]
SECONDS = 90
TINY = ["--layers", "1", "--width", "32", "--heads", "2", "--kv-heads", "1", "--ffn", "48", "--sequence", "32", "--micro-batch", "2"]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return path


@pytest.fixture
def options(tmp_path, text):
    return [*TINY, "--text", str(text), "--out", str(tmp_path / "out"), "--device", "cpu"]


def environment(**extra):
    path = os.pathsep.join([*extra.pop("path", []), str(SOURCE)])
    return {**os.environ, "PYTHONPATH": path, **extra}


def shardbook(*arguments, **extra):
    return subprocess.run([*COMMAND, *arguments], env=environment(**extra), capture_output=True, text=True, timeout=SECONDS, check=False)


def sabotage(tmp_path, code, rank=1):
    """A folder to put on a rank's path: ``code``, one line, runs in that rank before anything else."""
    folder = tmp_path / "sabotage"
    folder.mkdir(exist_ok=True)
    with (folder / "sitecustomize.py").open("a") as file:
        file.write(f"import os\nif os.environ.get('RANK') == '{rank}':\n    {code}\n")
    return [str(folder)]


class Running:
    """A training that goes on until somebody ends it."""

    def __init__(self, options):
        command = [*COMMAND, "train", "--steps", "1000000", *options]
        self.process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        line = next(line for line in self.process.stderr if line)
        assert line.startswith("step 1/"), line + self.process.stderr.read()
        self.ranks = psutil.Process(self.process.pid).children(recursive=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in (self.process, *self.ranks):
            if process.poll() is None if isinstance(process, subprocess.Popen) else process.is_running():
                process.kill()
        self.process.wait()

    def end(self):
        """Exit code, words, seconds; and that no rank is left."""
        start = time.monotonic()
        words = self.process.communicate(timeout=SECONDS)[1]
        seconds = time.monotonic() - start
        _, alive = psutil.wait_procs(self.ranks, timeout=3)
        assert alive == []
        return self.process.returncode, words.strip().splitlines(), seconds


@pytest.mark.ranks
def test_two_ranks_train_as_a_recipe_says_and_equal_the_plain_loop(tmp_path, options):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[run]\nsteps = 3\n[zero]\nprecision = "bf16"\nclip_grad_norm = 0.5\naccumulate = 2\n[optimizer]\nwarmup = 2\n')
    done = shardbook(
        "train", "--recipe", str(recipe), "--stage", "3", "--steps", "8", "--check-baseline", "3", "--tied", "--json", *options
    )
    assert done.returncode == 0, done.stderr
    document = RunDocument.from_json(done.stdout)
    assert (tmp_path / "out" / "run.json").read_text() == done.stdout
    assert "plain loop bit-identical for 3 steps" in done.stderr
    assert document.baseline is not None
    assert (document.baseline.steps, document.baseline.identical) == (3, True)
    assert document.settings["run.steps"] == {"value": 8, "origin": "command line"}
    assert document.settings["optimizer.warmup"] == {"value": 2, "origin": str(recipe)}
    assert document.settings["run.ranks"]["origin"] == "default"
    losses = [loss for loss in document.losses if loss is not None]
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 0.1
    assert document.validation_loss is not None
    assert document.validation_loss < losses[0]
    assert document.num_tokens == 8 * 2 * 2 * 2 * 32
    assert [memory.rank for memory in document.memory] == [0, 1]
    assert all(memory.peak_allocated and memory.peak_allocated < 2**24 < memory.peak_resident for memory in document.memory)
    assert document.peak_reserved is None
    for found in document.reconciliations:
        assert found.books["UNACCOUNTED"] <= 0.01 * found.allocated
        assert found.overstated == 0
        for account in ("PARAM", "MASTER", "MOMENT"):
            assert found.books.get(account, 0) == found.closed_form[account]
        assert found.books.get("GATHERED", 0) <= found.closed_form["GATHERED"]
    assert document.peak == max(document.reconciliations, key=lambda found: found.allocated).books
    assert [(step.rank, step.step) for step in document.steps] == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert [time.rank for time in document.times] == [0, 1]
    assert all(time.floor and 0 < time.exposed + time.compute <= time.seconds * 1.001 for time in document.times)
    assert "UNACCOUNTED" in done.stderr
    assert {event["pid"] for event in json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]} == {0, 1}
    # Gathers of 2-byte parameters in forward and backward and a reduction in each of two micro-batches, to the other rank.
    assert document.sent_nbytes_per_step == pytest.approx(3 * 2 * document.num_parameters * 2 / 2, rel=0.02)
    assert "step 1/8" in done.stderr


@pytest.mark.full
@pytest.mark.ranks
def test_a_budget_that_is_crossed_ends_the_run_and_says_what_was_held(tmp_path, options):
    done = shardbook("train", "--stage", "2", "--steps", "3", "--budget", "1MiB", *options)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "raised BudgetError: budget = 1,048,576 bytes" in last
    assert "levers, cheapest first" in done.stderr
    shortage = RunDocument.from_json((tmp_path / "out" / "run.json").read_text()).shortage
    assert shortage is not None
    assert shortage.budget == 2**20 < sum(shortage.live.values())
    assert shortage.forecast["PARAM"] == shortage.live["PARAM"]
    assert shortage.levers


def test_a_budget_is_a_size(options):
    done = shardbook("train", "--budget", "8 gigs", *options)
    assert done.returncode == 2
    assert "run.budget = '8 gigs' (command line): allowed is a number of bytes, or a size such as 8GiB" in done.stderr


@pytest.mark.full
@pytest.mark.ranks
def test_a_run_that_differs_says_where_and_fails(tmp_path, options):
    code = "import shardbook.train.batches as b; f = b.Batches.micro; b.Batches.micro = lambda s, step, *r: f(s, step + (step == 1), *r)"
    done = shardbook("train", "--steps", "2", "--check-baseline", "2", *options, path=sabotage(tmp_path, code))
    assert done.returncode == 1, done.stderr
    assert "plain loop first differs at step 2: loss is" in done.stdout
    document = RunDocument.from_json((tmp_path / "out" / "run.json").read_text())
    assert document.baseline is not None
    assert not document.baseline.identical


ONE_BIT = """import torch, shardbook.engine.engine as e
    f = e.Engine.step
    def step(engine):
        report = f(engine)
        if engine.num_steps == 4:
            with torch.no_grad():
                next(engine.model.parameters()).view(torch.int32)[0, 0] ^= 1
        return report
    e.Engine.step = step"""


@pytest.mark.full
@pytest.mark.ranks
def test_a_rank_that_drifts_ends_the_run_and_is_named(tmp_path, options):
    path = sabotage(tmp_path, ONE_BIT)
    done = shardbook("train", "--stage", "2", "--steps", "8", "--check-replicas", "2", *options, path=path)
    assert done.returncode == 1
    words = [line for line in done.stderr.strip().splitlines() if not line.startswith("step ")]
    assert len(words) == 1, done.stderr
    assert words[0].startswith("shardbook: step 4: replicas of 'embedding.weight' have drifted apart: ranks 0 and 1 hold different bits")


@pytest.mark.full
@pytest.mark.ranks
def test_replicas_that_agree_change_nothing(options):
    done = shardbook("train", "--stage", "1", "--steps", "4", "--check-replicas", "1", "--check-baseline", "4", *options)
    assert done.returncode == 0, done.stderr
    assert "plain loop bit-identical for 4 steps" in done.stdout


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("stage", ["1", "3"])
def test_dropout_has_the_same_masks_in_the_plain_loop(tmp_path, text, stage):
    sizes = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 256, "n_positions": 64,
             "resid_pdrop": 0.1, "embd_pdrop": 0.2, "attn_pdrop": 0.1, "bos_token_id": None, "eos_token_id": None}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    common = ["--config", str(tmp_path), "--text", str(text), "--out", str(tmp_path / "out"), "--device", "cpu", "--sequence", "32"]
    done = shardbook("train", "--stage", stage, "--steps", "3", "--accumulate", "2", "--micro-batch", "2", "--check-baseline", "3", *common)
    assert done.returncode == 0, done.stderr
    assert "plain loop bit-identical for 3 steps" in done.stdout


@pytest.mark.full
@pytest.mark.ranks
def test_a_rank_that_raises_is_told_once(tmp_path, options):
    code = "import shardbook.train.batches as b; b.Batches.micro = lambda *a: 1 / 0"
    done = shardbook("train", "--steps", "2", *options, path=sabotage(tmp_path, code))
    assert done.returncode == 1
    words = done.stderr.strip().splitlines()
    assert len(words) == 1, done.stderr
    assert "rank 1 raised ZeroDivisionError: division by zero (sitecustomize.py:3)" in words[0]
    assert "ZeroDivisionError" in (tmp_path / "out" / "failure.txt").read_text()


@pytest.mark.full
@pytest.mark.ranks
def test_a_rank_ended_while_it_tells_a_failure_says_nothing_else(tmp_path, options):
    """The launcher's SIGTERM may reach a rank at any moment of its own, later failure."""
    slow = "import time, traceback as t; f = t.extract_tb; t.extract_tb = lambda *a: (time.sleep(%s), f(*a))[1]"
    sabotage(tmp_path, slow % 1.6, rank=0)
    code = f"import shardbook.train.batches as b; b.Batches.micro = lambda *a: 1 / 0; {slow % 0.6}"
    done = shardbook("train", "--steps", "2", *options, path=sabotage(tmp_path, code))
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "rank 1 raised ZeroDivisionError" in done.stderr


@pytest.mark.ranks
def test_a_killed_rank_is_told_in_one_line(options):
    with Running(options) as running:
        running.ranks[1].send_signal(signal.SIGKILL)
        code, words, seconds = running.end()
    assert code == 1
    assert seconds < 10
    assert [word for word in words if not word.startswith("step ")] == words[-1:]
    assert "rank 1 was killed by signal 9 (SIGKILL); the kernel's out-of-memory killer does that" in words[-1]


@pytest.mark.ranks
def test_ctrl_c_ends_all_ranks_and_leaves_no_file(tmp_path, options):
    with Running(options) as running:
        running.process.send_signal(signal.SIGINT)
        code, words, seconds = running.end()
    assert code == 130
    assert seconds < 10
    assert words[-1] == "shardbook: SIGINT: all ranks ended"
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.full
@pytest.mark.ranks
def test_ranks_end_with_the_process_that_started_them(options):
    with Running(options) as running:
        running.process.kill()
        assert running.end()[0] == -signal.SIGKILL


@pytest.mark.ranks
@pytest.mark.full
def test_ranks_that_somebody_else_started_are_joined(options):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": "2"}
    command = [*COMMAND, "train", "--steps", "2", "--check-baseline", "1", "--stage", "1", *options]
    ranks = [
        subprocess.Popen(
            command, env=environment(**common, RANK=rank, LOCAL_RANK=rank), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in ("0", "1")
    ]
    said = [rank.communicate(timeout=SECONDS) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert "ranks=2 (torchrun)" in said[0][0]
    assert "bit-identical for 1 steps" in said[0][0]
    assert said[1] == ("", "")


@pytest.mark.full
def test_one_rank_needs_no_other_process(tmp_path, options):
    done = shardbook("train", "--ranks", "1", "--steps", "3", "--check-baseline", "1", *options)
    assert done.returncode == 0, done.stderr
    assert "bit-identical for 1 steps" in done.stdout
    assert RunDocument.from_json((tmp_path / "out" / "run.json").read_text()).sent_nbytes == (0,)


def test_a_step_that_is_not_finite_is_named_and_skipped(tmp_path, options):
    done = shardbook("train", "--ranks", "1", "--steps", "3", *options, path=sabotage_alone(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("not applied") == 1
    assert "step 2: not applied: the " in done.stderr
    document = RunDocument.from_json((tmp_path / "out" / "run.json").read_text())
    assert document.skipped_steps == (2,)
    assert document.losses[1] is None
    assert document.losses[2] is not None


def sabotage_alone(tmp_path):
    """The loss of the second step is no number."""
    folder = tmp_path / "sabotage"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import shardbook.models.decoder as d\n"
        "f, calls = d.summed_loss, []\n"
        "def loss(logits, targets):\n"
        "    total, count = f(logits, targets)\n"
        "    calls.append(1)\n"
        "    return (total * float('nan') if len(calls) == 2 else total), count\n"
        "d.summed_loss = loss\n"
    )
    return [str(folder)]


# ---- wrong usage: found before a process is started ------------------------------------------------------------------------


def usage(capsys, *arguments):
    code = run(["train", *arguments])
    return code, capsys.readouterr().err.strip()


def test_a_port_in_use_is_one_line(capsys, options):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, words = usage(capsys, *options, "--port", str(port))
    assert code == 2
    assert words.startswith(f"shardbook: run.port = {port}: can't be used (Address already in use)")
    assert len(words.splitlines()) == 1


def test_text_that_is_not_there_is_one_line(capsys, options, tmp_path):
    (tmp_path / "empty").mkdir()
    code, words = usage(capsys, *options, "--text", str(tmp_path / "empty"))
    assert (code, words.splitlines()[1:]) == (2, [])
    assert "no text in this folder" in words
    (tmp_path / "short").write_text("short")
    code, words = usage(capsys, *options, "--text", str(tmp_path / "short"))
    assert code == 2
    assert "5 bytes are too few for batch.sequence = 32" in words


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--stage", "4"], "zero.stage = 4 (command line): allowed is 0, 1, 2 or 3"),
        (["--tied", "--untied"], "--tied and --untied contradict each other"),
        (["--accumulate", "2", "--global-batch", "9"], "the batch numbers contradict each other: micro_batch = 2 (command line)"),
        (["--precision", "bf61"], "bf61"),
        (["--recipe", "nowhere.toml"], "nowhere.toml: cannot be read"),
        (["--config", "nowhere.json"], "model.layers (command line)"),
        (["--device", "tpu"], "run.device = 'tpu' (command line)"),
        (["--ranks", "1", "--port", "4000"], "run.port = 4000 (command line): no effect, as a rank alone meets nobody"),
        (
            ["--check-replicas", "2"],
            "run.check_replicas = 2 (command line): no effect, as stage 3 leaves no parameter on two ranks; use --stage",
        ),
        (["--check-replicas", "2", "--ranks", "1", "--stage", "1"], "no effect, as one rank has no replicas; leave it out"),
        (["--check-replicas", "-1"], "run.check_replicas = -1 (command line)"),
        (["--out", "/proc/nowhere"], "run.out = '/proc/nowhere': can't be made"),
    ],
)
def test_wrong_usage_is_exit_code_2(capsys, options, wrong, said):
    code, words = usage(capsys, *options, *wrong)
    assert code == 2
    assert said in words
    assert "Traceback" not in words


def test_an_option_nobody_knows_names_the_nearest(capsys):
    with pytest.raises(SystemExit) as caught:
        run(["train", "--stge", "3"])
    assert caught.value.code == 2
    assert "--stage" in capsys.readouterr().err


def test_ranks_that_contradict_those_that_are_there(capsys, options, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    code, words = usage(capsys, *options, "--ranks", "2")
    assert code == 2
    assert "run.ranks = 2 (command line), but torchrun started 4" in words


def test_without_torch_it_says_how_to_get_it(capsys, options, monkeypatch):
    monkeypatch.setattr(train_command, "find_spec", lambda package: None)
    code, words = usage(capsys, *options)
    assert code == 1
    assert words == "shardbook: training needs torch, which is not here: pip install 'shardbook[train]'"


@pytest.mark.parametrize("command", [[], ["train"], ["doctor"]])
def test_help_answers_at_once_and_without_torch(command):
    program = "import sys\nfrom shardbook.cli.main import run\ntry: run()\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    start = time.monotonic()
    line = [sys.executable, "-c", program, *command, "--help"]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage: shardbook" in done.stdout
    assert time.monotonic() - start < 3  # 0.2 seconds on an idle machine
