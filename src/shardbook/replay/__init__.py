"""A model of PyTorch's caching allocator for CUDA, fed with traces: what it would reserve, and how scattered that would be.

``replay(events, settings)`` answers for a trace from anywhere; ``compare_snapshot(path)`` lays the model beside a real run.
Nothing here imports torch. ``docs/allocator.md`` lists what is modelled and what is not.
"""

from shardbook.replay.allocator import Allocator as Allocator
from shardbook.replay.comparison import Comparison as Comparison
from shardbook.replay.comparison import Difference as Difference
from shardbook.replay.comparison import compare as compare
from shardbook.replay.comparison import compare_snapshot as compare_snapshot
from shardbook.replay.recorded import Recorded as Recorded
from shardbook.replay.recorded import recorded as recorded
from shardbook.replay.replay import Replay as Replay
from shardbook.replay.replay import replay as replay
from shardbook.replay.replay import segments_after as segments_after
from shardbook.replay.segments import BlockFacts as BlockFacts
from shardbook.replay.segments import SegmentChange as SegmentChange
from shardbook.replay.segments import SegmentFacts as SegmentFacts
from shardbook.replay.segments import Shortage as Shortage
from shardbook.replay.settings import Settings as Settings
from shardbook.replay.snapshot import Snapshot as Snapshot
from shardbook.replay.snapshot import read_snapshot as read_snapshot
from shardbook.replay.snapshot import snapshot_of as snapshot_of
from shardbook.replay.trace import Event as Event
