"""Text and micro-batches: what is read and in which order, and that any process can rebuild any rank's batch."""

import pytest
import torch

from shardbook.errors import ConfigError
from shardbook.train.batches import Batches
from shardbook.train.text import read_text, split

NUL_FREE = bytes(range(1, 256))


def batches(nbytes=1000, sequence=7, micro_batch=2, accumulate=1, seed=0):
    content = memoryview(bytes(index % 251 + 1 for index in range(nbytes)))
    return Batches(content=content, sequence=sequence, micro_batch=micro_batch, accumulate=accumulate, seed=seed)


def test_a_folder_is_read_in_a_fixed_order_and_only_text(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    files = {"z.txt": b"zz", "a.txt": b"aa", "b/c.md": b"cc", "pic.png": b"\x89PNG\0\0", ".hidden": b"no", ".git/x": b"no"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    text = read_text(tmp_path, 100)
    assert text.content == b"aazzcc"
    assert (text.num_files, text.num_skipped, text.capped) == (3, 2, False)
    assert text.describe() == f"6 bytes of 3 files from {tmp_path}; 2 passed over (not text, or not readable)"


def test_reading_stops_at_the_limit_and_says_so(tmp_path):
    for name in "abc":
        (tmp_path / name).write_bytes(name.encode() * 10)
    text = read_text(tmp_path, 15)
    assert text.content == b"a" * 10 + b"b" * 5
    assert text.capped
    assert "stopped at data.limit_nbytes" in text.describe()
    exact = read_text(tmp_path, 30)
    assert (len(exact.content), exact.capped) == (30, False)
    assert read_text(tmp_path / "a", 4).content == b"aaaa"


def test_the_standard_library_is_the_default():
    text = read_text(None, 200_000)
    assert len(text.content) == 200_000
    assert b"import " in text.content
    assert "standard library of Python" in text.source


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path.mkdir(), "no text in this folder"),
        (lambda path: None, "No such file"),
        (lambda path: path.write_bytes(b"abc\0def"), "has a NUL byte at 3"),
        (lambda path: __import__("os").mkfifo(path), "neither a file nor a folder"),
    ],
)
def test_what_is_no_text_is_refused_in_a_line(tmp_path, make, said):
    path = tmp_path / "given"
    make(path)
    with pytest.raises(ConfigError) as caught:
        read_text(path, 100)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_folder_of_binaries_says_how_many_it_passed_over(tmp_path):
    (tmp_path / "a").write_bytes(b"\0")
    with pytest.raises(ConfigError, match="1 files passed over"):
        read_text(tmp_path, 100)


def test_a_text_shorter_than_a_sequence_shows_both_numbers(tmp_path):
    (tmp_path / "short").write_bytes(b"x" * 131)
    text = read_text(tmp_path / "short", 1000)
    with pytest.raises(ConfigError, match=r"131 bytes .*sequence = 65.* 132 together; .* at most 64"):
        split(text, 65, 0.05)
    train, validation = split(text, 64, 0.05)
    assert (len(train), len(validation)) == (66, 65)


def test_validation_is_the_end_and_never_trained_on(tmp_path):
    (tmp_path / "text").write_bytes(b"t" * 900 + b"v" * 100)
    train, validation = split(read_text(tmp_path / "text", 10_000), 20, 0.1)
    assert set(bytes(train)) == {ord("t")}
    assert set(bytes(validation)) == {ord("v")}


def test_a_batch_is_a_pure_function():
    first, again = batches(seed=3), batches(seed=3)
    again.micro(9, 1, 0, 4)
    for a, b in zip(first.micro(5, 2, 0, 4), again.micro(5, 2, 0, 4), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first.micro(5, 2, 0, 4)[0], batches(seed=4).micro(5, 2, 0, 4)[0])


def test_targets_are_the_next_tokens():
    inputs, targets = batches().micro(0, 0, 0, 2)
    assert inputs.shape == targets.shape == (2, 7)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert inputs.dtype == torch.int64


@pytest.mark.parametrize("nbytes", [8, 15, 22, 100, 1000, 999])
def test_an_epoch_meets_every_window_once(nbytes):
    made = batches(nbytes=nbytes, micro_batch=1)
    for epoch in range(3):
        seen = [made._shuffled(epoch * made.num_windows + place) for place in range(made.num_windows)]
        assert sorted(seen) == list(range(made.num_windows))


def test_a_step_has_the_same_sequences_however_they_are_dealt_out():
    def rows(made, step, ranks):
        every = [made.micro(step, rank, micro, ranks)[0] for rank in range(ranks) for micro in range(made.accumulate)]
        return sorted(map(tuple, torch.cat(every).tolist()))

    one = rows(batches(micro_batch=8), 3, 1)
    assert one == rows(batches(micro_batch=2, accumulate=2), 3, 2)
    assert one == rows(batches(micro_batch=1, accumulate=2), 3, 4)


@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 1), (2, 2), (3, 4), (4, 1)])
def test_in_order_meets_every_window_once_and_fills_up(ranks, micro_batch):
    made = batches(nbytes=100, micro_batch=micro_batch)
    found, counts = [], []
    for rank in range(ranks):
        mine = list(made.in_order(rank, ranks, at_most=1000))
        counts.append(len(mine))
        for inputs, targets in mine:
            assert int(inputs.min()) >= 0  # a single row's inputs and targets must not share memory
            found += [tuple(row) for row in inputs[(targets != -100).all(1)].tolist()]
    assert len(set(counts)) == 1
    windows = torch.tensor(list(made.content[: made.num_windows * 7])).view(-1, 7).tolist()
    assert sorted(found) == sorted(map(tuple, windows))


def test_in_order_is_capped():
    assert len(list(batches().in_order(0, 2, at_most=3))) == 3
