"""``shardbook forecast`` as a person runs it: words, exit codes, and one line for whatever is wrong."""

import json
import sys

import pytest

from shardbook.cli.forecast_question import Question, parse_count, parse_sweep
from shardbook.errors import ConfigError
from tests.forecast_command import assert_refused, forecast, forecast_without_torch
from tests.forecast_samples import GB, GIB, on_device, peaked


@pytest.fixture
def asked(monkeypatch):
    """The questions that the command asks, each answered with a forecast written by hand."""
    questions = []

    def answer(question):
        questions.append(question)
        asked_device = question.arguments["device"]
        return on_device(asked_device) if isinstance(asked_device, int) else peaked(stage=question.config.stage)

    monkeypatch.setattr(Question, "answer", answer)
    return questions


# ---- what the options mean -----------------------------------------------------------------------------------------------


def test_options_become_arguments_of_the_library(capsys, asked):
    options = "--ranks 64 --stage 1 --micro-batch 2 --sequence 4096 --tensor 2 --context 4 --expert 8 --engine deepspeed --precision bf16"
    budgets = "--convention 2+2+4+8 --accumulate 3 --recompute none --device a100 --state 60GiB --activations 20GiB --temporary 2GB"
    choices = "--attention eager --loss chunked --optimizer sgd --kernel foreach --no-reshard --lora-rank 16 --implementation gpt"
    code, _, err = forecast(capsys, "llama-3.1-8b", *options.split(), *budgets.split(), *choices.split())
    assert (code, err) == (0, "")
    question = asked[0]
    found = dict(question.arguments)
    details = found.pop("choices")
    assert (question.model.name, question.model.num_parameters) == ("llama-3.1-8b", 8030261248)
    assert found == {
        "ranks": 64, "micro_batch": 2, "sequence": 4096, "tensor": 2, "context": 4, "expert": 8, "engine": "deepspeed",
        "convention": "2+2+4+8", "device": "a100", "state": 60 * GIB, "activations": 20 * GIB, "temporary": 2 * GB,
        "budget": None, "machine": None,
    }  # fmt: skip
    assert (question.config.stage, question.config.accumulate, question.config.precision.param) == (1, 3, "bf16")
    chosen = (
        details.attention,
        details.loss,
        details.optimizer,
        details.kernel,
        details.reshard,
        details.lora_rank,
        details.implementation,
    )
    assert chosen == ("eager", "chunked", "sgd", "foreach", False, 16, "gpt")


def test_defaults_are_one_rank_and_the_engines_usual_stage(capsys, asked):
    for engine, stage in (("shardbook", 3), ("deepspeed", 3), ("fsdp2", 3), ("ddp", 0), ("megatron", 1)):
        asked.clear()
        forecast(capsys, "7e9", "--engine", engine)
        assert (asked[0].arguments["ranks"], asked[0].config.stage) == (1, stage)


def test_a_configuration_is_read_and_options_override_it(capsys, asked, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[zero]\nstage = 2\naccumulate = 4\n[zero.precision]\nparam = "bf16"\n')
    forecast(capsys, "7e9", "--config", recipe, "--stage", "1")
    config = asked[0].config
    assert (config.stage, config.accumulate, config.precision.param) == (1, 4, "bf16")


def test_deepspeeds_own_file_is_read_as_deepspeed_reads_it(capsys, asked, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({
        "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2, "colour": "blue",
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "offload_optimizer": {"device": "cpu"}},
    }))  # fmt: skip
    code, _, err = forecast(capsys, "llama-3.1-8b", "--engine", "deepspeed", "--config", path, "--sequence", "128", "--stage", "1")
    knobs = asked[0].arguments["knobs"]
    assert (code, err) == (0, "")
    assert knobs.unknown == ("colour",)
    assert (knobs.stage, knobs.accumulate, knobs.offload_optimizer, knobs.reduce_bucket_size) == (1, 2, "cpu", 4096**2)
    assert (asked[0].config.stage, asked[0].config.accumulate, asked[0].config.precision.param) == (1, 2, "bf16")
    assert asked[0].arguments["micro_batch"] == 3
    assert [(one.config.stage, one.arguments["knobs"].stage) for one in asked[1:]] == [(0, 0), (2, 2), (3, 3)]
    assert_refused(
        forecast(capsys, "7e9", "--engine", "deepspeed", "--config", path, "--precision", "fp32"), "says bf16; leave --precision out"
    )


def test_deepspeeds_file_for_shardbook_is_what_shardbook_honours(capsys, asked, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": {"stage": 2, "reduce_bucket_size": 10}}))
    code, _, err = forecast(capsys, "7e9", "--config", path)
    assert code == 0
    assert err.startswith("note: ")
    assert "reduce_bucket_size" in err
    assert (asked[0].config.stage, "knobs" in asked[0].arguments) == (2, False)


def test_the_four_stages_are_asked_for_what_persists_and_with_peaks_only_when_compared(capsys, asked):
    options = ("7e9", "--micro-batch", "1", "--sequence", "128")
    _, out, _ = forecast(capsys, *options)
    assert [one.config.stage for one in asked] == [3, 0, 1, 2]
    assert [one.arguments["micro_batch"] for one in asked] == [1, None, None, None]
    assert "verdict" not in out
    asked.clear()
    forecast(capsys, *options, "--compare-stages")
    assert [one.arguments["micro_batch"] for one in asked] == [1] * 4


def test_a_sweep_asks_for_each_value(capsys, asked):
    code, out, _ = forecast(capsys, "7e9", "--sweep", "ranks=1,8,64")
    assert code == 0
    assert [one.arguments["ranks"] for one in asked][-3:] == [1, 8, 64]
    assert "ranks from 1 to 64" in out


# ---- exit codes and JSON ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("memory", "code"), [(None, 0), (40 * GB, 0), (25 * GB, 1), (20 * GB, 1)])
def test_the_exit_code_is_the_verdict(capsys, monkeypatch, memory, code):
    monkeypatch.setattr(Question, "answer", lambda question: peaked() if memory is None else on_device(memory))
    assert forecast(capsys, "7e9")[0] == code
    assert forecast(capsys, "7e9", "--json")[0] == code
    assert forecast(capsys, "7e9", "--sweep", "ranks=1,2")[0] == code


def test_json_is_everything(capsys, monkeypatch):
    monkeypatch.setattr(Question, "answer", lambda question: on_device())
    code, out, err = forecast(capsys, "7e9", "--json", "--sweep", "ranks=1,2")
    found = json.loads(out)
    assert (code, err) == (1, "")
    assert {name: found[name] for name in json.loads(on_device().to_json())} == json.loads(on_device().to_json())
    assert found["verdict"] == "too close to call"
    assert [one["setting"] for one in found["stages"]] == ["0", "1", "2", "3"]
    assert found["sweep"]["name"] == "ranks"
    assert [one["forecast"]["verdict"] for one in found["sweep"]["cases"]] == ["too close to call"] * 2


def test_explain_adds_every_term(capsys, asked):
    assert "source: docs/accounts.md" not in forecast(capsys, "7e9")[1]
    assert "source: docs/accounts.md" in forecast(capsys, "7e9", "--explain")[1]


@pytest.mark.parametrize("kind", ["svg", "png", "html"])
def test_save_writes_a_file_and_says_so(capsys, asked, tmp_path, kind):
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    path = tmp_path / f"chart.{kind}"
    code, _, err = forecast(capsys, "7e9", "--save", path)
    assert (code, err) == (0, f"written to {path}\n")
    assert path.stat().st_size > 1000


# ---- a model from a file ----------------------------------------------------------------------------------------------------


def test_a_model_from_a_file_is_built_without_bytes(capsys, asked, tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "sizes.py").write_text("WIDTH = 10**6\n")
    (tmp_path / "model.py").write_text("import torch\nfrom sizes import WIDTH\ndef build():\n    return torch.nn.Linear(WIDTH, WIDTH)\n")
    before = list(sys.path)
    code, _, _ = forecast(capsys, f"{tmp_path / 'model.py'}:build")
    assert code == 0
    assert asked[0].model.num_parameters == 10**12 + 10**6
    assert asked[0].model.largest_tensor.name == "weight"
    assert sys.path == before


@pytest.mark.parametrize(
    ("text", "source", "said"),
    [
        ("model.py", "x = 1", "which function builds it is missing; write"),
        ("model.py:nothing", "def build(): pass", "has no function nothing; it has build"),
        ("model.py:build", "def build(): return 3", "build() returned a int; it must return an nn.Module"),
        ("model.py:build", "def build(): raise KeyError('a\\nb')", "build() raised KeyError: 'a\\nb'"),
        ("model.py:build", "import nowhere_to_be_found", "raised ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("model.py:build", "def build(:", "raised SyntaxError"),
        ("other.py:build", "", "is not there; give the file that builds the model"),
    ],
)
def test_a_model_file_that_is_wrong_is_one_line(capsys, tmp_path, text, source, said):
    pytest.importorskip("torch")
    (tmp_path / "model.py").write_text(source)
    assert_refused(forecast(capsys, tmp_path / text), said)


# ---- what is refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--ranks x", "--ranks 'x': allowed is a whole number"),
        ("--ranks 1.5", "--ranks '1.5': allowed is a whole number"),
        ("--ranks inf", "--ranks 'inf': allowed is a whole number"),
        ("--ranks nan", "--ranks 'nan': allowed is a whole number"),
        ("--stage 4", "allowed is 0, 1, 2 or 3; the nearest is 3"),
        ("--stage -1", "allowed is 0, 1, 2 or 3; the nearest is 0"),
        ("--accumulate 0", "ZeroConfig.accumulate = 0: allowed is an integer from 1 up"),
        ("--precision bf61", 'the nearest is "bf16"'),
        ("--recompute ful", 'the nearest is "full"'),
        ("--attention flesh", 'the nearest is "flash"'),
        ("--loss chunk", 'the nearest is "chunked"'),
        ("--optimizer adam", 'the nearest is "adamw"'),
        ("--kernel for", "Choices.kernel = 'for'"),
        ("--lora-rank -1", "Choices.lora_rank = -1"),
        ("--state 60G", "--state '60G': allowed is a number above 0 with one of B, kB, MB, GB, KiB, MiB, GiB"),
        ("--activations -1GiB", "--activations '-1GiB': allowed is a number above 0"),
        ("--temporary 0B", "--temporary '0B': allowed is a number above 0"),
        ("--sweep ranks=1,2 --explain", "--sweep ranks=1,2 with --explain: a sweep has one row for each value; leave one of them out"),
        ("--sweep ranks=1,2 --compare-stages", "with --compare-stages"),
        ("--sweep rank=1,2", 'the nearest is "ranks"'),
        ("--sweep ranks", "an equals sign and values; for example ranks=1,8,64"),
        ("--sweep ranks=", "--sweep ranks '': allowed is a whole number"),
        ("--sweep ranks=1,two", "--sweep ranks 'two': allowed is a whole number"),
        ("--sweep stage=7", "allowed is 0, 1, 2 or 3; the nearest is 3"),
        (f"--sweep ranks={','.join('1' * 65)}", "65 values; allowed are up to 64"),
        ("--config nowhere.toml", "nowhere.toml: cannot be read (No such file or directory)"),
        ("--config nowhere.json", "nowhere.json"),
        ("--config nowhere.yaml", "--config nowhere.yaml: allowed is a .toml of shardbook or a .json of DeepSpeed"),
        ("--save chart.gif", "--save chart.gif: allowed is a file that ends in .svg, .png, .html"),
    ],
)
def test_what_is_wrong_in_an_option_is_one_line(capsys, options, said):
    assert_refused(forecast(capsys, "7e9", *options.split()), said)


def test_several_faults_of_one_file_are_one_line(capsys, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("[zero]\nstge = 2\naccumulte = 4\n")
    found = forecast(capsys, "7e9", "--config", recipe)
    assert_refused(found, 'the nearest is "stage"')
    assert 'the nearest is "accumulate"' in found[2]


def test_counts_and_sweeps_are_read_as_people_write_them():
    assert [parse_count(text, "--ranks") for text in ("16_384", " 8 ", "1e3", "16,384", "-1")] == [16384, 8, 1000, 16384, -1]
    assert parse_sweep("micro-batch = 1, 2") == ("micro_batch", [1, 2])
    with pytest.raises(ConfigError, match="1e400"):
        parse_count("1e400", "--ranks")


# ---- without torch ------------------------------------------------------------------------------------------------------------


def test_help_answers_without_torch():
    found = forecast_without_torch("--help")
    assert (found.returncode, found.stderr) == (0, "")
    assert "--compare-stages" in found.stdout
    assert "does not fit" in found.stdout


def test_a_file_needs_torch_and_says_so():
    found = forecast_without_torch("shardbook/__init__.py:build")
    assert (found.returncode, found.stderr.count("\n")) == (2, 1)
    assert "needs torch, which is not here: pip install 'shardbook[train]'" in found.stderr


def test_a_terminal_without_block_characters_still_gets_its_tables():
    found = forecast_without_torch("7e9", "--convention", "2+2+4+8", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert (found.returncode, found.stderr) == (0, "")
    assert "weights alone 14.0 GB; training state 112.0 GB (104.3 GiB)" in found.stdout
