"""Input by URL, such as `https://HOST/a.parquet` or `hf://datasets/NAME`, read through fsspec.

fsspec reads ranges of files, so that of Parquet only the column of the text is loaded. It has a package for each
protocol, and says which one is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import IO, Any

from pretraining.config.errors import UserError
from pretraining.data.hashing import short_hash

_VERSION = ("ETag", "etag", "LastModified", "mtime", "oid", "sha", "blob_id")  # as the protocols name it
_HEADERS = ("Last-Modified", "Content-MD5", "Digest")  # of HTTP, where none of those is known


@dataclass(frozen=True)
class Url:
    """A file at a URL, with what `prepare` uses of pathlib.Path."""

    url: str

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """The last part, without a query."""
        return PurePosixPath(self.url.partition("?")[0]).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    def with_suffix(self, suffix: str) -> Url:
        return Url(str(PurePosixPath(self.name).with_suffix(suffix)))

    def stat(self) -> SimpleNamespace:
        """Return the size, and a number for the version. UserError if the server names no size."""
        info = self._info()
        if info.get("size") is None:
            raise UserError(f"{self.url}: its server does not say how large it is: download the file first")
        names = [] if _names(info, _VERSION) else _names(info, _HEADERS)
        version = short_hash(*(str(info.get(name)) for name in (*_VERSION, *names)))
        return SimpleNamespace(st_size=int(info["size"]), st_mtime_ns=int(version, 16))

    def has_version(self) -> bool:
        """Return whether the server names anything that another content of the same size would change."""
        return bool(_names(self._info(), (*_VERSION, *_HEADERS)))

    def _info(self) -> dict[str, Any]:
        system, path = _open_system(self.url)
        try:
            return dict(system.info(path))
        except Exception as error:
            raise unreachable(self.url, error) from error

    def open(self, mode: str = "rb") -> IO[bytes]:
        system, path = _open_system(self.url)
        try:
            return system.open(path, mode)
        except Exception as error:
            raise unreachable(self.url, error) from error


def _names(info: dict[str, Any], names: tuple[str, ...]) -> list[str]:
    return [name for name in names if info.get(name) is not None]


def is_url(name: str) -> bool:
    """Return whether an input is a URL."""
    return "://" in name


def source(name: str) -> Path | Url:
    """Return the file of a name."""
    return Url(name) if is_url(name) else Path(name)


def expand(url: str) -> tuple[list[Url], bool]:
    """Return the files below a URL, and whether it is a folder or a pattern. UserError if it cannot be reached."""
    system, path = _open_system(url)
    try:
        if PurePosixPath(path.partition("?")[0]).suffix and "*" not in path and not _is_folder(system, path):
            return [Url(url)], False
        names = system.glob(path) if "*" in path else system.find(path)
    except Exception as error:
        raise unreachable(url, error) from error
    return [Url(system.unstrip_protocol(name)) for name in sorted(names)], True


def _is_folder(system: Any, path: str) -> bool:
    """Return whether a path whose name has a dot is a folder. HTTP has none, and would load the file to find out."""
    return "http" not in system.protocol and bool(system.isdir(path))


def _open_system(url: str) -> tuple[Any, str]:
    try:
        import fsspec

        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise UserError(f"{url}: a URL needs fsspec and its package of this protocol: pip install {_package(url)} "
                        f"({error})") from error  # fmt: skip
    except ValueError as error:
        raise UserError(f"{url}: {error}: use https://, hf://datasets/NAME, s3:// or gs://") from error


def _package(url: str) -> str:
    names = {"hf": "huggingface_hub", "s3": "s3fs", "gs": "gcsfs"}
    return f"fsspec {names.get(url.partition('://')[0], 'aiohttp')}"


def unreachable(url: str, error: Exception) -> UserError:
    """Clients raise exceptions of their own."""
    return UserError(f"{url}: cannot be read ({type(error).__name__}: {error}): check address, access and network")
