"""A load into an engine that keeps master and state on a disk: a chunk at a time, whatever the checkpoint's own division."""

from collections.abc import Callable, Sequence

from shardbook.checkpoint.plan import Plan
from shardbook.checkpoint.read import Reader
from shardbook.engine.disk import Chunk, Disk
from shardbook.engine.disk_step import states_in
from shardbook.engine.engine import Engine
from shardbook.engine.flat import Piece
from shardbook.engine.state import Place, chunk_places


def fill_disk(engine: Engine, disk: Disk, reader: Reader, plan: Plan, do: Callable[[Reader, Sequence[Place]], None]) -> None:
    """Fill what is on the disk; ``do`` fills places that are in memory.

    Raises:
        DiskError: the disk failed; the engine takes no further step.
    """
    flats = [flat for unit in engine._units for flat in unit.flats if flat.chunks]
    owner = {chunk: flat for flat in flats for chunk in flat.chunks}
    names = {place.name for place in plan.weights if place.is_on_disk}
    states: dict[Chunk, list[tuple[Piece, Sequence[str]]]] = {}
    for piece, what in plan.states:
        if piece.chunk is not None:
            states.setdefault(piece.chunk, []).append((piece, what))
    replaced = {id(piece) for those in states.values() for piece, _ in those}
    is_all = all(piece.member.name in names and id(piece) in replaced for flat in flats for piece in flat.pieces)
    with disk.replacing() if is_all else disk.changing("a load"):
        for chunk, memory in disk.visit(list(owner)):
            places = [place for place in chunk_places(owner[chunk], chunk, memory) if place.name in names]
            for piece, those in states.get(chunk, ()):
                rooms = states_in(disk, piece, memory)
                places += [Place(what, piece.member.name, piece.span.start, (rooms[what],)) for what in those]
                disk.present.pop(piece.parameter, None)
                if those:
                    disk.present[piece.parameter] = tuple(those)
            do(reader, places)
    disk.settle()
    if engine._disk_step is not None:
        engine._disk_step.book(flats)
