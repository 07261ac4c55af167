"""``file.py:build``: somebody's model, built on the meta device, where it holds no bytes, or under the fake mode of a simulation."""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from shardbook.errors import ConfigError

NO_TORCH = "a model from a Python file needs torch, which is not here: pip install 'shardbook[train]'"

_PATTERN = re.compile(r"(.+\.py):([A-Za-z_]\w*)")


def is_builder(text: str) -> bool:
    """Whether a text names a function in a Python file.

    >>> is_builder("model.py:build"), is_builder("model.py"), is_builder("llama-3.1-8b")
    (True, True, False)
    """
    return text.endswith(".py") or _PATTERN.fullmatch(text) is not None


@dataclass(frozen=True, kw_only=True)
class Builder:
    """Functions of a Python file. ``batch``: its function of that name, or None."""

    text: str
    name: str
    function: Callable[[], Any]
    batch: Callable[[int, int], Any] | None = None

    def on_meta(self) -> Any:
        """The module that the function returns under ``torch.device("meta")``.

        Raises:
            ConfigError: the code raises, or returns no module.
        """
        import torch

        try:
            with torch.device("meta"):
                model = self.function()
        except Exception as error:  # whatever somebody's code raises
            raise self.broken(f"{self.name}()", error) from error
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"model = {self.text!r}: {self.name}() returned a {type(model).__name__}; it must return an nn.Module")
        return model

    def broken(self, where: str, error: Exception) -> ConfigError:
        """What somebody's code raised, in one line."""
        return _broken(self.text, where, error)


def build(text: str) -> Any:
    """The module that ``file.py:function`` returns under ``torch.device("meta")``.

    Raises:
        ConfigError: as :func:`load` and :meth:`Builder.on_meta`.
    """
    return load(text).on_meta()


def load(text: str) -> Builder:
    """The function that ``file.py:function`` names; the file has run.

    Raises:
        ConfigError: no function named; no such file or function; torch is missing; the file's code raises.
    """
    found = _PATTERN.fullmatch(text)
    if found is None:
        raise ConfigError(f"model = {text!r}: which function builds it is missing; write {text}:build")
    path, name = Path(found[1]), found[2]
    if not path.is_file():
        raise ConfigError(f"model = {text!r}: {path} is {'no file' if path.exists() else 'not there'}; give the file that builds the model")
    if find_spec("torch") is None:
        raise ConfigError(NO_TORCH)
    module = _run(path, text)
    builder = getattr(module, name, None)
    if not callable(builder):
        known = [key for key, value in vars(module).items() if callable(value) and getattr(value, "__module__", "") == module.__name__]
        raise ConfigError(f"model = {text!r}: {path} has no function {name}; it has {', '.join(known) or 'none'}")
    batch = getattr(module, "batch", None)
    return Builder(text=text, name=name, function=builder, batch=batch if callable(batch) else None)


def _run(path: Path, text: str) -> ModuleType:
    """The file as a module, with its folder in front of the path as if it had been started."""
    spec = spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"model = {text!r}: {path} can't be imported; give a Python file")
    module = module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _broken(text, str(path), error) from error
    finally:
        sys.path.remove(str(path.parent.resolve()))
    return module


def _broken(text: str, where: str, error: Exception) -> ConfigError:
    words = " ".join(str(error).split())
    return ConfigError(f"model = {text!r}: {where} raised {type(error).__name__}: {words}")
