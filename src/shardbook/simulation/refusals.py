"""What goes wrong when a model runs without values, in words: which operator, which line, and the ways out.

:func:`explained` stands around every call of somebody's code. What it does not know goes through as it is: it is a fault of that
code, and its own traceback says most.
"""

import linecache
import os
import re
import sysconfig
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._subclasses import fake_tensor

from shardbook.errors import ConfigError, ShardbookError

_PACKAGES = os.sep + "site-packages" + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_OURS = str(Path(__file__).parents[1]) + os.sep
_NUMPY = _PACKAGES + "numpy" + os.sep
_PYTHON = sysconfig.get_paths()["stdlib"] + os.sep
_MEASURE = "measure a real step instead, with sb.measure(model, optimizer) around it"
_ON_CPU = (
    "a simulation runs everything on cpu, whatever device= names: leave devices out, or take them from a tensor that is there (x.device)"
)
_READS = {
    "aten._local_scalar_dense.default": ".item(), bool(), int(), float() or tolist() of a tensor",
    "aten.nonzero.default": "nonzero(), or an index that is a mask",
    "aten.equal.default": "torch.equal()",
    "aten.allclose.default": "torch.allclose()",
    "aten.masked_select.default": "masked_select()",
    "aten._unique2.default": "unique()",
    "aten.bincount.default": "bincount()",
    "aten.repeat_interleave.Tensor": "repeat_interleave() with a tensor of counts",
}
_WANTED = re.compile(r"you tried to allocate (\d+) bytes")
_NO_DEVICE = re.compile(r"not linked with support for|not compiled with CUDA|no NVIDIA driver|no NVIDIA GPU")
_QUOTED = re.compile(r"CustomOpDef\(([\w:.]+)\)|mode: ([\w.]+)|NYI: ([\w.]+)|Could not run '([\w:.]+)'")


@contextmanager
def explained(what: str) -> Generator[None]:
    """Around somebody's code that runs on fake tensors; ``what`` names it: "the model's forward", "build_batch()".

    Raises:
        ConfigError: instead of what torch raises where values are needed, where an operator has no rule for fake tensors, where a
            real tensor or one of another device comes in, and where there is no memory for real ones.
    """
    try:
        yield
    except ShardbookError:
        raise
    except Exception as error:
        said = _said(error)
        if said is None:
            raise
        raise ConfigError(f"{what} {said}") from error


def _said(error: BaseException) -> str | None:
    for one in _chain(error):
        for speaks in _SPEAKERS:
            if (said := speaks(one)) is not None:
                return said
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, and what it was raised in place of: an engine may have wrapped it."""
    one: BaseException | None = error
    while one is not None:
        yield one
        one = one.__cause__ or one.__context__


def _of_values(error: BaseException) -> str | None:
    if isinstance(error, fake_tensor.DataDependentOutputException):
        return _needs_values(_operator(error), error, "reads a value")
    if isinstance(error, fake_tensor.DynamicOutputShapeException):
        return _needs_values(_operator(error), error, "makes a tensor whose size depends on values")
    if isinstance(error, RuntimeError) and ".numpy() is not supported for tensor subclasses" in str(error):
        return _needs_values("numpy()", error, "reads values")
    if isinstance(error, TypeError) and "FakeTensor.__format__" in str(error):
        return _needs_values("a format such as f'{x:.3f}'", error, "reads a value")
    if type(error).__name__ == "GuardOnDataDependentSymNode":
        return _needs_values("a comparison with a size that depends on values", error, "reads a value")
    return None


def _needs_values(operator: str, error: BaseException, does: str) -> str:
    known = f" ({_READS[operator]})" if operator in _READS else ""
    return (
        f"needs values, and the tensors of a simulation have none: {operator}{known} {does} {place(error)}; there are two ways out: "
        f"{_MEASURE}; or write that line without it: a constant in place of the value, torch.where in place of a branch or a mask"
    )


def _of_rules(error: BaseException) -> str | None:
    text = str(error)
    unsupported = isinstance(error, fake_tensor.UnsupportedOperatorException)
    if not unsupported and "no fake impl registered" not in text and not text.startswith("NYI: "):
        return None
    name = _operator(error) if unsupported else _quoted(text)
    remedy = f'give it one with @torch.library.register_fake("{_qualified(name)}"), which returns an empty result of its shape and type'
    if name.startswith("aten."):
        remedy = "torch itself has none for it; do without it"
    return f"calls {name} {place(error)}, an operator without a rule for fake tensors; {remedy}; or {_MEASURE}"


def _of_strangers(error: BaseException) -> str | None:
    text = str(error)
    if isinstance(error, fake_tensor.FakeTensorDeviceMismatchError):
        return f"mixes devices {place(error)}: {text}; {_ON_CPU}"
    if isinstance(error, (RuntimeError, AssertionError)) and _NO_DEVICE.search(text):
        return f"moves something to a device {place(error)}; {_ON_CPU}"
    if isinstance(error, AssertionError) and "convert all Tensors to FakeTensors first" in text:
        found = text.rpartition("Found in ")[2]
        return (
            f"uses a real tensor {place(error)}, in {found}; make it inside the function that builds the model or the batch, "
            "or register it with register_buffer, so that it is fake as the others are"
        )
    return None


def _of_memory(error: BaseException) -> str | None:
    text = str(error)
    wanted = _WANTED.search(text)
    if not isinstance(error, MemoryError) and wanted is None:
        return None
    amount = f"{int(wanted[1]):,} bytes" if wanted else text or "more bytes"
    return (
        f"asks for real memory {place(error)}: {amount}, where this machine has {machine_nbytes():,} bytes in all; a simulation needs"
        " none: make tensors with torch's own functions (torch.empty, torch.randn), not with numpy or from a checkpoint, and inside"
        " the function that builds the model or the batch"
    )


_SPEAKERS: tuple[Callable[[BaseException], str | None], ...] = (_of_values, _of_rules, _of_strangers, _of_memory)


def place(error: BaseException) -> str:
    """``at model.py:12 in forward: `if x.sum() > 0:` `` of the innermost line that is no library's below."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        file = frame.f_code.co_filename
        if not _is_foreign(file):
            text = linecache.getline(file, line).strip()
            where = f"at {Path(file).name}:{line} in {frame.f_code.co_name}"
            return f"{where}: `{text}`" if text else where
    return "in torch's own code"


def machine_nbytes() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _is_foreign(file: str) -> bool:
    library = file.startswith(("<", _TORCH, _OURS)) or _NUMPY in file
    return library or (file.startswith(_PYTHON) and _PACKAGES not in file)


def _operator(error: Any) -> str:
    return str(error.func)


def _quoted(text: str) -> str:
    found = _QUOTED.search(text)
    return "an operator" if found is None else next(name for name in found.groups() if name)


def _qualified(name: str) -> str:
    """``mylib.twice.default`` as register_fake wants it: ``mylib::twice``."""
    return name if "::" in name else "::".join(name.split(".")[:2])
