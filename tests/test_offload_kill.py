"""Runs that keep master and moments on a disk, save after every step, and are killed at any moment."""

import tempfile
from pathlib import Path

import pytest

from tests.checkpoints import Setup
from tests.test_checkpoint_kill import check, killed_often

DISK = Setup(stage=3, num_ranks=2, precision="bf16", offload="disk")


def left_behind() -> list[str]:
    """Files of state in the folder that such engines use; they have no name while they live, so that there is nothing to find."""
    return sorted(path.name for path in Path(tempfile.gettempdir()).glob("*.shardbook"))


@pytest.mark.full
@pytest.mark.ranks
def test_killed_with_the_state_on_a_disk(tmp_path: Path) -> None:
    check(killed_often(tmp_path, 6, seed=2, setup=DISK))
    assert left_behind() == []
