"""Whether the tokenizer that the configuration names is the one that made the data. It is not opened."""

from __future__ import annotations

from collections.abc import Mapping

from pretraining.config.errors import UserError
from pretraining.data.files import file_hash
from pretraining.storage import location


def check_tokenizer(path: str, flag: str = "--tokenizer_path") -> None:
    """Raise UserError if there is no file at `path`, which `flag` names."""
    if not location(path).is_file():
        path = str(location(path).resolve())
        raise UserError(f"{flag}={path}: no such file; give the tokenizer of the data, tokenizer.model or .json")


def check_origin(path: str, prepared: Mapping[str, str]) -> None:
    """Raise UserError if data were prepared with another tokenizer than the one at `path`; "": none is given.

    prepared: name of the data -> sha256 of their tokenizer, as meta.json has it; "" where it is not known.
    """
    known = {name: checksum for name, checksum in prepared.items() if checksum}
    if not path or not known:
        return
    check_tokenizer(path)
    actual = file_hash(location(path))
    for name, checksum in known.items():
        if checksum != actual:
            sums = f"sha256 {checksum[:12]}..., not {actual[:12]}..."
            reason = f"{name} was prepared with another tokenizer ({sums})"
            raise UserError(f"--tokenizer_path={path}: {reason}: give that one; prepare wrote a copy next to train/")
