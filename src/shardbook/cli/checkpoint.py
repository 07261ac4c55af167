"""``shardbook checkpoint``: what is in a checkpoint, whether it is whole, and its weights for others."""

import json as jsonlib
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.tree import Tree

from shardbook.checkpoint import manifest
from shardbook.checkpoint.errors import CheckpointError
from shardbook.checkpoint.folder import find
from shardbook.checkpoint.manifest import Manifest
from shardbook.checks import SIZE_EXAMPLE, parse_nbytes
from shardbook.errors import ConfigError
from shardbook.models.config import DecoderConfig
from shardbook.models.llama import beginnings, config_json
from shardbook.tables.sizes import size

NO_TORCH = "checkpoint {action} needs torch, which is not here: pip install 'shardbook[train]'"

_Action = Annotated[Literal["inspect", "verify", "export"], tyro.conf.Positional]
_Path = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT", help="its folder, or a folder of them: the last one")]
_To = Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help="export: a new folder for the safetensors files")]
_Dtype = Annotated[Literal["fp32", "bf16", "fp16"] | None, tyro.conf.arg(help="export: type of the weights (default: as trained)")]
_File = Annotated[str, tyro.conf.arg(metavar="SIZE", help="export: largest file")]
_As = Annotated[
    Literal["model", "transformers"],
    tyro.conf.arg(name="as", help="export: names of the model that was trained, or of transformers' class for a run of shardbook train"),
]
_Config = Annotated[Path | None, tyro.conf.arg(metavar="JSON", help="export: a config.json to put beside the files")]
_Json = Annotated[bool, tyro.conf.arg(help="print it as JSON"), tyro.conf.FlagCreatePairsOff]

_CODES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}


def checkpoint(
    action: _Action, path: _Path, /, *, to: _To = None, dtype: _Dtype = None, file_size: _File = "5GB", as_: _As = "model",
    config: _Config = None, json: _Json = False,
) -> int:  # fmt: skip
    """Inspect a checkpoint (a tree with sizes), verify every byte of it, or export its weights as sharded safetensors."""
    if action != "export" and (to is not None or dtype is not None or config is not None or as_ != "model"):
        raise ConfigError(f"--to, --dtype, --as and --config: no effect on {action}; they belong to export")
    folder = find(path)
    if action == "inspect":
        return _inspect(folder, as_json=json)
    if find_spec("torch") is None:
        raise ConfigError(NO_TORCH.format(action=action))
    if action == "verify":
        return _verify(folder, as_json=json)
    if to is None:
        raise ConfigError("export: --to is missing; give a new folder for the files")
    return _export(folder, to, _form(folder, dtype, file_size, as_, config), as_json=json)


def _verify(folder: Path, *, as_json: bool) -> int:
    from shardbook.checkpoint.verify import faults

    found = list(faults(folder))
    if as_json:
        print(jsonlib.dumps({"checkpoint": str(folder), "whole": not found, "faults": found}, indent=2))
    else:
        print("\n".join(found) if found else f"{folder}: whole: every byte is as it was written")
    return 1 if found else 0


def _form(folder: Path, dtype: str | None, file_size: str, as_: str, config: Path | None) -> Any:
    from shardbook.checkpoint.export import Form

    nbytes = parse_nbytes(file_size)
    if nbytes is None or nbytes < 1:
        raise ConfigError(f"--file-size = {file_size!r}: allowed is a size with its unit, as {SIZE_EXAMPLE}")
    form = Form(dtype=None if dtype is None else _CODES[dtype], file_nbytes=nbytes)
    if as_ == "transformers":
        if config is not None:
            raise ConfigError("--config: no effect beside --as transformers, which writes one; leave one of them out")
        return replace(form, **_as_transformers(folder))
    if config is None:
        return form
    from shardbook.models.local import read_config

    return replace(form, config=read_config(config))


def _as_transformers(folder: Path) -> dict[str, Any]:
    """How to name the weights of a run of ``shardbook train``, and the ``config.json``, from what the run said of its model."""
    try:
        known = manifest.read(folder).content["extra"]["model"]
        if "transformers" in known:
            return {"rename": {"model.": ""}, "config": dict(known["transformers"])}
        decoder = DecoderConfig(**known["decoder"])
        return {"rename": beginnings(decoder.layers), "config": config_json(decoder, int(known["sequence"]))}
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"--as transformers: {folder} doesn't say what its model is, as checkpoints of shardbook train do; "
            f"leave it out, and give the model's config.json with --config"
        ) from error


def _export(folder: Path, to: Path, form: Any, *, as_json: bool) -> int:
    from shardbook.checkpoint.export import export

    files = export(folder, to, form)
    print(jsonlib.dumps({"checkpoint": str(folder), "files": list(map(str, files))}, indent=2) if as_json else "\n".join(map(str, files)))
    return 0


def _inspect(folder: Path, *, as_json: bool) -> int:
    found = manifest.read(folder)
    try:
        shown = summary(folder, found) if as_json else tree(folder, found)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{folder / manifest.NAME}: a field is missing or of another kind ({error!r}): written by no shardbook"
        ) from error
    if as_json:
        print(jsonlib.dumps(shown, indent=2))
    else:
        Console(highlight=False, soft_wrap=True).print(shown)
    return 0


def summary(folder: Path, found: Manifest) -> dict[str, Any]:
    """The main facts, bytes by what they are, and each parameter."""
    content, totals = found.content, _totals(found)
    by_kind: dict[str, int] = {}
    for kinds in totals.values():
        for what, nbytes in kinds.items():
            by_kind[what] = by_kind.get(what, 0) + nbytes
    return {
        "checkpoint": str(folder), "version": content["version"], "written_by": content["written_by"], "step": found.step,
        "ranks": found.num_ranks, "config": content["config"], "nbytes": found.nbytes, "nbytes_by_kind": by_kind,
        "optimizer": None if content["optimizer"] is None else content["optimizer"]["class"],
        "schedulers": [one["class"] for one in content["schedulers"]], "extra": content["extra"],
        "parameters": {name: {**parameter, "nbytes": totals.get(name, {})} for name, parameter in found.parameters.items()},
    }  # fmt: skip


def tree(folder: Path, found: Manifest) -> Tree:
    """Unit by unit, parameter by parameter."""
    facts, totals = summary(folder, found), _totals(found)
    config = ", ".join(f"{key} {value}" for key, value in facts["config"].items() if value not in (None, {}))
    root = Tree(f"{folder}  step {found.step}, {size(found.nbytes)} of {found.num_ranks} ranks\n{config}")
    root.add("  ".join(f"{what} {size(nbytes)}" for what, nbytes in facts["nbytes_by_kind"].items()))
    for unit in found.content["units"]:
        names: list[str] = unit["parameters"]
        branch = root.add(f"{unit['name'] or 'root'}  {size(sum(sum(totals.get(name, {}).values()) for name in names))}")
        for name in names:
            branch.add(_line(name, found.parameters[name], totals.get(name, {})))
    if found.content["buffers"]:
        branch = root.add("buffers")
        for name, one in found.content["buffers"].items():
            branch.add(f"{name}  {one['dtype']} {one['shape']}")
    return root


def _line(name: str, parameter: Mapping[str, Any], nbytes: Mapping[str, int]) -> str:
    parts = "  ".join(f"{what} {size(count)}" for what, count in nbytes.items())
    return f"{name}  {parameter['weight']} {parameter['shape']}{'' if parameter['trainable'] else ' frozen'}  {parts}"


def _totals(found: Manifest) -> dict[str, dict[str, int]]:
    """Bytes of each parameter (or buffer) by what they are: its weight, and each state."""
    totals: dict[str, dict[str, int]] = {}
    for file in found.files:
        for stored in file.tensors:
            kinds = totals.setdefault(stored.name, {})
            kinds[stored.what] = kinds.get(stored.what, 0) + stored.end - stored.begin
    return totals
