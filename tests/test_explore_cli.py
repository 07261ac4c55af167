"""``shardbook explore``: what starts the server, and what keeps it from starting."""

import sys
from pathlib import Path

import pytest

from shardbook.cli import explore, main
from tests.report_documents import light


def test_the_server_is_for_this_machine_alone():
    command = explore.command_line(headless=True, port=8123, run=None)
    assert command[:4] == [sys.executable, "-m", "marimo", "run"]
    assert Path(command[4]).is_file()
    assert command[5:] == ["--host", "127.0.0.1", "--no-token", "--headless", "--port", "8123"]


def test_a_run_is_handed_on_by_its_whole_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.json").write_text(light().to_json(), encoding="utf-8")
    command = explore.command_line(headless=False, port=None, run=Path("run.json"))
    assert command[-3:] == ["--", "--run", str(tmp_path / "run.json")]


@pytest.mark.parametrize("options, said", [
    (["--port", "0"], "--port 0: allowed is 1 to 65535"),
    (["--port", "65536"], "--port 65536"),
    (["--run", "nowhere.json"], "nowhere.json: can't be read"),
])  # fmt: skip
def test_bad_input_is_one_line(options, said, capsys):
    assert main.run(["explore", *options]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_missing_package_is_named_with_its_extra(monkeypatch, capsys):
    monkeypatch.setattr(explore, "find_spec", lambda name: None if name == "marimo" else object())
    assert main.run(["explore", "--headless"]) == 1
    assert capsys.readouterr().err == "shardbook: explore needs marimo, which is not here: pip install 'shardbook[explore]'\n"
